"""Code that asks a quantized tensor for its memory may compare addresses, and can read nothing."""

import copy
import ctypes
import io
import pickle
import re
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pennyweight.core.storage import REFUSAL
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from tests.tensors import SPECS, quantized

SENTENCE = re.escape(REFUSAL)
ALL = pytest.mark.parametrize("name", SPECS)


@ALL
def test_an_address_is_equal_for_the_same_parts_and_only_for_them(name: str) -> None:
    w, other = quantized(name), quantized(name)
    for alias in (w, w.detach(), nn.Parameter(w, requires_grad=False), w.t()):
        assert alias.data_ptr() == w.data_ptr() == alias.const_data_ptr() == torch.Tensor.data_ptr(alias)
        assert hash(alias.data_ptr()) == hash(w.data_ptr())
        assert alias.untyped_storage().data_ptr() == w.untyped_storage().data_ptr()
    for different in (other, w.clone(), copy.deepcopy(w)):
        assert different.data_ptr() != w.data_ptr()
        assert different.untyped_storage().data_ptr() != w.untyped_storage().data_ptr()
        assert {w.data_ptr(): "w"}.get(different.data_ptr()) is None
    assert w.data_ptr() != w.codes.data_ptr()
    assert w.data_ptr() != 0
    assert w.data_ptr()
    assert torch._C._is_alias_of(w, w.detach())
    assert w.is_set_to(w.detach())
    assert not w.is_set_to(other)
    assert not torch.zeros(3).is_set_to(w)


def test_tensors_that_share_codes_and_differ_in_scales_are_different() -> None:
    w = quantized("int8_row")
    assert w.parts.scale is not None
    louder = w.with_(scale=w.parts.scale * 2)
    assert louder.parts.codes is w.parts.codes
    assert louder.data_ptr() != w.data_ptr()


def test_there_is_no_address_where_torch_has_none() -> None:
    assert QT.from_float(torch.zeros(0, 32), SPECS["int8_row"]).data_ptr() == 0
    w = quantized("int8_row").to("meta")
    assert w.data_ptr() == w.untyped_storage().data_ptr() == torch.empty(3, device="meta").data_ptr() == 0


READS: dict[str, Callable[[Any], Any]] = {
    "ctypes.cast": lambda p: ctypes.cast(p, ctypes.POINTER(ctypes.c_ubyte)),
    "ctypes.string_at": lambda p: ctypes.string_at(p, 4),
    "int": int,
    "hex": hex,
    "numpy": np.uint64,
    "offset": lambda p: p + 4,
    "offset from": lambda p: 4 + p,
    "distance": lambda p: p - 4,
    "alignment": lambda p: p % 16,
    "order": lambda p: sorted([p, 5]),
    "past": lambda p: p >= 5,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_an_address_is_no_number(read: Callable[[Any], Any]) -> None:
    w = quantized("int8_row")
    for address in (w.data_ptr(), w.untyped_storage().data_ptr()):
        with pytest.raises((RuntimeError, ctypes.ArgumentError), match=SENTENCE):
            read(address)


def test_where_in_its_storage_a_tensor_begins_has_no_answer() -> None:
    w = quantized("int8_row")
    with pytest.raises(RuntimeError, match=SENTENCE):
        assert w.data_ptr() == w.untyped_storage().data_ptr()


def test_pybind_takes_no_address() -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        torch._C._construct_storage_from_data_pointer(quantized("int8_row").data_ptr(), torch.device("cpu"), 8)


STORAGE: dict[str, Callable[[Any], Any]] = {
    **{n: methodcaller(n) for n in ("tolist", "cpu", "clone", "pin_memory", "share_memory_", "_share_fd_cpu_")},
    "item": lambda s: s[0],
    "list": list,
    "bytes": bytes,
    "write": lambda s: s.__setitem__(0, 1),
    "fill": lambda s: s.fill_(0),
    "resize": lambda s: s.resize_(0),
    "pickle": pickle.dumps,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "torch.save": lambda s: torch.save(s, io.BytesIO()),
    "another": lambda s: type(s)(8, device="cpu"),
    "another in shared memory": lambda s: type(s)._new_shared(8),
}


@pytest.mark.parametrize("use", STORAGE.values(), ids=STORAGE)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_storage_tells_its_size_and_nothing_else(use: Callable[[Any], Any]) -> None:
    w = quantized("int4_group")
    storage = w.untyped_storage()
    assert isinstance(storage, torch.UntypedStorage)
    assert storage.nbytes() == storage.size() == w.nbytes == torch.Tensor.untyped_storage(w).nbytes()
    with pytest.raises(RuntimeError, match=SENTENCE):
        use(storage)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_typed_storage_holds_no_numbers() -> None:
    w = quantized("int8_row")
    typed = w.storage()
    assert typed.data_ptr() == w.untyped_storage().data_ptr()
    for use in (list, lambda s: torch.save(s, io.BytesIO()), lambda s: torch.empty(0).set_(s), lambda s: s.clone()):
        with pytest.raises((RuntimeError, NotImplementedError)):
            use(typed)
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        torch.UntypedStorage(w.nbytes).copy_(w.untyped_storage())


def test_native_code_gets_an_error_and_no_null_pointer() -> None:
    """``to_dlpack`` asks no class of tensors; what it made could be read to the end of the process."""
    for w in (quantized("int8_row"), quantized("int8_row").t(), quantized("int8_row").to(torch.float16)):
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            torch.utils.dlpack.to_dlpack(w)
        with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match="Cannot access data pointer"):
            torch._C.TensorBase.data_ptr(w)


@pytest.mark.filterwarnings("ignore::pennyweight.FallbackWarning")
def test_ways_that_hand_out_numbers_hand_out_the_value() -> None:
    w = quantized("int8_row")
    exact = w.dequantize()
    assert torch.equal(torch.from_dlpack(w), exact)
    assert np.array_equal(np.asarray(w), exact.numpy())
    assert w.tolist() == exact.tolist()
    assert torch.equal(w.view(torch.uint8), exact.view(torch.uint8))
    assert torch.equal(torch.empty(0).set_(w), exact)
    assert not hasattr(w, "__cuda_array_interface__")

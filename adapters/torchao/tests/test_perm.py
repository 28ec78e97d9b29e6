"""torchao has no weight whose channels are stored in another order, so its classes and attributes do not claim one."""

import pytest
import torch

import pennyweight_torchao.attributes  # noqa: F401  (w.qdata and its kin)
from pennyweight.io.codecs.torchao.flattened_safetensors import find_view, view_of
from pennyweight_torchao.v0_8_aqt import AffineQuantizedTensor as Founding
from tests.tensors import quantized


def test_no_class_claims_a_weight_in_another_order() -> None:
    w = quantized("int8_perm")
    plain = w.with_(perm=None)
    assert find_view(plain) is not None
    assert isinstance(plain, find_view(plain))
    assert find_view(w) is None
    assert not isinstance(w, find_view(plain))
    with pytest.raises(ValueError, match="with permuted channels"):
        view_of(w)
    for name in ("tensor_impl", "qdata"):
        with pytest.raises(AttributeError, match="stored with permuted channels"):
            getattr(w, name)
    assert not hasattr(w, "qdata")
    assert isinstance(plain, Founding)
    assert not isinstance(w, Founding)
    assert torch.equal(w.codes, plain.codes)

"""A quantized tensor behaves like the float tensor it was."""

import contextlib
import copy
import io
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

import pennyweight as pw
from pennyweight.core import blocks
from pennyweight.core.formats import get_format
from pennyweight.core.numerics import to_stored
from pennyweight.core.ops.inplace import write_
from pennyweight.core.qparams import Params
from pennyweight.core.spec import SPECS as core_specs
from pennyweight.core.spec import TINYGEMM, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from tests import forked
from tests.tensors import INT8_STATIC, INT8_TOKEN, REORDERED, SPECS, UINT8_TOKEN, again, quantized


@pytest.fixture(autouse=True)
def unwarned() -> None:
    pw.reset_fallbacks()


ALL = pytest.mark.parametrize("name", SPECS)
MATRIX = (32, 96)


def same(a: Any, b: Any) -> None:
    """Equal in everything: value bits, every stored part, spec, dtype, activation, order of axes."""
    assert type(a) is type(b) is QT
    assert (a.spec, a.act, a.axes, a.dtype, a.shape, a.readonly) == (
        b.spec,
        b.act,
        b.axes,
        b.dtype,
        b.shape,
        b.readonly,
    )
    for mine, theirs in zip(a.parts, b.parts, strict=True):
        assert (mine is None) == (theirs is None)
        if isinstance(mine, QT):
            same(mine, theirs)
        elif mine is not None:
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(a.dequantize(), b.dequantize())


def storages(w: QT) -> list[int]:
    out: list[int] = []
    for p in w.parts:
        out += storages(p) if isinstance(p, QT) else [] if p is None else [p.data_ptr()]
    return out


# -- dtype, device, size ---------------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize(
    "cast",
    [methodcaller("half"), methodcaller("bfloat16"), methodcaller("double"), methodcaller("to", torch.float16),
     methodcaller("to", torch.ones(1, dtype=torch.bfloat16))],
)  # fmt: skip
def test_a_cast_changes_the_logical_dtype_only(name: str, cast: Callable[[Any], Any]) -> None:
    w = quantized(name)
    y = cast(w)
    assert isinstance(y, QT)
    assert y.dtype == cast(torch.ones(1)).dtype
    assert y.nbytes == w.nbytes
    assert torch.equal(y.dequantize(), w.dequantize(y.dtype))
    assert w.to(torch.float32) is w
    assert F.linear(torch.ones(2, 96, dtype=y.dtype), y).dtype == y.dtype


def test_a_cast_to_integers_is_a_fallback() -> None:
    w = quantized("int8_row")
    with pytest.warns(pw.FallbackWarning):
        assert torch.equal(w.to(torch.int32), w.dequantize().to(torch.int32))


@ALL
def test_autocast_decides_the_output_dtype(name: str) -> None:
    w, x = quantized(name), torch.randn(3, 96)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outs = [F.linear(x, w), x @ w.t(), torch.matmul(x, w.T), F.linear(x.half(), w)]
        wide = F.linear(x.double(), w)  # float64 stays, as in torch's own products
    assert [y.dtype for y in outs] == [torch.bfloat16] * 4
    assert torch.equal(wide, F.linear(x.double(), w))
    assert wide.dtype is torch.float64
    reference = F.linear(x.bfloat16(), w.dequantize(torch.bfloat16))
    for y in outs:
        torch.testing.assert_close(y, reference, rtol=3e-2, atol=0.2)


@ALL
def test_meta(name: str) -> None:
    w = quantized(name)
    m = w.to("meta")
    assert F.linear(torch.randn(3, 96, device="meta"), m).shape == (3, w.shape[0])
    assert isinstance(m, QT)
    assert m.device.type == "meta"
    assert (m.shape, m.dtype, m.spec, m.nbytes) == (w.shape, w.dtype, w.spec, w.nbytes)
    back = torch.empty_like(m, device="cpu")
    back.copy_(w)
    same(back, w)


@ALL
def test_sizes_are_true(name: str) -> None:
    w = quantized(name)

    def stored(t: Any) -> int:
        return sum(stored(p) if isinstance(p, QT) else p.numel() * p.itemsize for p in t.parts if p is not None)

    assert w.nbytes == stored(w) < 32 * 96 * 4 / 2
    assert w.numel() * w.element_size() == w.nbytes
    assert w.untyped_storage().nbytes() == w.nbytes
    assert nn.Parameter(w, requires_grad=False).nbytes == w.nbytes


def test_to_empty_gives_a_model_that_can_be_filled() -> None:
    w = quantized("int4_bits")
    with torch.device("meta"):
        model = nn.Linear(96, 32)
    model.weight = nn.Parameter(w.to("meta"), requires_grad=False)
    model.to_empty(device="cpu")
    model.load_state_dict({"weight": w, "bias": torch.zeros(32)})
    same(model.weight.detach(), w)


# -- writing ---------------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "copy_": lambda w, d: w.copy_(d),
    "add_": lambda w, d: w.add_(d),
    "add_alpha": lambda w, d: w.add_(d, alpha=0.5),
    "add_number": lambda w, d: w.add_(0.25),
    "sub_": lambda w, d: w.sub_(d),
    "mul_": lambda w, d: w.mul_(3),
    "mul_tensor": lambda w, d: w.mul_(d),
    "div_": lambda w, d: w.div_(3),
    "fill_": lambda w, d: w.fill_(0.7),
    "zero_": lambda w, d: w.zero_(),
    "clamp_": lambda w, d: w.clamp_(-0.5, 0.5),
    "neg_": lambda w, d: w.neg_(),
    "addcmul_": lambda w, d: w.addcmul_(d, d, value=0.1),
    "addcdiv_": lambda w, d: w.addcdiv_(d, torch.ones_like(d), value=-0.1),
    "lerp_": lambda w, d: w.lerp_(d, 0.3),
    "iadd": lambda w, d: w.__iadd__(d),
    "through data": lambda w, d: w.data.add_(d),
    "out": lambda w, d: torch.mul(d, 2, out=w),
    "index_fill_": lambda w, d: w.index_fill_(0, torch.tensor([1]), 0.0),
    "masked_fill_": lambda w, d: w.masked_fill_(d > 0, 0.0),
}


FRESH = {"copy_", "fill_", "zero_", "clamp_", "neg_", "out", "index_fill_", "masked_fill_"}  # no arithmetic update


def same_update(w: QT, old: QT, expected: torch.Tensor) -> None:
    """w is ``expected`` under scales chosen for it, or, in blocks that it still suits, under the old ones."""
    fresh = again(expected, w)
    spec = w.spec
    if spec.format.kind != "int" or spec.zero_point or spec.offset is not None or isinstance(spec.scale, QuantSpec):
        same(w, fresh)
        return
    new, kept, had = w.scale, w.scale != fresh.scale, old.scale
    assert torch.equal(new[kept], had[kept])
    same(w, again(expected, w, Params(new)))
    # In units of a scale that was kept: nothing lies more than half a step beyond the codes, something near their end.
    stored = to_stored(expected, w.perm, w.pre_scale)
    steps = (blocks.split(blocks.pad(stored, spec.block), new.shape) / blocks.expand(had)).abs()
    reach = steps.amax(blocks.inner_axes(2))[kept]
    least, most = sorted([-(spec.format.lo - spec.mid), spec.format.hi - spec.mid])
    assert bool(((reach >= least - 0.25) & (reach <= most + 0.5)).all())


@pytest.mark.parametrize("write", WRITES)
@ALL
def test_a_write_requantizes_into_the_same_storages(name: str, write: str) -> None:
    w = quantized(name)
    old = w.clone()
    delta = torch.randn(MATRIX)
    expected = w.dequantize()
    WRITES[write](expected, delta)
    before, alias = storages(w), w.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pw.FallbackWarning)
        returned = WRITES[write](w, delta)
    assert storages(w) == before
    same(alias, w)
    if write != "through data":
        assert returned is w
    if write == "masked_fill_" and isinstance(w.spec.offset, torch.dtype):
        assert not (w.dequantize()[expected == 0] != 0).any()  # see test_pruning.py
    elif write in FRESH:
        same(w, again(expected, w))
    else:
        same_update(w, old, expected)


@ALL
def test_small_updates_neither_add_up_nor_drift(name: str) -> None:
    """A step below half a code is rounded away, however often it comes; the scale does not creep."""
    w = quantized(name)
    before, noise = w.dequantize(), 1e-6 * torch.randn(MATRIX)
    spec, symmetric = w.spec, w.spec.format.kind == "int" and w.spec.offset is None and not w.spec.zero_point
    w.add_(noise)
    once = w.clone()
    for _ in range(50):
        w.add_(noise)
        w.sub_(noise)
    assert (w.dequantize() - before).norm() < (1e-4 if spec.format.kind != "float" else 0.05) * before.norm()
    if symmetric:
        assert torch.equal(w.dequantize(), before)
        same(w, once)


def test_an_update_that_outgrows_or_leaves_a_block_chooses_its_scale_anew() -> None:
    w = QT.from_float(torch.tensor([[1.0, -0.5], [1.0, -0.5]]), QuantSpec(get_format("int8"), (-1,)))
    old = w.scale.clone()
    w.mul_(torch.tensor([[2.0], [0.9]]))
    assert not (w.scale == old).any()
    torch.testing.assert_close(w.dequantize(), torch.tensor([[2.0, -1.0], [0.9, -0.45]]), rtol=0.02, atol=0)


@ALL
def test_merging_through_data(name: str) -> None:
    """PEFT merges with ``weight.data += delta`` and unmerges with ``-=``."""
    layer = nn.Linear(96, 32)
    layer.weight = nn.Parameter(quantized(name), requires_grad=False)
    old, before, ptrs = layer.weight.detach().clone(), layer.weight.dequantize(), storages(layer.weight)
    delta = 0.5 * torch.randn(MATRIX)
    layer.weight.data += delta
    assert storages(layer.weight) == ptrs
    assert isinstance(layer.weight, nn.Parameter)
    merged = layer.weight.detach().clone()
    same_update(merged, old, before + delta)
    layer.weight.data -= delta
    same_update(layer.weight.detach(), merged, merged.dequantize() - delta)
    unmerged = layer.weight.detach().clone()
    layer.weight.data = before
    same_update(layer.weight.detach(), unmerged, before)


def test_data_of_another_dtype_is_taken_over() -> None:
    """PEFT makes a model float32 for training by ``param.data = param.data.float()``."""
    layer = nn.Linear(64, 8).bfloat16()
    pw.quantize_(layer, pw.Int8WeightOnlyConfig())
    codes, param = layer.weight.codes.clone(), layer.weight
    for p in layer.parameters():
        p.data = p.data.float()
    assert layer.weight is param
    assert param.dtype == torch.float32
    assert torch.equal(param.codes, codes)
    x = torch.randn(2, 64, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    with pytest.raises(ValueError, match=r"cannot be replaced by \(4, 64\)"):
        param.data = param.data[:4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["int8_row", "int4_group", "torch_int4"])
def test_data_takes_the_dtype_of_float_values(name: str, dtype: torch.dtype) -> None:
    """As for a plain parameter: it stays the same object and takes the dtype; earlier aliases keep the old value."""
    old = quantized(name)
    param = nn.Parameter(old, requires_grad=False)
    alias, before = param.data, old.dequantize()
    param.data = value = torch.randn(MATRIX, dtype=dtype)
    assert isinstance(param, QT)
    assert isinstance(param, nn.Parameter)
    assert (param.dtype, param.dequantize().dtype, param.spec) == (dtype, dtype, old.spec)
    same(param.detach(), write_(old.with_(dtype=dtype).clone(), value, update=True))
    assert torch.equal(alias.dequantize(), before)
    assert F.linear(torch.randn(2, MATRIX[1], dtype=dtype), param).dtype == dtype
    param.data = alias  # a swap of weights and back, as for a moving average
    assert param.dtype == before.dtype
    assert torch.equal(param.dequantize(), before)


def test_data_of_a_tied_parameter_and_of_quantized_values_of_another_spec() -> None:
    layers = nn.ModuleList([nn.Embedding(8, 64), nn.Linear(64, 8, bias=False)])
    layers[1].weight = layers[0].weight
    pw.quantize_(layers, "int8")
    layers[0].weight.data = torch.ones(8, 64, dtype=torch.bfloat16)
    assert layers[1].weight is layers[0].weight
    assert layers[1].weight.dtype == torch.bfloat16
    other = nn.Linear(64, 8).half()
    pw.quantize_(other, "int4:32")
    layers[0].weight.data = other.weight.data
    assert (layers[1].weight.dtype, layers[1].weight.spec) == (torch.float16, other.weight.spec)
    assert torch.equal(layers[1].weight.dequantize(), other.weight.dequantize())


def test_data_in_inference_mode_leaves_a_parameter_that_can_be_trained_through() -> None:
    layer = nn.Linear(64, 8)
    pw.quantize_(layer, "int8")
    with torch.inference_mode():
        layer.weight.data = torch.ones(8, 64)
    x = torch.randn(2, 64, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2, 64), 8.0), rtol=0.01, atol=0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(96), r"\(4, 96\) .* cannot be replaced by \(96,\); assign a new parameter"),
        (torch.ones(8, 96), r"cannot be replaced by \(8, 96\); assign a new parameter"),
        (torch.ones(4, 96, dtype=torch.int32), r"values of torch.int32; expected one of float32"),
        (torch.ones(4, 96, device="meta"), r"on cpu cannot be replaced by values on meta; assign a new parameter"),
        (3, r"data of a quantized tensor must be a tensor, got 3"),
    ],
    ids=["broadcast", "shape", "integers", "meta", "number"],
)
def test_data_that_does_not_fit_changes_nothing(value: Any, message: str) -> None:
    w = quantized("int8_row", (4, 96))
    before = w.clone()
    with pytest.raises(ValueError, match=message):
        w.data = value
    same(w, before)


@ALL
def test_writing_what_stands_there_changes_no_bit(name: str) -> None:
    """Quantizing a dequantized value anew may shrink its largest elements; a no-op must not."""
    w = quantized(name)
    before = w.clone()
    w.copy_(w.dequantize())
    w.data = w.dequantize()
    w.add_(0)
    same(w, before)


def test_a_shape_does_not_change_in_place() -> None:
    w = quantized("int8_row", (4, 96))
    for change in (w.t_, lambda: w.unsqueeze_(0), lambda: w.resize_(2, 2), lambda: w[:1].clone().squeeze_()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pw.FallbackWarning)
            with pytest.raises(RuntimeError, match=r"in place|cannot be resized"):
                change()
    assert w.resize_(4, 96) is w


def test_empty_like_is_quantized_by_name_and_float_inside_torch() -> None:
    w = quantized("int8_row", (8, 8))
    assert isinstance(torch.empty_like(w), QT)
    with pytest.warns(pw.FallbackWarning):
        assert torch.equal(torch.matrix_power(w, 0), torch.eye(8))


def test_copying_between_equal_specs_is_exact_whatever_the_layout() -> None:
    for source, target in (("int4_group", "torch_int4"), ("torch_int4", "int4_bits"), ("int4_bits", "int4_group")):
        a, b = quantized(source), quantized(target)
        b.copy_(a)
        assert torch.equal(a.dequantize(), b.dequantize())
        assert b.spec.layout == SPECS[target].layout
        plain = torch.empty(MATRIX)
        plain.copy_(a)
        assert torch.equal(plain, a.dequantize())


@ALL
def test_item_assignment(name: str) -> None:
    w = quantized(name)
    expected = w.dequantize()
    expected[0, 3] = 1.0
    expected[5] = 2.0
    with pytest.warns(pw.FallbackWarning, match="__setitem__"):
        w[0, 3] = 1.0
    first = w.dequantize()
    first[5] = 2.0
    w[5] = torch.full((96,), 2.0)
    same(w, again(first, w))
    plain = torch.zeros(2, *MATRIX)
    plain[1] = w
    assert torch.equal(plain[1], w.dequantize())


def test_bad_values_are_refused_by_name() -> None:
    x = torch.randn(4, 64)
    x[1, 2], x[3, 4] = float("nan"), float("inf")
    with pytest.raises(ValueError, match=r"layers\.0\.weight: 2 of 256 values are NaN or inf"):
        QT.from_float(x, SPECS["int8_row"], name="layers.0.weight")
    w = quantized("int8_row", (4, 64))
    before = w.dequantize()
    for write in (lambda: w.copy_(x), lambda: w.add_(x), lambda: w.fill_(float("nan")), lambda: w.div_(0)):
        with pytest.raises(ValueError, match="NaN or inf"):
            write()
    assert torch.equal(w.dequantize(), before)
    with pytest.raises(ValueError, match="only floating-point"):
        QT.from_float(torch.ones(4, 4, dtype=torch.int32), SPECS["int8_row"])
    with pytest.raises(TypeError, match=r"use AffineQuantizedTensor\.from_float"):
        QT(x)  # type: ignore[arg-type]


# -- copies and other processes --------------------------------------------------------------------------------------


@ALL
def test_rebuilding_as_accelerate_does(name: str) -> None:
    w = nn.Parameter(quantized(name), requires_grad=False)
    new = type(w)(w.to("cpu"), requires_grad=False)
    same(new, w.detach())
    assert storages(new) == storages(w)  # type: ignore[arg-type]
    assert not new.requires_grad
    assert nn.Parameter(quantized(name)).requires_grad


@ALL
@pytest.mark.parametrize("act", [None, INT8_STATIC], ids=["weight_only", "static"])
def test_deepcopy_and_pickle(name: str, act: Any) -> None:
    plain = quantized(name, act=act)
    for w in (plain, nn.Parameter(plain, requires_grad=False), nn.Parameter(plain), plain.t(), plain[:7]):
        for new in (copy.deepcopy(w), pickle.loads(pickle.dumps(w)), saved(w)):
            same(new, w) if type(w) is QT else None
            assert isinstance(new, nn.Parameter) == isinstance(w, nn.Parameter)
            assert new.requires_grad == w.requires_grad
            assert not set(storages(new)) & set(storages(w))
    layer = nn.Linear(96, 32)
    layer.weight = nn.Parameter(plain, requires_grad=False)
    twin = copy.deepcopy(nn.ModuleList([layer, layer]))
    assert twin[0].weight is twin[1].weight


def saved(w: Any) -> Any:
    file = io.BytesIO()
    torch.save({"w": w}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["w"]


LOAD = """
import sys, torch
import pennyweight
state = torch.load(sys.argv[1], weights_only=True)
torch.save({name: w.dequantize() for name, w in state.items()}, sys.argv[2])
"""


def test_loading_in_a_process_that_only_imports_pennyweight(tmp_path: Path) -> None:
    state = {name: quantized(name) for name in SPECS}
    torch.save(state, tmp_path / "state.pt")
    run = forked.run(["-W", "error", "-c", LOAD, tmp_path / "state.pt", tmp_path / "out.pt"], check=True)
    assert run.stdout == run.stderr == ""
    out = torch.load(tmp_path / "out.pt", weights_only=True)
    for name, w in state.items():
        assert torch.equal(out[name], w.dequantize()), name


def test_a_pickle_holds_one_global_of_ours_and_a_newer_version_is_refused() -> None:
    w = quantized("int8_row")
    rebuild, args = w.__reduce_ex__(2)[:2]
    assert rebuild.__module__ == "pennyweight.core.tensor"
    with pytest.raises(ValueError, match="version 3; this release reads 1 to 2"):
        rebuild(args[0].replace('"version": 1', '"version": 3'), *args[1:])


@ALL
def test_sharing_memory(name: str) -> None:
    w = quantized(name)
    before = w.dequantize()
    assert not w.is_shared()
    assert w.share_memory_() is w
    assert w.is_shared()
    assert torch.equal(w.dequantize(), before)
    model = nn.Sequential(nn.Linear(96, 32))
    model[0].weight = nn.Parameter(quantized(name), requires_grad=False)
    model.share_memory()
    assert model[0].weight.is_shared()
    x = torch.randn(2, 96)
    torch.testing.assert_close(model(x), F.linear(x, model[0].weight.dequantize(), model[0].bias), rtol=2e-2, atol=0.1)


def double_first_row(inbox: Any, outbox: Any) -> None:
    """In the child: read tensors, answer with their values, and write to the first through shared memory."""
    torch.set_num_threads(1)  # as DataLoader does: a forked child that enters OpenMP waits for threads it has not
    tensors = inbox.get()
    outbox.put([w.dequantize() for w in tensors])
    tensors[0].mul_(2)
    outbox.put(None)
    inbox.get()  # stay until the parent has received what is shared


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_another_process(method: str) -> None:
    tensors = [quantized(name) for name in ("int8_group", "int4_bits", "nf4_double", "mxfp8")]
    before = [w.dequantize() for w in tensors]
    context = mp.get_context(method)
    inbox, outbox = context.Queue(), context.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork in a process with threads
        child = context.Process(target=double_first_row, args=(inbox, outbox))
        child.start()
    inbox.put(tensors)
    for mine, theirs in zip(before, outbox.get(timeout=60), strict=True):
        assert torch.equal(mine, theirs)
    outbox.get(timeout=60)
    same(tensors[0], QT.from_float(before[0] * 2, tensors[0].spec))
    inbox.put(None)
    child.join(timeout=60)
    assert child.exitcode == 0


@pytest.mark.parametrize("act", [None, INT8_TOKEN], ids=["weight_only", "dynamic"])
def test_threads(act: Any) -> None:
    layers = [quantized(name, act=act) for name in ("int8_row", "int4_group", "int4_bits")]
    x = torch.randn(8, 5, 96)
    expected = [[F.linear(row, w) for w in layers] for row in x]
    got: list[Any] = [None] * 8
    start = threading.Barrier(8)

    def work(i: int) -> None:
        start.wait()
        for _ in range(20):
            got[i] = [F.linear(x[i], w) for w in layers]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for mine, theirs in zip(got, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a, b)


# -- plain values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in SPECS if n not in REORDERED])
def test_tensor_impl_gives_plain_values_whatever_the_layout(name: str) -> None:
    w = quantized(name, (32, 90)) if name != "torch_int4" else quantized(name)
    for view in (w, w.t()):
        plain = view.tensor_impl
        assert plain.int_data.shape == view.shape
        assert plain.get_plain()[0] is not None
        scale, zero = plain.scale, plain.zero_point
        x = w.spec.format.decode(plain.int_data)
        groups = [-(-n // s) for n, s in zip(view.shape, scale.shape, strict=True)]
        size = w.spec.block or (96, 96)
        size = (1, *size) if len(size) == 1 else size
        size = tuple(s if s > 0 else 96 for s in size)
        size = size if view is w else size[::-1]
        spread = [p.repeat_interleave(size[0], 0).repeat_interleave(size[1], 1)[: view.shape[0], : view.shape[1]]
                  for p in (scale.float(), zero.float())]  # fmt: skip
        assert groups
        value = (x - w.spec.mid) * spread[0] + spread[1] if w.spec.offset is not None else (x - spread[1]) * spread[0]
        assert torch.equal(value, view.with_(pre_scale=None).dequantize())
    assert "int_data" in dir(plain)


@ALL
def test_quantized_linear_op(name: str) -> None:
    w, x, bias = quantized(name), torch.randn(5, 96), torch.randn(32)
    for b in (None, bias):
        y = w._quantized_linear_op(x, w, b)
        assert torch.equal(y, F.linear(x, w, b))
        torch.testing.assert_close(y, F.linear(x, w.dequantize(), b), rtol=2e-2, atol=0.1)


# -- what is not native ----------------------------------------------------------------------------------------------


def test_a_fallback_is_counted_and_warned_about_once() -> None:
    w = quantized("int8_row")
    pw.reset_fallbacks()
    with pytest.warns(pw.FallbackWarning, match=r"aten\.abs\.default on a quantized tensor \(32, 96\)"):
        assert torch.equal(w.abs(), w.dequantize().abs())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(torch.abs(w), w.dequantize().abs())
    assert pw.fallbacks() == {"aten.abs.default": 2}
    with pw.kernels.strict(), pytest.raises(pw.FallbackError, match=r"call \.dequantize\(\) first"):
        w.abs()
    assert pw.fallbacks() == {"aten.abs.default": 2}
    pw.reset_fallbacks()
    assert pw.fallbacks() == {}
    with pytest.warns(pw.FallbackWarning):
        w.abs()


def test_rows_of_the_table_that_dequantize_are_counted_without_a_warning() -> None:
    w = quantized("nf4_double")
    pw.reset_fallbacks()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        F.linear(torch.ones(1, 96), w)
        with pw.kernels.strict():
            F.linear(torch.ones(1, 96), w)
    assert pw.fallbacks() == {"linear/dequantize": 2}


def test_strict_is_of_the_thread_and_of_the_context() -> None:
    w = quantized("int8_row")
    errors: list[Any] = []

    def other() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            errors.append(w.abs().sum())

    with pw.kernels.strict():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with pw.kernels.strict(False):
            w.abs()
        with pytest.raises(pw.FallbackError):
            w.abs()
    assert len(errors) == 1


@ALL
def test_leaving_torch(name: str) -> None:
    w = quantized(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pw.FallbackWarning)
        assert w.tolist() == w.dequantize().tolist()
        assert (w.numpy() == w.dequantize().numpy()).all()
        assert w[0, 0].item() == w.dequantize()[0, 0].item()
        assert torch.equal(torch.from_dlpack(w), w.dequantize())
        assert float(w.sum()) == float(w.dequantize().sum())
    assert repr(w).startswith("AffineQuantizedTensor(shape=(32, 96), ")
    assert len(w) == 32
    with pytest.warns(pw.FallbackWarning, match="eq"):
        assert bool((w == w.dequantize()).all())


# -- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("act", [None, INT8_TOKEN, UINT8_TOKEN, INT8_STATIC], ids=["none", "int8", "uint8", "static"])
@ALL
def test_gradients_reach_input_bias_and_a_trainable_weight(name: str, act: Any, frozen: bool) -> None:
    w = nn.Parameter(quantized(name, act=act), requires_grad=not frozen)
    plain = w.dequantize().detach().requires_grad_(not frozen)
    x, bias, up = torch.randn(2, 5, 96), torch.randn(32), torch.randn(2, 5, 32)
    ways: list[Callable[[Any, Any, Any], Any]] = [
        F.linear,
        lambda x, w, b: x @ w.t() + b,
        lambda x, w, b: torch.matmul(x, w.T) + b,
        lambda x, w, b: (w @ x.transpose(1, 2)).transpose(1, 2) + b,
        lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w.t()).view(2, 5, 32),
        lambda x, w, b: torch.einsum("bsk,nk->bsn", x, w) + b,
    ]
    for way in ways:
        grads = []
        for weight in (w, plain):
            leaves = [x.clone().requires_grad_(), bias.clone().requires_grad_()]
            weight.grad = None
            way(leaves[0], weight, leaves[1]).backward(up)
            grads.append([*(leaf.grad for leaf in leaves), weight.grad])
        for mine, theirs in zip(*grads, strict=True):
            assert type(mine) is type(theirs)
            if mine is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)


@ALL
@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.5, weight_decay=1e-5),
                                  lambda p: torch.optim.Adam(p, lr=0.3),
                                  lambda p: torch.optim.AdamW(p, lr=0.3, foreach=False)])  # fmt: skip
def test_an_optimizer_step_lowers_the_loss(name: str, make: Callable[[Any], Any]) -> None:
    if name == "ternary_row":
        pytest.skip("three values a row follow no gradient without a float copy to add up small steps")
    w = nn.Parameter(quantized(name))
    before, optimizer = storages(w), make([w])
    x, y = torch.randn(64, 96), torch.randn(64, 32)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pw.FallbackWarning)
        for _ in range(8):
            optimizer.zero_grad()
            loss = (F.linear(x, w) - y).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert storages(w) == before


@pytest.mark.parametrize("name", ["int8_row", "int4_bits", "nf4_double", "mxfp8"])
def test_multihead_attention(name: str) -> None:
    plain = nn.MultiheadAttention(96, 4, batch_first=True)
    ours = copy.deepcopy(plain)
    w = QT.from_float(plain.in_proj_weight, SPECS[name])
    ours.in_proj_weight = nn.Parameter(w, requires_grad=False)
    plain.in_proj_weight = nn.Parameter(w.dequantize())
    x = torch.randn(2, 7, 96)
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1)
    for kwargs in ({}, {"attn_mask": mask}, {"need_weights": False}):
        for query, key in ((x, x), (x[:, :3], x)):
            if query is not key and "attn_mask" in kwargs:
                continue
            a, b = (q.clone().requires_grad_() for q in (query, query))
            kv = (lambda q: (q, q)) if query is key else lambda q: (key, key)  # noqa: B023
            mine, theirs = ours(a, *kv(a), **kwargs)[0], plain(b, *kv(b), **kwargs)[0]
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
            mine.sum().backward()
            theirs.sum().backward()
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    for module in (ours, plain):
        module.eval()
    with torch.no_grad():  # the fast path of torch hands the raw weight to one fused op
        torch.testing.assert_close(ours(x, x, x)[0], plain(x, x, x)[0], rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(ours(x, x, x)[0], plain(x, x, x)[0], rtol=1e-4, atol=1e-5)


REACHES = [
    *(methodcaller(name) for name in ("storage", "data_ptr", "untyped_storage", "storage_offset", "storage_type")),
    *(methodcaller(name) for name in ("is_shared", "__dlpack__", "share_memory_", "_typed_storage")),
    methodcaller("resize_", 3), methodcaller("as_strided", (2,), (1,)), methodcaller("view", torch.uint8),
    methodcaller("unsafe_chunk", 2), methodcaller("record_stream", None), methodcaller("swapaxes_", 0, 1),
    torch.Tensor.share_memory_, torch.Tensor.data_ptr, torch.Tensor.is_shared, torch.Tensor.untyped_storage,
    torch.Tensor.data.__get__, torch.utils.dlpack.to_dlpack, attrgetter("__cuda_array_interface__"),
    lambda w: w.set_(w), lambda w: memoryview(w.numpy()), lambda w: w.untyped_storage().tolist(),
    lambda w: w.requires_grad_(False).untyped_storage().copy_(w.untyped_storage()),
]  # fmt: skip


def test_no_method_that_reaches_for_storage_ends_the_process() -> None:
    """A wrapper has no storage of its own; torch would read some of these through a null pointer."""
    for reach in REACHES:
        w = quantized("int8_row")
        with warnings.catch_warnings(), contextlib.suppress(RuntimeError, TypeError, AttributeError, ValueError):
            warnings.simplefilter("ignore")
            reach(w)
        assert torch.isfinite(w.dequantize()).all()


def test_a_pickle_holds_no_packing_of_one_machine(tmp_path: Path) -> None:
    """aten's int4 bytes depend on the instruction set; a file written here must read the same on another CPU."""
    w = QT.from_float(torch.randn(80, 256), TINYGEMM.with_(layout="torch_int4"))
    rebuilt = pickle.loads(pickle.dumps(w))
    assert rebuilt.spec == w.spec
    assert torch.equal(rebuilt.codes, w.codes)
    assert w.codes.numpy().tobytes() not in pickle.dumps(w)
    torch.save((w, w.dequantize()), tmp_path / "w.pt")
    code = (
        "import sys, torch, pennyweight; w, want = torch.load(sys.argv[1], weights_only=True); "
        "assert w.spec.layout == 'torch_int4'; assert torch.equal(w.dequantize(), want); "
        "x = torch.eye(256); assert float((torch.nn.functional.linear(x, w).t() - want).norm() / want.norm()) < 4e-3"
    )
    for isa in ("avx2", "default"):
        env = {**os.environ, "ATEN_CPU_CAPABILITY": isa}
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "w.pt")], env=env, check=True)


@pytest.mark.parametrize("name", ["codes", "scale", "offset"])
def test_a_pickle_of_parts_that_do_not_fit_is_refused(name: str) -> None:
    fn, (static, parts, *rest) = QT.from_float(torch.randn(80, 256), TINYGEMM).__reduce_ex__(4)
    assert torch.equal(fn(static, parts, *rest).codes, parts["codes"])
    for bad in (parts[name][:-1], parts[name].to(torch.int16)):
        with pytest.raises(ValueError, match=f"{name} is .* expected"):
            fn(static, {**parts, name: bad}, *rest)
    with pytest.raises(ValueError, match="has parts"):
        fn(static, {k: v for k, v in parts.items() if k != name}, *rest)


@pytest.mark.parametrize("spec", ["int8_row", "int4_group", "tinygemm", "uint4_group", "mxfp4", "nf4_double", "nvfp4"])
@pytest.mark.parametrize("layout", ["bits", "cpu", "cpu_float"])
def test_the_parts_are_plain_whatever_the_layout(spec: str, layout: str) -> None:
    """w.codes, w.scale, ... say the same of a weight that a kernel has packed."""
    plain = QT.from_float(torch.randn(37, 256), core_specs[spec])
    try:
        packed = plain.to_layout(layout)
    except ValueError:
        pytest.skip(f"layout {layout} does not take {spec}")
    for slot in ("codes", "scale", "zero_point", "offset"):
        mine, theirs = getattr(packed, slot), getattr(plain, slot)
        if theirs is None:
            assert mine is None
            continue
        if isinstance(theirs, QT):
            mine, theirs = mine.dequantize(), theirs.dequantize()
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs), slot

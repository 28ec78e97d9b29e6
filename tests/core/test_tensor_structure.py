"""Structural operations commute with dequantize, bit for bit, and stay quantized where the blocks allow it."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pennyweight as pw
from pennyweight.core import blocks
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from tests.tensors import INT8_STATIC, SPECS, fits, quantized

SHAPES = [(96,), (32, 96), (33, 100), (3, 32, 96), (2, 3, 16, 64), (2, 1, 3, 16, 33), (7, 13)]
CASES = [(name, shape) for name in SPECS for shape in SHAPES if fits(name, shape)]
Op = Callable[[Any], Any]

# name -> (op, least rank); each is applied to the quantized tensor and to its float twin
OPS: dict[str, tuple[Op, int]] = {
    "T": (lambda w: w.T if w.ndim == 2 else w.permute(*reversed(range(w.ndim))), 1),
    "mT": (lambda w: w.mT, 2),
    "t": (lambda w: w.t() if w.ndim <= 2 else w.transpose(0, 1), 1),
    "transpose": (lambda w: w.transpose(0, -1), 1),
    "permute": (lambda w: w.permute(*range(1, w.ndim), 0), 1),
    "movedim": (lambda w: w.movedim(-1, 0), 2),
    "slice_rows": (lambda w: w[1:-1], 2),
    "slice_strided": (lambda w: w[::2], 2),
    "slice_negative": (lambda w: w[-2:], 2),
    "slice_empty": (lambda w: w[1:1], 2),
    "slice_empty_last": (lambda w: w[..., 5:5], 1),
    "slice_aligned": (lambda w: w[..., 32:64], 1),
    "slice_to_end": (lambda w: w[..., 32:], 1),
    "slice_unaligned": (lambda w: w[..., 3:9], 1),
    "slice_across": (lambda w: w[..., 3:90], 1),
    "slice_stepped_last": (lambda w: w[..., ::3], 1),
    "select_row": (lambda w: w[-1], 2),
    "select_column": (lambda w: w[..., 5], 2),
    "select_number": (lambda w: w[5] if w.ndim == 1 else w[0], 1),
    "narrow": (lambda w: w.narrow(0, 1, 1), 2),
    "split": (lambda w: w.split(32, -1), 1),
    "split_rows": (lambda w: w.split(2), 2),
    "split_sizes": (lambda w: w.split([1, w.shape[0] - 1]), 2),
    "chunk": (lambda w: w.chunk(3, -1), 1),
    "tensor_split": (lambda w: w.tensor_split(2), 2),
    "unbind": (lambda w: w.unbind(0), 1),
    "unbind_last": (lambda w: w.unbind(-1)[:3], 2),
    "cat": (lambda w: torch.cat([w, w]), 2),
    "cat_pieces": (lambda w: torch.cat([w[1:], w[:1], w[:1]]), 2),
    "cat_last": (lambda w: torch.cat([w, w], -1), 1),
    "stack": (lambda w: torch.stack([w, w]), 1),
    "stack_last": (lambda w: torch.stack([w, w], -1), 1),
    "unsqueeze": (lambda w: w.unsqueeze(0), 1),
    "unsqueeze_last": (lambda w: w.unsqueeze(-1), 1),
    "unsqueeze_then_squeeze": (lambda w: w.unsqueeze(1).squeeze(1), 1),
    "squeeze": (lambda w: w[:1].squeeze(), 2),
    "squeeze_dim": (lambda w: w[:1].squeeze(0), 2),
    "expand": (lambda w: w.expand(3, *w.shape), 1),
    "expand_row": (lambda w: w[:1].expand(5, *w.shape[1:]), 2),
    "expand_column": (lambda w: w[..., :1].expand(*w.shape[:-1], 7), 2),
    "view_same": (lambda w: w.view(w.shape), 1),
    "view_leading": (lambda w: w.reshape(-1, w.shape[-1]), 1),
    "view_more": (lambda w: w.reshape(*w.shape[:-1], 1, w.shape[-1]), 1),
    "flatten": (lambda w: w.flatten(), 1),
    "flatten_tail": (lambda w: w.flatten(1), 2),
    "unflatten": (lambda w: w.unflatten(0, (1, -1)), 1),
    "reshape_transposed": (lambda w: w.transpose(0, -1).reshape(-1), 2),
    "index": (lambda w: w[torch.tensor([1, 0, 1])], 2),
    "index_2d": (lambda w: w[torch.tensor([[1, 0], [0, 0]])], 2),
    "index_mask": (lambda w: w[torch.arange(w.shape[0]) % 2 == 0], 2),
    "index_last": (lambda w: w[..., torch.tensor([5, 0, 5])], 1),
    "index_select": (lambda w: w.index_select(0, torch.tensor([1, 0])), 2),
    "index_select_last": (lambda w: w.index_select(-1, torch.tensor([1, 0])), 1),
    "as_strided": (lambda w: w.as_strided(w.shape[::-1], w.stride()[::-1]), 1),
    "clone": (lambda w: w.clone(), 1),
    "detach": (lambda w: w.detach(), 1),
}


def values(x: Any) -> list[torch.Tensor]:
    return [t.dequantize() if isinstance(t, QT) else t for t in (x if isinstance(x, (tuple, list)) else [x])]


def check(op: Op, w: QT) -> Any:
    """op(w) has the shape, dtype and bits of op on the float tensor. Returns op(w)."""
    reference = w.dequantize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pw.FallbackWarning)
        out = op(w)
        got = values(out)
    expected = values(op(reference))
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.shape == theirs.shape
        assert torch.equal(mine, theirs)
    for t in out if isinstance(out, (tuple, list)) else [out]:
        if isinstance(t, QT):
            check_invariants(t)
    return out


def check_invariants(w: QT) -> None:
    """Parts have the sizes that the spec says, nested parts too, and strides that a tensor of this shape may have."""
    if w.spec.layout == "plain":
        assert tuple(w.codes.shape) == blocks.padded(w.spec.block, w.stored_shape)
    if w.spec.layout != "torch_int4":
        for name in ("scale", "zero_point", "offset"):
            part = getattr(w, name)
            assert part is None or tuple(part.shape) == blocks.counts(w.spec.block, w.stored_shape)
            if isinstance(part, QT):
                assert part.spec == getattr(w.spec, name)
                check_invariants(part)


@pytest.mark.parametrize(("name", "shape"), CASES, ids=str)
def test_every_op_commutes_with_dequantize(name: str, shape: tuple[int, ...]) -> None:
    w = quantized(name, shape)
    before = w.dequantize()
    for label, (op, rank) in OPS.items():
        if w.ndim >= rank:
            try:
                check(op, w)
            except Exception as error:
                raise AssertionError(f"{label} of {name} {shape}") from error
    assert torch.equal(w.dequantize(), before)


# Along rows with their own scales, and across whole groups, nothing falls back.
STAY = ["T", "mT", "t", "transpose", "permute", "movedim", "slice_rows", "slice_strided", "slice_negative",
        "select_row", "narrow", "split_rows", "split_sizes", "tensor_split", "unbind", "stack", "unsqueeze",
        "unsqueeze_last",
        "unsqueeze_then_squeeze", "squeeze", "squeeze_dim", "expand", "expand_row", "view_same", "view_leading",
        "view_more", "unflatten", "index", "index_2d", "index_mask", "index_select", "clone", "detach", "cat",
        "cat_pieces"]  # fmt: skip
GROUPED = ["slice_aligned", "slice_to_end", "slice_unaligned", "slice_empty", "select_column", "split", "chunk",
           "cat_last"]  # fmt: skip
BY_ROW = [n for n, spec in SPECS.items() if spec.block is not None and len(spec.block) == 1]


@pytest.mark.parametrize("op", STAY)
@pytest.mark.parametrize("name", BY_ROW)
def test_rows_stay_quantized(name: str, op: str) -> None:
    if name == "nvfp4" and op in ("cat", "cat_pieces", "stack"):
        pytest.skip("its block scales share one scale of the tensor, which two tensors do not")
    with pw.kernels.strict():
        assert all_quantized(check(OPS[op][0], quantized(name)))


@pytest.mark.parametrize("op", GROUPED)
@pytest.mark.parametrize("name", ["int8_group", "int4_group", "int4_bits", "torch_int4", "uint8_asymmetric",
                                  "uint4_asymmetric_bits", "tinygemm", "mxfp8"])  # fmt: skip
def test_whole_groups_stay_quantized(name: str, op: str) -> None:
    with pw.kernels.strict():
        assert all_quantized(check(OPS[op][0], quantized(name)))


@pytest.mark.parametrize("op", ["T", "slice_rows", "slice_across", "select_row", "select_column", "split", "flatten",
                                "unflatten", "expand", "expand_row", "expand_column", "index", "index_last",
                                "view_leading", "slice_stepped_last"])  # fmt: skip
def test_one_scale_for_all_stays_quantized(op: str) -> None:
    with pw.kernels.strict():
        assert all_quantized(check(OPS[op][0], quantized("int8_tensor")))


@pytest.mark.parametrize("op", ["slice_across", "index_last", "index_select_last", "slice_stepped_last"])
def test_one_scale_a_row_allows_any_column(op: str) -> None:
    for name in ("int8_row", "float8_row", "ternary_row"):
        with pw.kernels.strict():
            assert all_quantized(check(OPS[op][0], quantized(name)))


def all_quantized(out: Any) -> bool:
    return all(isinstance(t, QT) for t in (out if isinstance(out, (tuple, list)) else [out]))


def test_cutting_through_groups_is_a_counted_fallback() -> None:
    w = quantized("int4_group")
    pw.reset_fallbacks()
    with pytest.warns(pw.FallbackWarning, match=r"aten\.slice.*copy, not a view"):
        piece = w[:, 3:90]
    assert type(piece) is torch.Tensor
    assert pw.fallbacks() == {"aten.slice.Tensor": 1}
    with (
        pw.kernels.strict(),
        pytest.raises(pw.FallbackError, match=r"aten\.slice\.Tensor on a quantized tensor \(32, 96\)"),
    ):
        w[:, 3:90]


def test_convolution_weights_flatten_to_a_matrix() -> None:
    spec = SPECS["int8_row"].with_(block=(-1, -1, -1))
    w = QT.from_float(torch.randn(8, 4, 3, 3), spec)
    with pw.kernels.strict():
        flat = check(lambda v: v.flatten(1), w)
        assert flat.spec.block == (-1,)
        check(lambda v: v.flatten(1).unflatten(1, (4, 3, 3)), w)


@pytest.mark.parametrize("name", SPECS)
def test_static_activation_parameters_survive(name: str) -> None:
    w = quantized(name, act=INT8_STATIC)
    for op in ("T", "select_row", "clone", "detach", "view_same"):
        if op == "select_row" and name == "float8_square":
            continue  # rows share scales
        out = OPS[op][0](w)
        assert torch.equal(out.act_scale, w.act_scale)
        assert out.act == w.act


@pytest.mark.parametrize(
    ("op", "error", "match"),
    [
        (lambda w: w.view(7, 7), RuntimeError, "sizes do not match"),
        (lambda w: w.view(-1, 7), RuntimeError, "sizes do not match"),
        (lambda w: w.transpose(0, 2), IndexError, None),
        (lambda w: w.permute(0, 0), RuntimeError, None),
        (lambda w: w[40], IndexError, None),
        (lambda w: w.select(0, 40), IndexError, "out of range"),
        (lambda w: w.unsqueeze(4), IndexError, None),
        (lambda w: w.expand(3, 7), RuntimeError, None),
        (lambda w: w.split([1, 2]), RuntimeError, None),
        (lambda w: w.narrow(0, 30, 9), (RuntimeError, IndexError), None),
        (lambda w: w.unsqueeze(0).t(), RuntimeError, None),
        (lambda w: w.as_strided((8, 97, 96), (96, 96, 1), 1), RuntimeError, "no strided storage"),
    ],
)
def test_wrong_arguments_raise_as_for_a_float_tensor(op: Op, error: Any, match: str | None) -> None:
    w = quantized("int8_row")
    with pytest.raises((RuntimeError, IndexError)):
        op(w.dequantize())
    with pytest.raises(error, match=match):
        op(w)


# -- writing through views -------------------------------------------------------------------------------------------

ALIGNED: dict[str, Op] = {
    "rows": lambda w: w[3:7],
    "row": lambda w: w[5],
    "every other row": lambda w: w[::2],
    "groups": lambda w: w[:, 32:64],
    "transposed groups": lambda w: w.t()[32:64],
    "unsqueezed": lambda w: w.unsqueeze(1)[2:4],
    "split": lambda w: w.split(32, 1)[2],
    "folded rows": lambda w: w.view(4, 8, 96)[1],
}


@pytest.mark.parametrize("view", ALIGNED)
@pytest.mark.parametrize(
    "name", ["int8_group", "int4_group", "int4_bits", "uint8_asymmetric", "tinygemm", "mxfp8", "float8_row"]
)
def test_writing_to_an_aligned_view_changes_the_base(name: str, view: str) -> None:
    if (name == "float8_row" and "groups" in view) or (name, view) == ("float8_row", "split"):
        pytest.skip("one scale a row: a group is not aligned")
    w = quantized(name)
    expected = w.dequantize()
    part = ALIGNED[view](w)
    new = torch.randn(part.shape)
    part.copy_(new)
    ALIGNED[view](expected).copy_(part.dequantize())
    assert torch.equal(w.dequantize(), expected)
    assert part.error(new) > 8  # what stands there now is what was written
    outside = ALIGNED[view](torch.arange(w.numel()).view(w.shape)).flatten()
    assert len(outside) < w.numel()


@pytest.mark.parametrize("name", ["int8_row", "int4_bits", "torch_int4", "int8_tensor", "nvfp4", "float8_square"])
def test_writing_to_an_unaligned_view_is_refused(name: str) -> None:
    w = quantized(name)
    before = w.dequantize()
    part = w[3:5, 3:9] if name != "torch_int4" else w[3:5]
    assert isinstance(part, QT)
    for write in (
        lambda: part.copy_(torch.ones(part.shape)),
        lambda: part.add_(1),
        part.zero_,
        lambda: part.clamp_(0, 1),
        lambda: part.__setitem__(0, 1.0),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pw.FallbackWarning)
            with pytest.raises(RuntimeError, match=r"dequantize the whole weight, change that, and copy_ it back"):
                write()
    assert torch.equal(w.dequantize(), before)
    own = part.clone()
    own.zero_()
    assert own.dequantize().count_nonzero() == 0
    assert torch.equal(w.dequantize(), before)


# -- random sequences ------------------------------------------------------------------------------------------------


@st.composite
def sequences(draw: Any) -> tuple[str, tuple[int, ...], list[tuple[str, int, int, int]]]:
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 16, 33, 64]), min_size=1, max_size=4)))
    name = draw(st.sampled_from([n for n in SPECS if fits(n, shape)]))
    kinds = ["transpose", "slice", "select", "unsqueeze", "squeeze", "flatten", "cat", "index", "expand", "stack"]
    number = st.integers(0, 99)
    steps = draw(st.lists(st.tuples(st.sampled_from(kinds), number, number, number), min_size=1, max_size=6))
    return name, shape, steps


def step(w: Any, kind: str, a: int, b: int, c: int) -> Any:
    """One structural op whose arguments are made to fit the tensor."""
    if w.ndim == 0 or w.numel() > 20000:
        return w
    d = a % w.ndim
    n = w.shape[d]
    match kind:
        case "transpose":
            return w.transpose(d, b % w.ndim)
        case "slice":
            lo, hi = sorted((b % (n + 1), c % (n + 1)))
            return w.narrow(d, lo, hi - lo) if (b + c) % 2 else w[(slice(None),) * d + (slice(lo, hi, 1 + b % 3),)]
        case "select":
            return w.select(d, b % n) if n else w
        case "unsqueeze":
            return w.unsqueeze(b % (w.ndim + 1)) if w.ndim < 5 else w
        case "squeeze":
            return w.squeeze(d)
        case "flatten":
            return w.flatten(*sorted((d, b % w.ndim)))
        case "cat":
            return torch.cat([w, w], d)
        case "index":
            return w.index_select(d, torch.tensor([b % n, c % n, 0])) if n else w
        case "stack":
            return torch.stack([w, w], b % (w.ndim + 1)) if w.ndim < 5 else w
    return w.unsqueeze(0).expand(2, *w.shape) if w.ndim < 5 else w


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(sequences())
def test_random_sequences_commute_with_dequantize(case: tuple[str, Sequence[int], list[Any]]) -> None:
    name, shape, steps = case
    w: Any = quantized(name, shape)
    x: Any = w.dequantize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pw.FallbackWarning)
        for s in steps:
            w, x = step(w, *s), step(x, *s)
            assert tuple(w.shape) == tuple(x.shape)
            assert torch.equal(values(w)[0], x)
            if isinstance(w, QT):
                check_invariants(w)

"""Layout "gpu" beyond its examples (tests/every/test_layouts.py): odd sizes, views, parts of other types."""

import copy
import pickle
from typing import Any

import pytest
import torch

from pennyweight.core.formats import E2M1, E4M3, E8M0, INT3, INT4, INT8, NF4, UINT3, UINT4, UINT7
from pennyweight.core.numerics import Parts, quantize
from pennyweight.core.spec import TENSOR, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.kernels.triton.layout import LAYOUT, fits

SIZES = ((1, 1), (63, 65), (64, 64), (65, 127), (129, 1030), (200, 33), (3, 4100))
SPECS = (
    QuantSpec(INT4, (64,), scale=torch.bfloat16),
    QuantSpec(INT8, (-1,)),
    QuantSpec(INT3, (32,), scale=torch.float16),
    QuantSpec(UINT3, (64,), zero_point=True),
    QuantSpec(UINT7, (-1,), zero_point=True),
    QuantSpec(UINT4, (128,), mid=8, scale=torch.bfloat16, offset=torch.bfloat16),
    QuantSpec(INT4, (16, 64)),
    QuantSpec(NF4, (64,)),
    QuantSpec(E4M3, None),
    QuantSpec(E2M1, (32,), scale=QuantSpec(E8M0, (1,), scale=None)),
    QuantSpec(E2M1, (16,), scale=QuantSpec(E4M3, TENSOR)),
)
CASES = [
    pytest.param(spec, shape, id=f"{spec}-{shape}")
    for spec in SPECS
    for shape in SIZES
    if fits(spec, shape) is True  # a weight of one group has no quantized scales
]


def leaves(parts: Parts) -> dict[str, torch.Tensor]:
    found = {}
    for name, part in parts._asdict().items():
        if isinstance(part, Parts):
            found |= {f"{name}.{inner}": leaf for inner, leaf in leaves(part).items()}
        elif part is not None:
            found[name] = part
    return found


def check_same(got: Parts, want: Parts) -> None:
    one, other = leaves(got), leaves(want)
    assert one.keys() == other.keys()
    for name, a in one.items():
        b = other[name]
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        a, b = (t.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in (a, b))
        assert torch.equal(a, b), name


@pytest.mark.parametrize(("spec", "shape"), CASES)
def test_sizes(spec: QuantSpec, shape: tuple[int, int]) -> None:
    spec = spec.with_(layout="gpu")
    plain = quantize(torch.randn(shape), spec)
    packed = LAYOUT.pack(plain, spec, shape)
    assert packed.codes.dtype is torch.int32
    assert packed.codes.shape[3:] == (64, 32)
    assert all(leaf.is_contiguous() for leaf in leaves(packed).values())
    check_same(LAYOUT.unpack(packed, spec, shape), plain)
    assert LAYOUT.nbytes(spec, shape) == sum(leaf.nbytes for leaf in leaves(packed).values())


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_views(spec: QuantSpec) -> None:
    """Codes and numbers that are slices or transposed give the same words as copies of them."""
    spec, shape = spec.with_(layout="gpu"), (70, 300)
    plain = quantize(torch.randn(shape), spec)

    def view(t: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros((*t.shape, 2), dtype=t.dtype) if t.dtype.itemsize > 1 else None
        if wide is None:  # float8 cannot be assigned everywhere: its bytes can
            wide = torch.zeros((*t.shape, 2), dtype=torch.uint8)
            wide[..., 0] = t.view(torch.uint8)
            return wide[..., 0].view(t.dtype)
        wide[..., 0] = t
        return wide[..., 0]

    strided = plain.map(view)
    assert not strided.codes.is_contiguous()
    check_same(LAYOUT.pack(strided, spec, shape), LAYOUT.pack(plain, spec, shape))


@pytest.mark.parametrize("fmt", [UINT3, UINT4, UINT7, INT8], ids=str)
def test_zero_points_keep_their_type(fmt: object) -> None:
    spec = QuantSpec(fmt, (64,), zero_point=True, layout="gpu")  # type: ignore[arg-type]
    plain = quantize(torch.randn(70, 130) + 1, spec)
    assert plain.zero_point is not None
    for dtype in (torch.uint8, torch.int8):
        parts = plain._replace(zero_point=plain.zero_point.view(torch.uint8).bitwise_and(7).to(dtype))
        packed = LAYOUT.pack(parts, spec, (70, 130))
        assert packed.zero_point is not None
        assert packed.zero_point.dtype is dtype
        check_same(LAYOUT.unpack(packed, spec, (70, 130)), parts)


def test_padding_is_zero() -> None:
    """What lies behind the last row and column is read by the kernel: it must be finite, and its scale zero."""
    spec = QuantSpec(UINT4, (64,), mid=8, offset=torch.float32, layout="gpu")
    packed = LAYOUT.pack(quantize(torch.randn(65, 70), spec), spec, (65, 70))
    assert int(packed.codes[1, :, :, 1:].abs().sum()) == 0
    for part in (packed.scale, packed.offset):
        assert isinstance(part, torch.Tensor)
        assert float(part[1, :, 1:].abs().sum()) == 0


@pytest.mark.parametrize(
    ("spec", "shape", "words"),
    [
        (QuantSpec(INT4, (48,)), (64, 96), "needs groups of 16, 32 or a multiple of 64 columns, the weight has 48"),
        (QuantSpec(INT4, (64,)), (64,), "needs a non-empty 2-d weight"),
        (QuantSpec(INT4, (64,)), (0, 64), "needs a non-empty 2-d weight"),
        (QuantSpec(INT4, (64,)), (2, 64, 64), "needs a non-empty 2-d weight"),
        (QuantSpec(INT8, None, zero_point=True), (64, 64), "needs zero points and offsets per row or per group"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_told(spec: QuantSpec, shape: tuple[int, ...], words: str) -> None:
    assert fits(spec, shape) == words


def test_a_tensor_goes_there_and_back() -> None:
    x = torch.randn(70, 300)
    weight = AffineQuantizedTensor.from_float(x, QuantSpec(INT4, (64,), scale=torch.bfloat16))
    packed = weight.to_layout("gpu")
    assert packed.spec.layout == "gpu"
    check_same(packed.to_layout(weight.spec.layout).parts, weight.parts)
    assert torch.equal(packed.dequantize(), weight.dequantize())


@pytest.mark.parametrize(("clone", "same"), [(lambda w: pickle.loads(pickle.dumps(w)), False), (copy.deepcopy, True)])
def test_a_weight_of_a_gpu_is_pickled_in_a_portable_layout(clone: Any, same: bool) -> None:
    """A CPU that unpickles it packs it for itself. torch.save pickles too."""
    w = AffineQuantizedTensor.from_float(torch.randn(70, 300), QuantSpec(UINT4, (64,), mid=8, offset=torch.float32))
    again = clone(w.to_layout("gpu"))
    assert torch.equal(again.dequantize(), w.dequantize())
    assert (again.spec.layout == "gpu") is same

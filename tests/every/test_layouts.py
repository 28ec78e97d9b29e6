"""Every memory layout, by being registered with examples: packing loses nothing."""

import math

import pytest
import torch

import pennyweight.kernels  # noqa: F401  # registers the layouts of the kernels
from pennyweight.core.layouts import Layout, change_layout, get_layout, layouts, register_layout
from pennyweight.core.numerics import Parts, quantize
from pennyweight.core.spec import QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor

CASES = [
    pytest.param(layout, spec, shape, id=f"{layout.name}-{spec}-{'x'.join(map(str, shape))}")
    for layout in layouts()
    for spec, shape in layout.examples
]


def leaves(parts: Parts) -> list[tuple[str, torch.Tensor]]:
    """Every tensor with its name, nested ones too."""
    found = []
    for name, part in parts._asdict().items():
        if isinstance(part, Parts):
            found += [(f"{name}.{inner}", leaf) for inner, leaf in leaves(part)]
        elif part is not None:
            found.append((name, part))
    return found


def check_equal(got: Parts, want: Parts) -> None:
    assert [name for name, _ in leaves(got)] == [name for name, _ in leaves(want)]
    for (name, a), (_, b) in zip(leaves(got), leaves(want), strict=True):
        assert a.dtype == b.dtype, name
        assert a.shape == b.shape, name
        assert a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("layout", layouts(), ids=lambda layout: layout.name)
def test_a_layout_brings_its_examples(layout: Layout) -> None:
    assert layout.examples, f"give layout {layout.name!r} `examples`: specs and shapes that it takes"
    assert get_layout(layout.name) is layout


@pytest.mark.parametrize(("layout", "spec", "shape"), CASES)
def test_unpack_is_the_inverse_of_pack(layout: Layout, spec: QuantSpec, shape: tuple[int, ...]) -> None:
    device = (layout.devices or ("cpu",))[0]
    if device != "cpu" and not torch.get_device_module(device).is_available():
        device = "cpu"  # layouts of GPUs are packed by torch ops
    plain = quantize(torch.randn(shape), spec)
    # every code, not only those that rounding happened to give; and a part that layouts have no business with
    codes = spec.format.to_unsigned(plain.codes)
    count = len(spec.format.values) or int(spec.format.hi - spec.format.lo + 1 if spec.format.kind == "int" else 256)
    every = torch.arange(codes.numel()).reshape(codes.shape).remainder(count).to(torch.uint8)
    for parts in (plain, plain._replace(codes=spec.format.from_unsigned(every), act_scale=torch.tensor([[0.5]]))):
        parts = parts.map(lambda p: p.to(device))
        before = parts.map(torch.clone)
        packed = layout.pack(parts, spec.with_(layout=layout.name), shape)
        check_equal(layout.unpack(packed, spec.with_(layout=layout.name), shape), before)
        check_equal(parts, before)


@pytest.mark.parametrize(("layout", "spec", "shape"), CASES)
def test_bit_streams_are_packed_as_plain_codes_are(layout: Layout, spec: QuantSpec, shape: tuple[int, ...]) -> None:
    if layout.from_bits is None:
        by_kernel = layout.name.startswith("cpu_conv")  # whose order is not that of the bits in a file
        assert by_kernel or not layout.name.startswith("cpu"), (
            f"layout {layout.name!r} unpacks all codes of a file to pack them"
        )
        pytest.skip("packs plain codes only")
    plain = quantize(torch.randn(shape), spec)._replace(act_scale=torch.tensor([[0.5]]))
    stream = get_layout("bits").pack(plain, spec.with_(layout="bits"), shape)
    before = stream.map(torch.clone)
    spec = spec.with_(layout=layout.name)
    check_equal(layout.from_bits(stream, spec, shape), layout.pack(plain, spec, shape))
    check_equal(change_layout(stream, spec.with_(layout="bits"), layout.name, shape), layout.pack(plain, spec, shape))
    check_equal(stream, before)


@pytest.mark.parametrize(("layout", "spec", "shape"), [c for c in CASES if c.values[0].name in ("plain", "bits")])
def test_the_spec_knows_the_bytes(layout: Layout, spec: QuantSpec, shape: tuple[int, ...]) -> None:
    spec = spec.with_(layout=layout.name)
    for size in (shape, (17, 31), (7,), (2, 3, 5, 33), (0, 5), (5, 0), (1, 1)):
        if spec.block is not None and len(spec.block) > len(size):
            continue
        packed = layout.pack(quantize(torch.randn(size), spec), spec, size)
        assert spec.nbytes(size) == sum(leaf.nbytes for _, leaf in leaves(packed)), size


@pytest.mark.parametrize(("layout", "spec", "shape"), CASES)
def test_the_layout_knows_the_bytes(layout: Layout, spec: QuantSpec, shape: tuple[int, ...]) -> None:
    packed = layout.pack(quantize(torch.randn(shape), spec), spec.with_(layout=layout.name), shape)
    assert layout.nbytes(spec, shape) == sum(leaf.nbytes for _, leaf in leaves(packed))


@pytest.mark.parametrize("name", ["plain", "bits"])
def test_a_single_number_and_an_empty_tensor(name: str) -> None:
    spec = QuantSpec(get_layout("bits").examples[0][0].format, layout=name)
    for shape in ((), (0,), (3, 0), (0, 3)):
        plain = quantize(torch.full(shape, -2.5), spec)
        packed = get_layout(name).pack(plain, spec, shape)
        check_equal(get_layout(name).unpack(packed, spec, shape), plain)
        assert spec.nbytes(shape) == sum(leaf.nbytes for _, leaf in leaves(packed))
        assert packed.codes.numel() == math.prod(shape)


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="'plain' is registered already"):
        register_layout(Layout("plain", get_layout("plain").pack, get_layout("plain").unpack))
    with pytest.raises(ValueError, match=r"unknown layout 'plane' \(did you mean 'plain'\?\); known: plain, bits"):
        get_layout("plane")


@pytest.mark.parametrize(("spec", "shape"), get_layout("torch_int4").examples, ids=str)
def test_a_tensor_shows_parts_that_its_layout_keeps_elsewhere(spec: QuantSpec, shape: tuple[int, ...]) -> None:
    """torch_int4 has no part for offsets: they are beside the scales."""
    plain = AffineQuantizedTensor.from_float(torch.randn(shape), spec.with_(layout="plain"))
    packed = plain.to_layout("torch_int4")
    for name in ("codes", "scale", "offset"):
        want, got = getattr(plain, name), getattr(packed, name)
        assert (got is None) == (want is None), name
        assert want is None or torch.equal(got, want), name
    assert packed.zero_point is None

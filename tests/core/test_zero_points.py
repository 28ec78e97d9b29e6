"""Zero points that take the bits of a format of their own: packed beside the codes, whatever is done to the tensor."""

import io
import itertools

import pytest
import torch
import torch.nn.functional as F

import pennyweight as pw
from pennyweight.core.formats import INT3, INT4, TERNARY, UINT2, UINT4, UINT5, UINT8
from pennyweight.core.spec import UINT4_ZEROS, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io import CheckpointError, flatten, unflatten

SPECS = {
    "uint4": QuantSpec(UINT4, (8,), torch.float16, zero_point=UINT4),
    "int3": QuantSpec(INT3, (8,), zero_point=INT3),
    "uint2": QuantSpec(UINT2, (4,), torch.bfloat16, zero_point=UINT2),
    "wide": QuantSpec(UINT4, (8,), zero_point=UINT5),
    "byte": QuantSpec(UINT4, (8,), zero_point=UINT8),
    "ternary": QuantSpec(TERNARY, (8,), zero_point=TERNARY),
    "squares": QuantSpec(INT4, (2, 8), zero_point=INT4),
    "elements": QuantSpec(UINT4, (1,), zero_point=UINT4),
    "tensor": QuantSpec(UINT4, None, zero_point=UINT4),
}
EACH = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def pair(spec: QuantSpec, shape: tuple[int, ...], layout: str = "bits") -> tuple[QT, QT]:
    """The same numbers with zero points packed, and with a byte each."""
    x = torch.randn(shape) + 0.3
    packed = QT.from_float(x, spec.with_(layout=layout))
    plain = QT.from_float(x, spec.with_(zero_point=True, layout=layout))
    assert torch.equal(packed.dequantize(), plain.dequantize())
    assert torch.equal(packed.zero_point, plain.zero_point)
    return packed, plain


@EACH
@pytest.mark.parametrize("shape", [(6, 40), (5, 37), (1, 8), (3, 8 * 17), (2, 3, 24), (0, 16), (4, 0), (9,), ()])
def test_numbers_and_bytes(spec: QuantSpec, shape: tuple[int, ...]) -> None:
    if spec.block is not None and len(spec.block) > len(shape):
        return
    packed, plain = pair(spec, shape)
    assert packed.nbytes == packed.spec.nbytes(shape) <= plain.nbytes
    assert packed.to_layout("plain").nbytes == packed.spec.with_(layout="plain").nbytes(shape)
    groups = plain.zero_point.shape
    bits = spec.zero_point.bits
    assert packed._zero_point.numel() == (
        plain.zero_point.numel() // max(1, groups[-1]) * -(-groups[-1] * bits // 8) if groups else 1
    )
    buffer = io.BytesIO()
    torch.save(packed, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=True)
    assert again.spec == packed.spec
    assert torch.equal(again._zero_point, packed._zero_point)
    tensors, metadata = flatten({"w": packed})
    assert torch.equal(tensors["w.zero_point"].reshape(-1), packed._zero_point.reshape(-1))
    back = unflatten(tensors, metadata)["w"]
    assert torch.equal(back.dequantize(), packed.dequantize())
    assert '"version":4' in metadata["pennyweight"]


def test_the_target() -> None:
    """GPTQ's own 4.156 bits a weight, in memory and in files."""
    w = QT.from_float(torch.randn(256, 1024), UINT4_ZEROS.with_(layout="bits"))
    assert w.nbytes * 8 / w.numel() == 4.15625
    assert sum(t.nbytes for t in flatten({"w": w})[0].values()) == w.nbytes


@EACH
@pytest.mark.filterwarnings("ignore::pennyweight.FallbackWarning")  # through blocks
def test_every_slice(spec: QuantSpec) -> None:
    w, plain = pair(spec, (4, 72))
    for start, stop in itertools.combinations(range(0, 73, 4), 2):
        assert torch.equal(w[:, start:stop].dequantize(), plain.dequantize()[:, start:stop]), (start, stop)
        piece = w[:, start:stop]
        if isinstance(piece, QT):  # it can be stored: no bits of its neighbours are left in its last bytes
            back = unflatten(*flatten({"w": piece.clone()}))["w"]
            assert torch.equal(back.dequantize(), piece.dequantize())
    for piece, want in zip(w.split(24, 1), plain.dequantize().split(24, 1), strict=True):
        assert torch.equal(piece.dequantize(), want)


def test_a_slice_at_bytes_is_a_view_and_another_a_copy() -> None:
    w = QT.from_float(torch.randn(4, 72), SPECS["uint4"].with_(layout="bits"))
    view, copy = w[:, 16:48], w[:, 8:48]
    assert not view.readonly
    assert view._zero_point.data_ptr() == w._zero_point.data_ptr() + 1
    assert view.spec.layout == "bits"
    assert copy.readonly
    with torch.no_grad():
        view.zero_()
        with pytest.raises(RuntimeError, match="is a copy, or"):
            copy.zero_()
    assert not w[:, 16:48].dequantize().any()
    assert w[:, :16].dequantize().any()
    assert w[:, 48:].dequantize().any()
    tail = w[:, 64:]  # the last group of nine: half a byte is unused
    assert not tail.readonly
    assert torch.equal(tail.dequantize(), w.dequantize()[:, 64:])


@EACH
@pytest.mark.filterwarnings("ignore::pennyweight.FallbackWarning")  # through blocks
def test_axes_and_joins(spec: QuantSpec) -> None:
    w, plain = pair(spec, (6, 40))
    x = plain.dequantize()
    assert torch.equal(w.t().dequantize(), x.t())
    assert torch.equal(torch.cat([w, w]).dequantize(), torch.cat([x, x]))
    assert torch.equal(torch.cat([w, w], 1).dequantize(), torch.cat([x, x], 1))
    assert torch.equal(torch.stack([w, w]).dequantize(), torch.stack([x, x]))
    assert torch.equal(w.view(2, 3, 40).dequantize(), x.view(2, 3, 40))
    assert torch.equal(w.unsqueeze(1).expand(6, 5, 40).dequantize(), x.unsqueeze(1).expand(6, 5, 40))
    assert torch.equal(w[[4, 1]].dequantize(), x[[4, 1]])
    assert torch.equal(w[2].dequantize(), x[2])
    one = QT.from_float(torch.randn(6, 1), spec.with_(layout="bits"))
    assert torch.equal(one.expand(6, 5).dequantize(), one.dequantize().expand(6, 5))


@EACH
@pytest.mark.parametrize("layout", ["plain", "bits"])
def test_writing_in_place(spec: QuantSpec, layout: str) -> None:
    w, plain = pair(spec, (6, 40), layout)
    x, at = torch.randn(6, 40), w._zero_point.data_ptr()
    for t in (w, plain):
        t.copy_(x)
        t.add_(1.0)
    assert torch.equal(w.dequantize(), plain.dequantize())
    assert w._zero_point.data_ptr() == at


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_bytes(dtype: torch.dtype) -> None:
    """The same kernel, in its own layout, where zero points are bytes."""
    layer = torch.nn.Linear(256, 48, dtype=dtype)
    x = torch.randn(5, 256, dtype=dtype)
    out, kernels = [], []
    for spec in (UINT4_ZEROS, UINT4_ZEROS.with_(zero_point=True)):
        q = torch.nn.Sequential(torch.nn.Linear(256, 48, dtype=dtype))
        q[0].load_state_dict(layer.state_dict())
        report = pw.quantize_(q, pw.SpecConfig(spec))
        kernels.append(report.rows[0].kernel)
        out += [
            q(x),
            torch.compile(q, backend="aot_eager", fullgraph=True)(x),
            F.linear(x, q[0].weight.to_layout("bits")),
        ]
    assert kernels[0] == kernels[1]
    assert all(torch.equal(a, b) for a, b in zip(out[:3], out[3:], strict=True))


def test_lookups_read_the_stream() -> None:
    for spec in (SPECS["uint4"], SPECS["int3"], SPECS["wide"], SPECS["squares"]):
        w, plain = pair(spec, (50, 72))
        index = torch.tensor([[3, 49], [0, 3]])
        assert torch.equal(F.embedding(index, w), plain.dequantize()[index])


def test_what_does_not_fit_is_refused() -> None:
    w = QT.from_float(torch.randn(4, 24), SPECS["uint4"].with_(layout="plain"))
    high = w.with_(zero_point=w.zero_point + 12)
    with pytest.raises(CheckpointError, match=r"w.zero_point: values .* are outside uint4 \(0 to 15\)"):
        flatten({"w": high})
    tensors, metadata = flatten({"w": w})
    assert tensors["w.zero_point"].shape == (4, 2)  # three groups: half a byte is unused
    spoilt = {**tensors, "w.zero_point": tensors["w.zero_point"] | 0x80}
    with pytest.raises(CheckpointError, match=r"w.zero_point: unused bits at the end of a row are not zero"):
        unflatten(spoilt, metadata)
    with pytest.raises(CheckpointError, match=r"part w.zero_point is torch.uint8 \[4, 3\]"):
        unflatten({**tensors, "w.zero_point": torch.zeros(4, 3, dtype=torch.uint8)}, metadata)
    del tensors["w"]  # the guard of version 4
    without = metadata["pennyweight"].replace('"guard":true,', "")
    older = {"pennyweight": without.replace('"version":4', '"version":2')}
    with pytest.raises(CheckpointError, match="declares format version 2, but its contents need version 3"):
        unflatten(tensors, older)


def test_configs_with_zero_points_take_their_bits() -> None:
    layer = torch.nn.Linear(256, 64)
    for config, name in (
        (pw.UIntXWeightOnlyConfig("uint4", group_size=64), "uint4"),
        (pw.IntxWeightOnlyConfig("int4", mapping_type=pw.MappingType.ASYMMETRIC), "int4"),
    ):
        q = torch.nn.Sequential(torch.nn.Linear(256, 64))
        q[0].load_state_dict(layer.state_dict())
        pw.quantize_(q, config)
        assert q[0].weight.spec.zero_point.name == name

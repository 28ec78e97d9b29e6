"""Every block type: values against the gguf package and ggml, and the same bytes back."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import Tensor

from pennyweight.core.numerics import Parts, dequantize
from pennyweight.io.gguf.blocks import BY_ID, REMOVED, TYPES, BlockType
from tests import forked
from tests.io.gguf.samples import QUANTIZED, ggml, ggml_quantize, ggml_values, random_raw

TYPE = pytest.mark.parametrize("kind", QUANTIZED.values(), ids=QUANTIZED)
WRITABLE = {name: t for name, t in QUANTIZED.items() if t.writable}
# e2m1's code 8 is -0, ggml's tables give it as 0
SIGNED_ZERO = ("MXFP4", "NVFP4")


def values(kind: BlockType, raw: Tensor, shape: tuple[int, ...]) -> Tensor:
    return dequantize(kind.decode(raw, shape), kind.spec, shape)


def by_gguf(kind: BlockType, raw: Tensor, shape: tuple[int, ...]) -> Tensor:
    with np.errstate(all="ignore"):  # float16 scales that are NaN
        return torch.from_numpy(quants.dequantize(raw.numpy(), GGMLQuantizationType[kind.name])).reshape(shape)


def assert_same(kind: BlockType, got: Tensor, want: Tensor) -> None:
    """Bit for bit, wherever the value is finite."""
    finite = want.isfinite()
    assert finite.float().mean() > 0.8
    assert torch.equal(got[finite], want[finite])
    if kind.name not in SIGNED_ZERO:
        assert torch.equal(got[finite].view(torch.int32), want[finite].view(torch.int32))


def test_the_table_is_that_of_gguf() -> None:
    for name, t in TYPES.items():
        assert t.id == GGMLQuantizationType[name]
        assert (t.elements, t.nbytes) == GGML_QUANT_SIZES[GGMLQuantizationType[name]]
        assert BY_ID[t.id] is t
    missing = {t.value for t in GGMLQuantizationType} - BY_ID.keys()
    assert missing == {9, 15}  # Q8_1 and Q8_K: activations
    assert missing <= REMOVED.keys()
    assert not REMOVED.keys() & BY_ID.keys()


@pytest.mark.parametrize("kind", [t for t in QUANTIZED.values() if t.name != "Q1_0"], ids=lambda t: t.name)
def test_values_are_those_of_gguf(kind: BlockType) -> None:
    shape = (7, 5, 4 * kind.elements)
    raw = random_raw(kind, 35, shape[-1])
    assert_same(kind, values(kind, raw, shape), by_gguf(kind, raw, shape))


@pytest.mark.skipif(ggml() is None, reason="ggml's library comes with pywhispercpp")
@pytest.mark.parametrize("name", ["Q1_0", "NVFP4", "TQ1_0"])
def test_values_are_those_of_ggml(name: str) -> None:
    kind = TYPES[name]
    shape = (9, 3 * kind.elements)
    raw = random_raw(kind, 9, shape[-1])
    assert_same(kind, values(kind, raw, shape), ggml_values(raw, kind, shape))


@pytest.mark.parametrize("kind", WRITABLE.values(), ids=WRITABLE)
def test_encoding_gives_the_same_bytes(kind: BlockType) -> None:
    """Of every pattern, scales that are NaN or infinite included."""
    shape = (3, 11, 3 * kind.elements)
    raw = random_raw(kind, 33, shape[-1])
    if kind.name == "TQ1_0":  # several bytes stand for the same five digits: any, made canonical
        raw = kind.encode(kind.decode(raw, shape), shape)
    assert torch.equal(kind.encode(kind.decode(raw, shape), shape), raw)


@TYPE
@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 3), (0,), (3, 0)])
@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_any_shape(kind: BlockType, lead: tuple[int, ...], blocks: int) -> None:
    shape = (*lead, blocks * kind.elements)
    rows = int(np.prod(lead)) if lead else 1
    raw = random_raw(kind, rows, shape[-1])
    parts = kind.decode(raw, shape)
    assert tuple(parts.codes.shape) == shape
    assert dequantize(parts, kind.spec, shape).shape == shape
    flat = (rows, shape[-1])
    one = kind.decode(raw, flat)
    assert torch.equal(one.codes, parts.codes.reshape(flat))
    if kind.pack is not None and kind.name != "TQ1_0":
        assert torch.equal(kind.encode(parts, shape), raw)


@TYPE
def test_parts_are_plain_tensors_of_their_own(kind: BlockType) -> None:
    raw = random_raw(kind, 2, kind.elements)
    before = raw.clone()
    for t in leaves(kind.decode(raw, (2, kind.elements))):
        assert t.is_contiguous()
    assert torch.equal(raw, before)


def leaves(parts: Parts) -> list[Tensor]:
    return [t for p in parts if p is not None for t in (leaves(p) if isinstance(p, Parts) else [p])]


@pytest.mark.parametrize("name", [n for n, t in TYPES.items() if t.plain])
def test_plain_types(name: str) -> None:
    kind = TYPES[name]
    raw = torch.randint(0, 256, (6, 5 * kind.nbytes), dtype=torch.uint8)
    x = kind.decode(raw, (2, 3, 5)).codes
    assert x.dtype is kind.spec
    assert x.view(torch.uint8).flatten().tolist() == raw.flatten().tolist()
    assert torch.equal(kind.encode(Parts(x), (2, 3, 5)), raw)
    odd = torch.cat([torch.zeros(1, dtype=torch.uint8), raw.flatten()])[1:].reshape(6, -1)  # not aligned
    assert torch.equal(kind.decode(odd, (2, 3, 5)).codes.view(torch.uint8), x.view(torch.uint8))
    assert kind.decode(raw[:1, : kind.nbytes], ()).codes.shape == ()
    with pytest.raises(ValueError, match="needs"):
        kind.encode(Parts(torch.zeros(2, 3, 5, dtype=torch.bool)), (2, 3, 5))


def test_codes_that_are_no_numbers_are_refused() -> None:
    for name, at, byte in (("TQ2_0", 5, 0xC0), ("MXFP4", 0, 255), ("NVFP4", 3, 127), ("NVFP4", 0, 128)):
        kind = TYPES[name]
        raw = torch.zeros(2, kind.nbytes, dtype=torch.uint8)
        kind.decode(raw, (2, kind.elements))
        raw[1, at] = byte
        with pytest.raises(ValueError, match=f"{name}: 1 "):
            kind.decode(raw, (2, kind.elements))


def test_wrong_shapes_are_refused() -> None:
    kind = TYPES["Q4_K"]
    with pytest.raises(ValueError, match="multiple of the block size 256"):
        kind.decode(torch.zeros(2, 144, dtype=torch.uint8), (2, 128))
    with pytest.raises(ValueError, match=r"needs uint8 \[2, 144\], got torch.uint8 \[3, 144\]"):
        kind.decode(torch.zeros(3, 144, dtype=torch.uint8), (2, 256))
    read_only = TYPES["IQ2_S"]
    parts = read_only.decode(torch.zeros(1, 82, dtype=torch.uint8), (1, 256))
    with pytest.raises(ValueError, match="IQ2_S is read-only"):
        read_only.encode(parts, (1, 256))


def test_without_gguf_the_codebooks_are_asked_for() -> None:
    code = """
import sys, torch
sys.modules["gguf"] = None
from pennyweight.io.gguf.blocks import TYPES
TYPES["IQ4_XS"].decode(torch.zeros(1, 136, dtype=torch.uint8), (1, 256))
try:
    TYPES["IQ2_S"].decode(torch.zeros(1, 82, dtype=torch.uint8), (1, 256))
except ImportError as e:
    print(e)
"""
    done = forked.run(["-c", code], check=True)
    assert "pip install gguf" in done.stdout


@pytest.mark.exhaustive
@pytest.mark.skipif(ggml() is None, reason="ggml's library comes with pywhispercpp")
@pytest.mark.parametrize("kind", QUANTIZED.values(), ids=QUANTIZED)
def test_what_ggml_quantized(kind: BlockType) -> None:
    """Real blocks: the values that gguf (Q1_0: ggml) has for them, and ggml's own bytes again."""
    shape = (5, 4 * kind.elements)
    x = torch.randn(shape) * torch.randn(5, 1).exp() * 0.02
    x[2] = 0
    raw = ggml_quantize(x, kind, torch.rand(shape[1]) + 0.1)
    want = ggml_values(raw, kind, shape) if kind.name == "Q1_0" else by_gguf(kind, raw, shape)
    assert_same(kind, values(kind, raw, shape), want)
    if kind.writable:
        assert torch.equal(kind.encode(kind.decode(raw, shape), shape), raw)

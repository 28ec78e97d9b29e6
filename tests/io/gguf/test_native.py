"""Native quantizing to GGUF's types writes the bytes of the plain code, and native reading gives the same codes."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from pennyweight.core.numerics import dequantize
from pennyweight.core.packing import pack_bits
from pennyweight.core.spec import QuantSpec
from pennyweight.io.gguf import quantize as module
from pennyweight.io.gguf.blocks import TYPES
from pennyweight.io.gguf.quantize import WEIGHTED, quantize, quantize_native
from pennyweight.kernels.cpu import library
from pennyweight.kernels.native import convert as native_convert
from pennyweight.support.errors import ArgumentError
from tests.io.gguf.samples import random_raw

pytestmark = pytest.mark.skipif(library.available() is not True, reason="no native library")
NAMES = [name for name, kind in TYPES.items() if kind.id in native_convert.GGUF_MADE]
READ = [name for name, kind in TYPES.items() if kind.id in native_convert.GGUF_BLOCKS]


@contextmanager
def plain() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "quantize_native", lambda *args: None)
        yield


def reference(x: Tensor, name: str, importance: Tensor | None = None) -> Tensor:
    with plain():
        return TYPES[name].encode(quantize(x, name, importance), x.shape)


def rows() -> Iterator[Tensor]:
    torch.manual_seed(0)
    yield torch.randn(37, 768)
    yield torch.randn(5, 512) ** 3 * 0.01
    yield torch.randn(1, 256)
    yield torch.cat(
        [
            torch.zeros(1, 256),
            -torch.zeros(1, 256),
            torch.full((1, 256), 2.5),
            -torch.ones(1, 256),
            torch.randn(2, 256).abs(),
            torch.randint(-3, 4, (4, 256)).float(),  # ties
            torch.where(torch.arange(256) % 2 == 0, 0.0, -0.0)[None],
            torch.where(torch.arange(256) == 100, -7.0, 1e-3)[None],
            *(torch.randn(1, 256) * tiny for tiny in (1e-18, 1e-30, 1e-42)),
            torch.randn(1, 256) * 1e4,
        ]
    )


def test_every_type_but_these_has_native_code() -> None:
    without = {name for name in module.RULES if name not in NAMES}
    assert without == {"TQ1_0", "TQ2_0", "MXFP4", "NVFP4"}
    for number, (elements, size, bits, _) in native_convert.GGUF_BLOCKS.items():
        kind = next(kind for kind in TYPES.values() if kind.id == number)
        assert isinstance(kind.spec, QuantSpec)
        assert (kind.elements, kind.nbytes, kind.spec.format.bits) == (elements, size, bits)


@pytest.mark.parametrize("isa", library.isas())
@pytest.mark.parametrize("name", READ)
def test_codes_are_those_of_the_plain_code(name: str, isa: str) -> None:
    """From random bytes: every pattern of bits that a block can have."""
    kind = TYPES[name]
    assert isinstance(kind.spec, QuantSpec)
    library.use_isa(isa)
    try:
        for shape in ((1, 256), (37, 768), (3, 5, 512), (700, 1024), (0, 256), (2, 0)):
            raw = random_raw(kind, math.prod(shape[:-1]), shape[-1])
            want, found = kind.decode(raw, shape), kind.decode_stream(raw, shape)
            assert found is not None
            codes, f = want.codes, kind.spec.format
            codes = pack_bits(f.to_unsigned(codes), f.bits) if f.bits < 8 else codes
            assert found.codes.shape == codes.shape
            assert torch.equal(found.codes.view(torch.uint8), codes.view(torch.uint8))
            for ours, theirs in zip(found[1:], want[1:], strict=True):
                assert same_parts(ours, theirs)
    finally:
        library.use_isa("")


def same_parts(a: Any, b: Any) -> bool:
    """Whether two parts have the same bits: scales of random bytes may be NaN."""
    if isinstance(a, Tensor):
        return (
            a.dtype is b.dtype
            and a.shape == b.shape
            and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        )
    return a is b or all(same_parts(x, y) for x, y in zip(a, b, strict=True))


def test_codes_do_not_depend_on_threads() -> None:
    raw = random_raw(TYPES["Q6_K"], 300, 1024)
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            parts = TYPES["Q6_K"].decode_stream(raw, (300, 1024))
            assert parts is not None
            found.append(parts.codes)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_codes_of_wrong_arguments() -> None:
    blocks, out = torch.zeros(18 * 3, dtype=torch.uint8), torch.zeros(16 * 3, dtype=torch.uint8)
    native_convert.gguf_codes(2, blocks, out, 1)
    for type_, x, y in ((4, blocks, out), (2, blocks[1:], out), (2, blocks, out[1:]), (2, blocks.float(), out)):
        with pytest.raises(ArgumentError, match="gguf"):
            native_convert.gguf_codes(type_, x, y, 1)


@pytest.mark.parametrize("isa", library.isas())
@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_are_those_of_the_plain_code(name: str, isa: str) -> None:
    library.use_isa(isa)
    try:
        for x in rows():
            for importance in (None, torch.rand(x.shape[1]) ** 4 + 1e-3):
                for dtype in (torch.float32, torch.bfloat16, torch.float16):
                    x = x.to(dtype)
                    found = quantize_native(x, name, importance)
                    assert found is not None
                    assert torch.equal(found.raw, reference(x, name, importance))
    finally:
        library.use_isa("")


@pytest.mark.parametrize("isa", library.isas())
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sign", [-1, 1])
def test_an_element_without_importance_may_lie_far_beyond_the_codes(name: str, isa: str, sign: int) -> None:
    x, importance = torch.full((1, 256), 1e-3), torch.ones(256)
    x[0, 100], importance[100] = sign * 7.0, 0.0
    library.use_isa(isa)
    try:
        found = quantize_native(x, name, importance)
        assert found is not None
        assert torch.equal(found.raw, reference(x, name, importance))
    finally:
        library.use_isa("")


@pytest.mark.parametrize("name", NAMES)
def test_sums_and_threads(name: str) -> None:
    x = torch.randn(300, 512)  # above the size from which a second thread helps
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            found.append(quantize_native(x, name))
    finally:
        torch.set_num_threads(threads)
    first, second = found
    assert first is not None
    assert second is not None
    assert torch.equal(first.raw, second.raw)
    assert first[1:] == second[1:]
    y = dequantize(TYPES[name].decode(first.raw, x.shape), TYPES[name].spec, x.shape)
    assert first.signal == pytest.approx(float(x.double().square().sum()), rel=1e-6)
    assert first.noise == pytest.approx(float((y - x).double().square().sum()), rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_views_and_experts(name: str) -> None:
    x = torch.randn(3, 8, 256)
    want = reference(x, name)
    for view in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
        found = quantize_native(view, name)
        assert found is not None
        assert torch.equal(found.raw, want)
    if name in WEIGHTED:
        importance = torch.rand(3, 256) + 0.1
        found = quantize_native(x, name, importance)
        assert found is not None
        assert torch.equal(found.raw, reference(x, name, importance))


@pytest.mark.parametrize("name", NAMES)
def test_what_the_plain_code_refuses_stays_refused(name: str) -> None:
    x = torch.randn(2, 256)
    for value in (torch.nan, torch.inf, -torch.inf):
        for at in (0, 100, 511):
            bad = x.clone()
            bad.view(-1)[at] = value
            with pytest.raises(ValueError, match="1 of 512 values are NaN or infinite"):
                quantize(bad, name)
    with pytest.raises(ValueError, match="float16 maximum is 65504"):
        quantize(x * 1e9, name)
    with pytest.raises(ValueError, match="expected one per column"):
        quantize(x, name, torch.ones(128))


def test_the_gate() -> None:
    x, out = torch.randn(2, 256), torch.empty(2 * 144, dtype=torch.uint8)
    sums = torch.empty(1, 2, dtype=torch.float64)
    assert native_convert.gguf_quantize(12, x, None, out, sums, 1)
    for bad in (
        (4, x, None, out, sums),
        (12, x.double(), None, out, sums),
        (12, x[:, :128], None, out, sums),
        (12, x[:, ::2], None, out, sums),
        (12, x, torch.ones(128), out, sums),
        (12, x, torch.ones(256).double(), out, sums),
        (12, x, None, out[1:], sums),
        (12, x, None, out, sums[:0]),
    ):
        with pytest.raises(ArgumentError, match="gguf"):
            native_convert.gguf_quantize(*bad, 1)

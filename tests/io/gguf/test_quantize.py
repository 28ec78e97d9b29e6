"""Floats to block types: the gguf package's own bytes where it has an encoder, ggml's error where it has none."""

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from pennyweight.core.numerics import dequantize
from pennyweight.io.gguf.blocks import TYPES
from pennyweight.io.gguf.quantize import RULES, quantize
from tests.io.gguf.samples import ggml, ggml_quantize

EXACT = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")
SEARCHED = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "NVFP4")
NEEDS_GGML = pytest.mark.skipif(ggml() is None, reason="ggml's library comes with pywhispercpp")


def data(name: str, rows: int = 64, n: int = 512) -> Tensor:
    x = torch.randn(rows, n)
    if name == "heavy":  # Student's t with 3 degrees of freedom
        x = x / (torch.randn(3, rows, n).square().mean(0)).sqrt()
    if name == "laplace":
        x = torch.rand(rows, n).clamp_min(1e-6).log() * x.sign()
    if name == "uneven":  # some columns far larger than others, as in the matrices of a language model
        x = x * torch.randn(n).exp()
    return x * 0.02


DATA = ("gauss", "heavy", "laplace", "uneven")


def values(x: Tensor, name: str, importance: Tensor | None = None) -> Tensor:
    return dequantize(quantize(x, name, importance), TYPES[name].spec, x.shape)


def awkward() -> Tensor:
    """Rows of zeros, of one number, one sign, one outlier, powers of two, ties."""
    x = torch.randn(9, 256)
    x[0] = 0
    x[1] = -0.75
    x[2] = x[2].abs() + 3
    x[3] = -x[3].abs() - 3
    x[4] *= 1e-3
    x[4, 77] = 50
    x[5] = torch.randint(-8, 9, (256,)).float()
    x[6] = 2.0 ** torch.randint(-6, 6, (256,))
    x[7] = torch.nextafter(x[6], torch.zeros(()))
    x[8, 32:] = 0
    return x


@pytest.mark.parametrize("name", EXACT)
def test_the_bytes_are_those_of_gguf(name: str) -> None:
    for x in (*(data(d) for d in DATA), awkward()):
        want = torch.from_numpy(quants.quantize(x.numpy(), GGMLQuantizationType[name])).view(torch.uint8)
        assert torch.equal(TYPES[name].encode(quantize(x, name), x.shape), want)


@NEEDS_GGML
@pytest.mark.parametrize("name", SEARCHED)
@pytest.mark.parametrize("which", DATA)
def test_the_error_is_not_above_that_of_ggml(name: str, which: str) -> None:
    x, kind = data(which), TYPES[name]
    theirs = dequantize(kind.decode(ggml_quantize(x, kind), x.shape), kind.spec, x.shape)
    ours = values(x, name)
    assert (ours - x).double().square().mean() <= (theirs - x).double().square().mean()


@NEEDS_GGML
@pytest.mark.parametrize("name", [n for n in SEARCHED if n != "NVFP4"])
@pytest.mark.parametrize("which", DATA)
def test_with_importance_too(name: str, which: str) -> None:
    x, kind = data(which), TYPES[name]
    importance = torch.rand(512) ** 4 + 0.01
    theirs = dequantize(kind.decode(ggml_quantize(x, kind, importance), x.shape), kind.spec, x.shape)

    def error(y: Tensor) -> Tensor:
        return ((y - x).double().square() * importance).mean()

    # what both minimise weighs large elements more, so neither has the least of this error
    assert error(values(x, name, importance)) <= 1.03 * error(theirs)
    assert error(values(x, name, importance)) < 0.97 * error(values(x, name))


@pytest.mark.parametrize("name", RULES)
def test_awkward_rows(name: str) -> None:
    x = awkward()
    y = values(x, name)
    assert y.isfinite().all()
    assert (y[0] == 0).all()
    reach = x.abs().amax(1, keepdim=True)
    assert ((y - x).abs() <= reach * (0.51 if name in ("TQ1_0", "TQ2_0", "Q2_K") else 0.3)).all()
    raw = TYPES[name].encode(quantize(x, name), x.shape)
    again = dequantize(TYPES[name].decode(raw, x.shape), TYPES[name].spec, x.shape)
    assert torch.equal(again, y)


@pytest.mark.parametrize("name", RULES)
def test_leading_axes_and_chunks_do_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = data("heavy", 15, 256)
    whole = TYPES[name].encode(quantize(x, name), x.shape)
    for shape in ((3, 5, 256), (5, 1, 3, 256)):
        assert torch.equal(TYPES[name].encode(quantize(x.view(shape), name), shape), whole)
    assert torch.equal(TYPES[name].encode(quantize(x[4], name), (256,)), whole[4:5])
    assert torch.equal(TYPES[name].encode(quantize(x.t().contiguous().t(), name), x.shape), whole)
    monkeypatch.setattr("pennyweight.io.gguf.quantize._CHUNK", 1024)
    assert torch.equal(TYPES[name].encode(quantize(x, name), x.shape), whole)
    for shape in ((0, 256), (3, 0), (0, 2, 256)):
        parts = quantize(torch.zeros(shape), name)
        assert tuple(parts.codes.shape) == shape
        assert TYPES[name].encode(parts, shape).numel() == 0


@pytest.mark.parametrize("name", RULES)
def test_the_number_of_threads_does_not_matter(name: str) -> None:
    x, threads = data("heavy", 140, 256), torch.get_num_threads()
    found = []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            found.append(TYPES[name].encode(quantize(x, name), x.shape))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", RULES)
def test_small_and_large_numbers(name: str) -> None:
    """A power of two moves the scales alone, where float16 has room for them; next to zero nothing breaks."""
    x = data("gauss", 3, 256)
    if name not in ("NVFP4",):
        assert torch.equal(values(x * 64, name), values(x, name) * 64) or "_K" in name or name == "IQ4_XS"
    for tiny in (1e-6, 1e-12, 1e-30, 1e-42):
        y = values(x * tiny, name)
        assert y.isfinite().all()
        assert (y.abs() <= 4 * tiny + 2.0**-20).all()


def test_what_cannot_be_quantized_is_refused() -> None:
    x = torch.randn(2, 256)
    for name in ("IQ2_S", "I8", "Q9"):
        with pytest.raises(ValueError, match=f"'{name}' is not a type that floats .* known: F32, F16, Q4_0"):
            quantize(x, name)
    with pytest.raises(ValueError, match="multiple of the block size 256"):
        quantize(x[:, :128], "Q4_K")
    with pytest.raises(ValueError, match="1 of 512 values are NaN"):
        quantize(torch.where(torch.arange(512).view(2, 256) == 7, torch.nan, x), "Q4_0")
    with pytest.raises(ValueError, match="float16 maximum is 65504"):
        quantize(x * 1e8, "Q4_0")
    with pytest.raises(ValueError, match="F16 cannot represent"):
        quantize(x * 1e8, "F16")
    with pytest.raises(ValueError, match="expected one per column, 256"):
        quantize(x, "Q4_K", torch.ones(2, 256))

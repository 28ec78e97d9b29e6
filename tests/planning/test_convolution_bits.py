"""Bits per weight of convolutions: in memory, as planned, in files and in pickles, whatever the kernel."""

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.core.layouts import get_layout
from pennyweight.core.spec import SPECS
from pennyweight.io.safetensors_file import File

LAYERS: dict[str, Any] = {
    "1x1": lambda: nn.Conv2d(128, 64, 1, bias=False),
    "3x3": lambda: nn.Conv2d(128, 64, 3, bias=False),
    "3x3 of groups": lambda: nn.Conv2d(256, 64, 3, groups=2, bias=False),
    "64x1": lambda: nn.Conv2d(128, 16, (64, 1), bias=False),
    "1-d, 3": lambda: nn.Conv1d(128, 64, 3, bias=False),
    "3-d": lambda: nn.Conv3d(128, 16, 3, bias=False),
    "transposed": lambda: nn.ConvTranspose2d(128, 128, 3, bias=False),
}
# least and most bits per weight, scales included
CONFIGS: dict[str, tuple[Any, float, float]] = {
    "int4": ("int4", 4.25, 4.75),
    "int4, symmetric groups of 64": (pw.IntxWeightOnlyConfig(torch.int4, pw.PerGroup(64)), 4.25, 4.75),
    "int4 per channel": (pw.IntxWeightOnlyConfig(torch.int4, pw.PerAxis(0)), 4.0, 4.5),
    "int3": (pw.IntxWeightOnlyConfig(torch.int3, pw.PerGroup(64)), 3.25, 3.75),
    "int2": (pw.IntxWeightOnlyConfig(torch.int2, pw.PerGroup(64)), 2.25, 2.75),
    "uint4, zero points": (pw.UIntXWeightOnlyConfig("uint4", 64), 4.25, 4.9),
    "uint3, zero points": (pw.UIntXWeightOnlyConfig("uint3", 64), 3.25, 3.9),
    "nf4": ("nf4", 4.1, 5.2),
    "mxfp4": ("mxfp4", 4.25, 4.25),
    "mxfp6": ("mxfp6", 6.25, 6.25),
    "mxfp8": ("mxfp8", 8.25, 8.25),
    "nvfp4": ("nvfp4", 4.5, 4.51),
}  # fmt: skip


def convolutions(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.modules.conv._ConvNd)


def stored_bits(folder: Path, numel: int) -> float:
    """Bits per weight of what the file stores, without its header."""
    file = File(str(folder / "model.safetensors"), True)
    try:
        return 8 * sum(e.end - e.begin for e in file.entries.values()) / numel
    finally:
        file.close()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_bits_are_what_they_are_called(layer: Any, config: Any, tmp_path: Path) -> None:
    settings, least, most = config
    model = nn.Sequential(layer())
    numel = model[0].weight.numel()
    planned = pw.plan(model, settings, convolutions)
    report = pw.quantize_(model, settings, convolutions)
    w = model[0].weight
    assert planned.rows[0].bytes_after == w.nbytes == report.rows[0].bytes_after
    assert least <= 8 * w.nbytes / numel <= most
    pw.save(model, tmp_path)
    assert least <= stored_bits(tmp_path, numel) <= most
    back = pw.load(tmp_path)["0.weight"]
    assert least <= 8 * back.nbytes / numel <= most
    assert torch.equal(back.dequantize(), w.dequantize())
    buffer = io.BytesIO()
    torch.save(w, buffer)
    assert len(buffer.getvalue()) <= numel * most / 8 + 4096
    buffer.seek(0)
    assert torch.equal(torch.load(buffer).dequantize(), w.dequantize())


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "nvfp4"])
def test_blocks_of_a_standard_run_along_the_input_channels(name: str) -> None:
    size = 16 if name == "nvfp4" else 32
    x = torch.randn(4, 2 * size, 3, 3, generator=torch.Generator().manual_seed(0))
    conv, linear = nn.Conv2d(2 * size, 4, 3, bias=False), nn.Linear(2 * size, 36, bias=False)
    conv.weight.data = x
    linear.weight.data = x.permute(0, 2, 3, 1).reshape(36, 2 * size)
    pw.quantize_(conv, name, convolutions)
    pw.quantize_(linear, name)
    assert conv.weight.spec.block == (size, 1, 1)
    same = linear.weight.dequantize().view(4, 3, 3, 2 * size).permute(0, 3, 1, 2)
    assert torch.equal(conv.weight.dequantize(), same)


def test_a_scheme_that_is_larger_says_so() -> None:
    """In the plan, in the report and in its first line."""
    model = nn.Sequential(nn.Conv2d(64, 64, 3, groups=64), nn.Conv2d(64, 64, 1))
    config = pw.IntxWeightOnlyConfig(torch.int4, pw.PerGroup(1))
    for said in (pw.plan(model, config, convolutions), pw.quantize_(model, config, convolutions)):
        assert [r.note for r in said.rows if r.note.startswith("larger than float: 36.0 bits")], said
        assert "larger than int8 or float" in str(said)
    report = pw.quantize_(nn.Sequential(nn.Linear(64, 64, bias=False)), "int8")
    assert "larger" not in str(report)
    groups = pw.IntxWeightOnlyConfig(torch.int4, pw.PerGroup(4))
    report = pw.quantize_(nn.Sequential(nn.Linear(256, 64, bias=False)), groups)
    assert "larger than int8: 12.0 bits per weight" in report.rows[0].note


@pytest.mark.filterwarnings("ignore::pennyweight.FallbackWarning")  # flatten cuts through blocks of the last axis
@pytest.mark.parametrize("spec", [s for s in SPECS.values() if s.format.bits < 8], ids=str)
@pytest.mark.parametrize(
    "shape", [(3, 5, 1, 1), (2, 7, 3, 3), (4, 1, 5), (1, 1, 1, 1), (2, 3, 2, 2, 2), (0, 4, 1)], ids=str
)
def test_flat_streams(spec: pw.QuantSpec, shape: tuple[int, ...]) -> None:
    """Any rank and odd sizes, after every op that changes the shape, and in place."""
    if spec.format.dim > 1 or (0 in shape and spec.scale is None):
        pytest.skip("learned formats are in tests/core/test_codebook.py")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    plain = pw.AffineQuantizedTensor.from_float(x, spec.with_(layout="plain"))
    flat = plain.to_layout("flat_bits")
    assert flat.nbytes == get_layout("flat_bits").nbytes(spec, shape)
    exact = plain.dequantize()
    for made in (flat, flat.clone(), flat.to_layout("bits"), flat.t() if flat.ndim == 2 else flat.transpose(0, 1)):
        value = made.dequantize() if made.shape == exact.shape else made.dequantize().transpose(0, 1)
        assert torch.equal(value.reshape(exact.shape), exact)
    assert torch.equal(flat[:1].dequantize(), exact[:1])
    assert torch.equal(flat.reshape(flat.shape[0], math.prod(shape[1:])).dequantize(), exact.flatten(1))
    flat.copy_(x)
    assert torch.equal(flat.dequantize(), exact)

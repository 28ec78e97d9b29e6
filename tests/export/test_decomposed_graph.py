"""Exported programs with quantized_decomposed operators compute what the model computes, without this package."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.export.decomposed_graph import export_quantize_dequantize
from tests import forked

D = "quantized_decomposed."
DYNAMIC = ["choose_qparams_per_token_asymmetric", "quantize_per_token", "dequantize_per_token"]
TOKEN = ["quantize_per_token", "dequantize_per_token"]
# config -> operators of one linear layer, relative error of the outputs
CASES: dict[str, tuple[Any, list[str], float]] = {
    "int8 per row": (pw.Int8WeightOnlyConfig(), ["dequantize_per_channel"], 1e-6),
    "int8 per tensor": (pw.Int8WeightOnlyConfig(granularity=pw.PerTensor()), ["dequantize_per_tensor"], 1e-6),
    "int8 groups": (pw.Int8WeightOnlyConfig(granularity=pw.PerGroup(16)), ["dequantize_per_channel_group"], 1e-6),
    "int4 groups": (pw.IntxWeightOnlyConfig("int4", pw.PerGroup(32)), ["dequantize_per_channel_group"], 1e-6),
    "int4 asymmetric": (
        pw.IntxWeightOnlyConfig("int4", pw.PerGroup(32), pw.MappingType.ASYMMETRIC),
        ["dequantize_per_channel_group"], 1e-6,
    ),
    "tinygemm": (pw.Int4WeightOnlyConfig(group_size=32), ["dequantize_per_channel_group"], 1e-6),
    "uint3, groups that do not divide": (pw.UIntXWeightOnlyConfig("uint3", 40), ["dequantize_per_channel_group"], 1e-6),
    "int8 dynamic": (pw.Int8DynamicActivationInt8WeightConfig(), [*TOKEN, "dequantize_per_channel"], 1e-5),
    "int8 dynamic per tensor": (
        pw.Int8DynamicActivationInt8WeightConfig(granularity=(pw.PerTensor(), pw.PerRow())),
        ["quantize_per_tensor", "dequantize_per_tensor", "dequantize_per_channel"], 1e-5,
    ),
    "int8 dynamic asymmetric": (
        pw.Int8DynamicActivationInt8WeightConfig(pw.MappingType.ASYMMETRIC), [*DYNAMIC, "dequantize_per_channel"], 1e-2,
    ),
    "8da4w": (pw.Int8DynamicActivationIntxWeightConfig("int4"), [*DYNAMIC, "dequantize_per_channel_group"], 1e-2),
    "static": (
        pw.Int8StaticActivationInt8WeightConfig(0.03),
        ["quantize_per_tensor", "dequantize_per_tensor", "dequantize_per_channel"], 1e-5,
    ),
}  # fmt: skip


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 8, bias=False)).eval()


def names(program: torch.export.ExportedProgram) -> list[str]:
    targets = [str(n.target) for n in program.graph.nodes]
    return [t.removeprefix(D).partition(".")[0] for t in targets if t.startswith(D)]


@pytest.mark.parametrize("name", CASES)
def test_values_and_operators(name: str) -> None:
    config, kept, tolerance = CASES[name]
    m, x = model(), torch.randn(5, 64)
    pw.quantize_(m, config)
    program = export_quantize_dequantize(m, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    assert names(program) == kept * 2
    assert not any("pennyweight" in str(n.target) for n in program.graph.nodes)
    for rows in (x, torch.randn(3, 64)):
        want = m(rows)
        assert (program.module()(rows) - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("name", ["int8 per row", "int4 asymmetric", "tinygemm", "uint3, groups that do not divide"])
def test_weights_are_the_dequantized_ones_bit_for_bit(name: str) -> None:
    m = nn.Sequential(nn.Linear(64, 64, bias=False))
    pw.quantize_(m, CASES[name][0])
    program = export_quantize_dequantize(m, (torch.eye(64),))
    assert torch.equal(program.module()(torch.eye(64)).T, m[0].weight.dequantize())


def test_an_embedding_tied_to_a_layer_is_stored_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 32), nn.Linear(32, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(index))

    m, index = Tied(), torch.tensor([[1, 19, 4]])
    pw.quantize_(m, pw.Int8WeightOnlyConfig(), lambda module, name: name in ("embed", "head"))
    program = export_quantize_dequantize(m, (index,))
    assert torch.allclose(program.module()(index), m(index), atol=1e-6)
    assert sum(t.dtype is torch.int8 for t in program.state_dict.values()) == 1


def test_a_convolution() -> None:
    torch.manual_seed(0)
    m, x = nn.Sequential(nn.Conv2d(4, 6, 3)), torch.randn(2, 4, 8, 8)
    pw.quantize_(m, pw.Int8WeightOnlyConfig(), lambda module, name: isinstance(module, nn.Conv2d))
    program = export_quantize_dequantize(m, (x,))
    assert names(program) == ["dequantize_per_channel"]
    assert torch.allclose(program.module()(x), m(x), atol=1e-5)


def test_the_program_runs_without_this_package(tmp_path: Path) -> None:
    m, x = model(), torch.randn(5, 64)
    pw.quantize_(m, pw.Int8DynamicActivationInt8WeightConfig())
    program = export_quantize_dequantize(m, (x,))
    file = io.BytesIO()
    torch.export.save(program, file)
    (tmp_path / "m.pt2").write_bytes(file.getvalue())
    torch.save((x, program.module()(x)), tmp_path / "xy.pt")
    code = f"""
import sys, torch
from torch.ao.quantization.fx import _decomposed
x, y = torch.load(r"{tmp_path / "xy.pt"}")
print(torch.allclose(torch.export.load(r"{tmp_path / "m.pt2"}").module()(x), y), "pennyweight" in sys.modules)
"""
    done = forked.run(["-c", code], cwd=tmp_path)
    assert done.stdout.split() == ["True", "False"], done.stderr


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (pw.Float8WeightOnlyConfig(), r"0\.weight: quantized_decomposed has integers of at most 8 bits, not e4m3"),
        (pw.NF4WeightOnlyConfig(32), r"0\.weight: quantized_decomposed has integers"),
        (pw.Float8DynamicActivationInt4WeightConfig(32), r"0\.weight: no operator quantizes its input as dynamic e4m3"),
        (pw.Int8DynamicActivationInt8WeightConfig(act_group_size=16), r"0\.weight: no operator quantizes its input"),
    ],
)
def test_what_no_operator_has_is_refused_by_name(config: Any, says: str) -> None:
    m = model()
    pw.quantize_(m, config)
    with pytest.raises(ValueError, match=says):
        export_quantize_dequantize(m, (torch.randn(5, 64),))


def test_another_dtype_is_refused() -> None:
    m = model().bfloat16()
    pw.quantize_(m, pw.Int8WeightOnlyConfig())
    with pytest.raises(ValueError, match=r"0\.weight is not float32; call model\.float"):
        export_quantize_dequantize(m, (torch.randn(5, 64, dtype=torch.bfloat16),))


def test_the_model_stays_as_it_is() -> None:
    m, x = model(), torch.randn(5, 64)
    pw.quantize_(m, pw.Int8WeightOnlyConfig())
    before, weight = m(x), m[0].weight
    export_quantize_dequantize(m, (x,))
    assert m[0].weight is weight
    assert torch.equal(m(x), before)

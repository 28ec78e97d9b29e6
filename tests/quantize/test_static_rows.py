"""A static activation with one scale per row of inputs that always have the same number of rows."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import pennyweight as pw


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 16))


SCALES = torch.tensor([[0.01], [0.02], [0.04]])


def quantized(**more: object) -> nn.Sequential:
    m = model()
    pw.quantize_(m, pw.Int8StaticActivationInt8WeightConfig(SCALES, granularity=pw.PerRow(), **more))  # type: ignore[arg-type]
    return m


@pytest.mark.parametrize("shape", [(3, 64), (1, 3, 64), (3, 1, 64)])
def test_each_row_is_rounded_with_its_scale(shape: tuple[int, ...]) -> None:
    m, x = quantized(), torch.randn(shape)
    scale = SCALES.reshape(*shape[:-1], 1)
    rounded = (x * (1 / scale)).round().clamp(-128, 127) * scale
    want = nn.functional.linear(rounded, m[0].weight.dequantize(), m[0].bias)
    assert torch.allclose(m(x), want, atol=1e-5)
    assert m[0].weight.act_scale.shape == (3, 1)


def test_zero_points() -> None:
    m, x = quantized(act_mapping_type=pw.MappingType.ASYMMETRIC, act_quant_zero_point=5), torch.randn(3, 64)
    codes = ((x * (1 / SCALES)).round() + 5).clamp(-128, 127)
    want = nn.functional.linear((codes - 5) * SCALES, m[0].weight.dequantize(), m[0].bias)
    assert torch.allclose(m(x), want, atol=1e-5)


def test_another_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the input has 4 rows of 64, and act_scale has 3 scales, one per row"):
        quantized()(torch.randn(4, 64))


def test_it_needs_activations_per_row() -> None:
    with pytest.raises(ValueError, match=r"one value per row, and activations have PerTensor\(\); pass granularity"):
        pw.Int8StaticActivationInt8WeightConfig(SCALES, granularity=pw.PerTensor())
    with pytest.raises(ValueError, match="act_quant_scale"):
        pw.Int8StaticActivationInt8WeightConfig(torch.tensor([[0.1], [0.0]]))
    config = pw.Int8StaticActivationInt8WeightConfig(SCALES)
    assert hash(config) == hash(pw.Int8StaticActivationInt8WeightConfig(SCALES.clone()))


def test_quantizing_again_copies_pickles_and_compiles() -> None:
    m, x = quantized(), torch.randn(3, 64)
    weight, want = m[0].weight, m(x)
    pw.quantize_(m, pw.Int8StaticActivationInt8WeightConfig(SCALES))
    assert m[0].weight is weight
    assert torch.equal(copy.deepcopy(m)(x), want)
    assert torch.equal(pickle.loads(pickle.dumps(m))(x), want)
    torch._dynamo.reset()
    assert torch.allclose(torch.compile(m, backend="aot_eager", fullgraph=True)(x), want, atol=1e-5)


def test_a_file_has_one_scale_only(tmp_path: Path) -> None:
    with pytest.raises(pw.CheckpointError, match="must have one scale"):
        pw.save(quantized(), tmp_path / "m")

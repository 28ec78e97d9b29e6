"""torchao.prototype.quantized_training: weights whose products are quantized, and weights of 8 or 2 bits."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from pennyweight.core.tensor import AffineQuantizedTensor as QT

FOLDER = Path(__file__).parent / "golden"
TOLD = load_file(FOLDER / "torchao_0.12_quantized_training.safetensors")
COMPILED = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
pytestmark = pytest.mark.usefixtures("torchao")
NAMES = ("int8", "mixed", "mixed_two", "bitnet")


def make(name: str, w: torch.Tensor) -> Any:
    from torchao.prototype.quantized_training import (
        BitNetTrainingLinearWeight,
        Int8MixedPrecisionTrainingConfig,
        Int8MixedPrecisionTrainingLinearWeight,
        Int8QuantizedTrainingLinearWeight,
    )

    if name == "int8":
        return Int8QuantizedTrainingLinearWeight.from_float(w)
    if name == "bitnet":
        return BitNetTrainingLinearWeight(w)
    return Int8MixedPrecisionTrainingLinearWeight(w, Int8MixedPrecisionTrainingConfig(grad_weight=name == "mixed"))


@pytest.mark.parametrize("name", NAMES)
def test_products_and_gradients_are_torchaos(name: str) -> None:
    p = nn.Parameter(make(name, TOLD["w"]), requires_grad=True)
    x = TOLD["x"].clone().requires_grad_()
    y = F.linear(x, p, TOLD["bias"])
    y.backward(TOLD["g"])
    assert type(y) is torch.Tensor
    for key, value in (("y", y.detach()), ("x", x.grad), ("w", p.grad)):
        told = TOLD[f"{name}.{key}"]
        assert type(value) is torch.Tensor
        assert float((value - told).norm()) <= 1e-6 * float(told.norm())
    high = F.linear(TOLD["x"], TOLD["w"], TOLD["bias"])
    assert not torch.equal(y, high)


@pytest.mark.parametrize("name", ["mixed", "bitnet"])
def test_a_weight_in_a_users_own_code(name: str) -> None:
    """Batches of any shape, products by matmul, a bfloat16 weight, and every other operator on the value."""
    w = TOLD["w"]
    p = make(name, w.clone())
    x = torch.randn(2, 3, 32)
    told = F.linear(x, p)
    assert torch.equal(x @ p.t(), told)
    assert torch.equal(torch.matmul(x, p.t()), told)
    assert torch.equal(F.linear(x.flatten(0, 1), p), told.flatten(0, 1))
    half = F.linear(x.bfloat16(), p.to(torch.bfloat16))
    assert half.dtype is torch.bfloat16
    assert type(p.to(torch.bfloat16)) is type(p.detach()) is type(p.clone()) is type(p[:4]) is type(p)
    for value in (p + 0, p * 1, p.detach()._data, p.sum(0) * 0 + w, torch.cat([p, p])[:16]):
        assert torch.equal(value, w)
        assert type(value) is torch.Tensor
    assert torch.equal(p[:4]._data, w[:4])
    assert [tuple(piece.shape) for piece in p.split(8)] == [(8, 32)] * 2
    assert name == "bitnet" or "config=Int8MixedPrecisionTrainingConfig" in repr(p)
    with torch.no_grad():
        p.mul_(2)
        assert torch.equal(p._data, 2 * w)
        p.copy_(w)
        assert torch.equal(p._data, w)
    assert p.data_ptr() is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(x, p).dtype is torch.bfloat16


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "AdamW8bit", "_AdamW"])
def test_training(name: str, optimizer: str, tmp_path: Path) -> None:
    from torchao import optim

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32))
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(make(name, layer.weight.detach()), requires_grad=True)
    x = torch.randn(64, 32)
    y = x.roll(1, 1)
    rate = {"SGD": 0.1}.get(optimizer, 3e-3)
    step = getattr(optim if hasattr(optim, optimizer) else torch.optim, optimizer)(model.parameters(), lr=rate)
    losses = []
    for _ in range(30):
        loss = (model(x) - y).square().mean()
        losses.append(loss.item())
        loss.backward()
        step.step()
        step.zero_grad()
    assert losses[-1] < (0.97 if optimizer == "SGD" else 0.75) * losses[0]
    assert type(model[0].weight.detach()) is type(make(name, TOLD["w"]).detach())
    torch.save(model.state_dict(), tmp_path / "m.pt")
    again = copy.deepcopy(model)
    again.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True))
    assert torch.equal(again(x), model(x))


@COMPILED
def test_compiled() -> None:
    for name in ("mixed", "bitnet"):
        layer = nn.Linear(32, 16)
        layer.weight = nn.Parameter(make(name, TOLD["w"]))
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(TOLD["x"]), layer(TOLD["x"]))
        compiled(TOLD["x"]).square().sum().backward()
        got = layer.weight.grad.clone()
        layer.weight.grad = None
        layer(TOLD["x"]).square().sum().backward()
        torch.testing.assert_close(got, layer.weight.grad)


def test_int8_weights() -> None:
    from torchao.prototype.quantized_training import (
        Int8QuantizedTrainingLinearWeight,
        int8_weight_only_quantized_training,
    )
    from torchao.quantization import quantize_

    w = Int8QuantizedTrainingLinearWeight.from_float(TOLD["w"].bfloat16())
    assert type(w) is QT
    assert isinstance(w, Int8QuantizedTrainingLinearWeight)
    assert w.dtype is torch.bfloat16
    assert torch.equal(w.int_data, TOLD["half.codes"])
    assert torch.equal(w.scale.view(-1), TOLD["half.scale"])
    made = Int8QuantizedTrainingLinearWeight(w.int_data, w.scale.view(-1))
    assert torch.equal(made.dequantize(), w.dequantize())
    assert torch.equal(made.dequantize(), w.int_data * w.scale)
    told = Int8QuantizedTrainingLinearWeight.take(w)
    assert torch.equal(told["scale"], TOLD["half.scale"])
    assert Int8QuantizedTrainingLinearWeight.from_float(TOLD["w"].clone().requires_grad_()).requires_grad
    model = nn.Sequential(nn.Linear(32, 32))
    quantize_(model, int8_weight_only_quantized_training())
    assert isinstance(model[0].weight, Int8QuantizedTrainingLinearWeight)
    with pytest.raises(AssertionError, match=r"scale \[rows\], got \[16, 32\] and \[16, 1\]"):
        Int8QuantizedTrainingLinearWeight(w.int_data, w.scale)


def test_two_bit_weights() -> None:
    from torchao.prototype.quantized_training.bitnet import BitNetPacked2bitLinearWeight

    w = BitNetPacked2bitLinearWeight(TOLD["packed.data"], torch.tensor(0.3))
    assert type(w) is QT
    assert isinstance(w, BitNetPacked2bitLinearWeight)
    assert torch.equal(w.dequantize(), TOLD["packed.value"])
    torch.testing.assert_close(F.linear(TOLD["x"][:, :16], w), TOLD["packed.y"], rtol=1e-5, atol=1e-5)
    assert torch.equal(BitNetPacked2bitLinearWeight.take(w)["int_data"], TOLD["packed.data"])
    with pytest.raises(AssertionError, match="scale must be one number"):
        BitNetPacked2bitLinearWeight(TOLD["packed.data"], torch.ones(1))


def test_scaled_products_of_bytes() -> None:
    from torchao.prototype.quantized_training.int8_mm import scaled_int8_mm

    a, b = torch.randint(-128, 128, (5, 33), dtype=torch.int8), torch.randint(-128, 128, (33, 7), dtype=torch.int8)
    rows, columns = torch.rand(5), torch.rand(7)
    told = (a.double() @ b.double()).float() * columns * rows.view(-1, 1)
    assert torch.equal(scaled_int8_mm(a, b, rows, columns), told)
    assert torch.equal(
        scaled_int8_mm(a, b, rows, torch.tensor(0.5)), (a.double() @ b.double()).float() * 0.5 * rows.view(-1, 1)
    )


def test_the_layer_of_int8_products() -> None:
    from torchao.prototype.quantized_training import (
        Int8MixedPrecisionTrainingConfig,
        Int8MixedPrecisionTrainingLinear,
        int8_mixed_precision_training,
    )
    from torchao.quantization import quantize_

    layer = Int8MixedPrecisionTrainingLinear(32, 16, config=Int8MixedPrecisionTrainingConfig(grad_input=False))
    assert not layer.recipe.grad_input.quantized
    assert layer.recipe.output.quantized
    model = nn.Sequential(nn.Linear(32, 16))
    model[0].load_state_dict(layer.state_dict())
    quantize_(model, int8_mixed_precision_training())
    assert isinstance(model[0], Int8MixedPrecisionTrainingLinear)
    assert not isinstance(nn.Linear(2, 2), Int8MixedPrecisionTrainingLinear)
    assert torch.equal(layer(TOLD["x"]), model[0](TOLD["x"]))


def test_torchaos_files_load() -> None:
    """What torch.save wrote of torchao's weights: the same values and products."""
    saved = torch.load(FOLDER / "torchao_0.12_quantized_training.pt", weights_only=True)
    for name in NAMES:
        w, told = saved[name], make(name, TOLD["w"])
        assert type(w) is type(told)
        y = F.linear(TOLD["x"], w, TOLD["bias"])
        assert float((y - TOLD[f"{name}.y"]).norm()) <= 1e-6 * float(y.norm())
    assert torch.equal(saved["packed"].dequantize(), TOLD["packed.value"])


def test_arguments_of_the_int8_config() -> None:
    import dataclasses
    import pickle

    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig, int8_mixed_precision_training

    from pennyweight import training

    config = Int8MixedPrecisionTrainingConfig(True, False, True, module_swap=True)
    assert isinstance(config, training.Int8MixedPrecisionTrainingConfig)
    assert (config.output, config.grad_input, config.grad_weight, config.recipe) == (True, False, True, "int8")
    assert not config.make().grad_input.quantized
    assert int8_mixed_precision_training(config) == config  # torchao 0.9
    assert int8_mixed_precision_training(config=config) == config
    assert dataclasses.replace(config, grad_input=True).make().grad_input.quantized
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    with pytest.raises(ValueError, match="quantizes nothing"):
        Int8MixedPrecisionTrainingConfig(False, False, False)

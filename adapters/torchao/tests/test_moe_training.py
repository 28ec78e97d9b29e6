"""torchao.prototype.moe_training: expert layers with low-precision products."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from pennyweight.training import grouped_mm

TOLD = load_file(Path(__file__).parent / "golden" / "torchao_0.18_moe_training.safetensors")
COMPILED = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
pytestmark = pytest.mark.usefixtures("torchao")


def error(got: Tensor, told: Tensor) -> float:
    got, told = got.detach().float(), told.detach().float()
    return float((got - told).norm() / told.norm())


@pytest.mark.parametrize("mode", ["RCEIL", "FLOOR"])
@pytest.mark.parametrize("high", [False, True])
def test_mxfp8_products_are_torchaos(mode: str, high: bool) -> None:
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
    from torchao.prototype.moe_training.tensor import MXFP8TrainingWeightWrapperTensor
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    config = MXFP8TrainingOpConfig(wgrad_with_hp=high, scale_calculation_mode=ScaleCalculationMode[mode])
    a = TOLD["x"].bfloat16().requires_grad_()
    b = nn.Parameter(MXFP8TrainingWeightWrapperTensor(TOLD["w"].bfloat16(), config))
    y = torch._grouped_mm(a, b.transpose(-2, -1), offs=TOLD["ends"])
    y.backward(TOLD["g"].bfloat16())
    for name, value in (("y", y), ("x", a.grad), ("w", b.grad)):
        told = TOLD[f"mxfp8.{mode.lower()}.{int(high)}.{name}"]
        assert value.dtype is told.dtype is torch.bfloat16
        assert error(value, told) < 2e-3  # both round to bfloat16


def test_float8_products() -> None:
    from torchao.prototype.moe_training.config import Float8TrainingOpConfig
    from torchao.prototype.moe_training.tensor import Float8TrainingWeightWrapperTensor

    x, w, ends = torch.randn(50, 24), torch.randn(3, 24, 7), torch.tensor([11, 11, 45], dtype=torch.int32)

    def product(**more: Any) -> Tensor:
        config = Float8TrainingOpConfig(**{"out_dtype": torch.float32, **more})
        return torch._grouped_mm(x, Float8TrainingWeightWrapperTensor(w, config), offs=ends)

    told = grouped_mm(x, w, ends, "rowwise")
    assert torch.equal(product(), told)
    assert product(out_dtype=None).dtype is torch.float32
    assert product(out_dtype=torch.bfloat16).dtype is torch.bfloat16
    assert 0.01 < error(product(float8_dtype=torch.float8_e5m2), told) < 0.2
    with pytest.raises(ValueError, match=r"float8_e4m3fn or float8_e5m2, got torch\.float16"):
        product(float8_dtype=torch.float16)


def test_a_weight_in_a_users_own_code() -> None:
    """Batches of any shape, products by matmul, a bfloat16 weight, and every other operator on the value."""
    from torchao.prototype.moe_training.config import Float8TrainingOpConfig
    from torchao.prototype.moe_training.tensor import Float8TrainingWeightWrapperTensor

    w = torch.randn(16, 32)
    p: Any = Float8TrainingWeightWrapperTensor(w.clone(), Float8TrainingOpConfig())
    x = torch.randn(2, 3, 32)
    told = F.linear(x, p)
    assert not torch.equal(told, F.linear(x, w))
    assert torch.equal(x @ p.t(), told)
    assert torch.equal(torch.matmul(x, p.t()), told)
    assert F.linear(x.bfloat16(), p.to(torch.bfloat16)).dtype is torch.bfloat16
    assert type(p.to(torch.bfloat16)) is type(p.detach()) is type(p.clone()) is type(p[:4]) is type(p)
    for value in (p + 0, p * 1, p.detach()._data, torch.cat([p, p])[:16]):
        assert torch.equal(value, w)
        assert type(value) is Tensor
    assert [tuple(piece.shape) for piece in p.split(8)] == [(8, 32)] * 2
    assert "config=Float8TrainingOpConfig" in repr(p)
    with torch.no_grad():
        p.mul_(2)
        assert torch.equal(p._data, 2 * w)
        p.copy_(w)
        assert torch.equal(p._data, w)
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(x, p).dtype is torch.bfloat16


@COMPILED
def test_compiled() -> None:
    from torchao.prototype.moe_training.config import Float8TrainingOpConfig
    from torchao.prototype.moe_training.tensor import Float8TrainingWeightWrapperTensor

    layer, x = nn.Linear(32, 16), torch.randn(24, 32)
    layer.weight = nn.Parameter(Float8TrainingWeightWrapperTensor(layer.weight.detach(), Float8TrainingOpConfig()))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))
    compiled(x).square().sum().backward()
    got = layer.weight.grad.clone()
    layer.weight.grad = None
    layer(x).square().sum().backward()
    torch.testing.assert_close(got, layer.weight.grad)


def test_configs() -> None:
    from torchao.prototype.moe_training.config import (
        Float8TrainingOpConfig,
        Float8TrainingRecipe,
        MXFP8TrainingOpConfig,
        MXFP8TrainingRecipe,
        TrainingOpBaseConfig,
    )
    from torchao.quantization.quantize_.common import KernelPreference

    assert Float8TrainingOpConfig.from_recipe(Float8TrainingRecipe.FP8_ROWWISE) == Float8TrainingOpConfig()
    assert Float8TrainingOpConfig().linear_recipe().name == "rowwise"
    assert Float8TrainingOpConfig(float8_linear_recipe="tensorwise").linear_recipe().name == "tensorwise"
    made = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_RCEIL_WGRAD_WITH_HP)
    assert made.wgrad_with_hp
    assert not made.grouped_recipe().grad_weight.quantized
    emulated = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe("mxfp8_emulated_rceil"))
    assert emulated.kernel_preference is KernelPreference.EMULATED
    assert emulated != MXFP8TrainingOpConfig()
    assert hash(MXFP8TrainingOpConfig()) == hash(MXFP8TrainingOpConfig())
    assert isinstance(made, TrainingOpBaseConfig)
    for call, kind, words in (
        (lambda: Float8TrainingOpConfig.from_recipe("fp8"), ValueError, "Unsupported FP8 recipe"),
        (lambda: MXFP8TrainingOpConfig.from_recipe("mx"), ValueError, "Unsupported MXFP8 recipe"),
        (lambda: Float8TrainingOpConfig(float8_linear_recipe="blockwise"), AssertionError, "not in valid names"),
    ):
        with pytest.raises(kind, match=words):
            call()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(3, *size) / 6) for size in ((32, 48), (48, 32)))
        self.shared = nn.Linear(32, 32)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        hidden = F.silu(torch._grouped_mm(x, self.up, offs=ends)).to(x.dtype)
        return torch._grouped_mm(hidden, self.down, offs=ends) + self.shared(x)


CONFIGS = ("Float8TrainingOpConfig", "MXFP8TrainingOpConfig", "MoETrainingConfig")


def converted(model: nn.Module, name: str) -> nn.Module:
    from torchao.prototype.moe_training.config import Float8TrainingOpConfig, MXFP8TrainingOpConfig
    from torchao.prototype.moe_training.conversion_utils import MoETrainingConfig
    from torchao.quantization import quantize_

    made = {c.__name__: c for c in (Float8TrainingOpConfig, MXFP8TrainingOpConfig, MoETrainingConfig)}[name]
    model = copy.deepcopy(model)
    quantize_(model, made(), filter_fn=lambda module, fqn: fqn == "experts")
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_is_converted_and_trains(name: str, tmp_path: Path) -> None:
    from torchao.prototype.moe_training.tensor import TrainingWeightWrapperBaseTensor, unwrap_weight

    torch.manual_seed(0)
    plain = nn.ModuleDict({"experts": Experts(), "head": nn.Linear(32, 32)})
    x, ends = torch.randn(64, 32), torch.tensor([16, 16, 64], dtype=torch.int32)
    model = converted(plain, name)
    experts: Any = model["experts"]
    assert all(isinstance(p, TrainingWeightWrapperBaseTensor) for p in experts.parameters())
    assert type(model["head"].weight) is nn.Parameter
    assert torch.equal(unwrap_weight(experts.up), plain["experts"].up)
    y, told = experts(x, ends), plain["experts"](x, ends)
    assert 0.01 < error(y, told) < 0.1
    assert torch.equal(experts.shared(x), plain["experts"].shared(x)) is (name == "MoETrainingConfig")
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(15):
        loss = (model["head"](model["experts"](x, ends).float()) - x).square().mean()
        losses.append(loss.item())
        loss.backward()
        assert type(experts.up.grad) is Tensor
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.6 * losses[0]
    torch.save(model.state_dict(), tmp_path / "m.pt")
    again = converted(plain, name)
    again.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True))
    assert torch.equal(again["experts"](x, ends), experts(x, ends))


def test_conversion_by_name() -> None:
    from torchao.prototype.moe_training.config import Float8TrainingOpConfig
    from torchao.prototype.moe_training.conversion_utils import _swap_params
    from torchao.prototype.moe_training.tensor import Float8TrainingWeightWrapperTensor

    model = nn.ModuleDict({"experts": Experts(), "other": Experts()})
    _swap_params(
        model, module_filter_fn=lambda module, fqn: fqn == "experts", config=Float8TrainingOpConfig(),
        target_parameter_name="up",
    )  # fmt: skip
    found = [n for n, p in model.named_parameters() if isinstance(p, Float8TrainingWeightWrapperTensor)]
    assert found == ["experts.up"]
    with pytest.raises(ValueError, match="Unsupported config type"):
        _swap_params(model, config=object())

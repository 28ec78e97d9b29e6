"""torchao.float8: layers of converted models, their training, and tensor parallelism."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

TOLD = load_file(Path(__file__).parent / "golden" / "torchao_0.18_float8.safetensors")
COMPILED = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
pytestmark = pytest.mark.usefixtures("torchao")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_layers_gradients_are_torchaos(recipe: str) -> None:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    plain = nn.Linear(48, 32)
    plain.weight.data.copy_(TOLD["w"].t())
    plain.bias.data.copy_(torch.arange(32.0))
    config = Float8LinearConfig.from_recipe_name(recipe)
    layer = Float8Linear.from_float(plain, config)
    x = TOLD["x"].clone().requires_grad_()
    y = layer(x)
    y.backward(TOLD["g"])
    y = y.detach()
    for name, value in (("y", y), ("x", x.grad), ("w", layer.weight.grad), ("b", layer.bias.grad)):
        told = TOLD[f"layer.{recipe}.{name}"]
        assert float((value - told).norm() / told.norm()) < 1e-6


def losses(recipe: str | None, compiled: bool = False, steps: int = 30) -> list[float]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))
    x = torch.randn(64, 32)
    y = x[:, :16].sin()
    if recipe is not None:
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    step = torch.compile(model, backend="aot_eager") if compiled else model
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=5e-3), []
    for _ in range(steps):
        loss = (step(x) - y).square().mean()
        found.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_training_falls_as_in_float32(recipe: str) -> None:
    told, got = losses(None), losses(recipe)
    assert told[-1] < 0.3 * told[0]
    assert got[-1] == pytest.approx(told[-1], rel=0.15)


@COMPILED
def test_a_compiled_model_trains_the_same() -> None:
    assert losses("tensorwise", compiled=True, steps=4) == pytest.approx(losses("tensorwise", steps=4), rel=1e-3)


# -- tensor parallelism ------------------------------------------------------------------------------------------------


class FeedForward(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(size, 2 * size, bias=False)
        self.w2 = nn.Linear(size, 2 * size, bias=False)
        self.out_proj = nn.Linear(2 * size, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out_proj(nn.functional.silu(self.w1(x)) * self.w2(x))


class ToyModel(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.ffn = FeedForward(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ffn(x)


def test_parallel_styles(tmp_path: Path) -> None:
    """With a group of one process: the sharded model computes what the whole one does."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module
    from torchao.float8 import Float8LinearConfig, ScalingType, convert_to_float8_training
    from torchao.float8.config import CastConfig
    from torchao.float8.float8_tensor_parallel import (
        Float8ColwiseParallel,
        Float8RowwiseParallel,
        PrepareFloat8ModuleInput,
    )

    off = CastConfig(ScalingType.DISABLED)
    high = Float8LinearConfig(
        cast_config_grad_output=off, cast_config_weight_for_grad_input=off, cast_config_input_for_grad_weight=off
    )
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = convert_to_float8_training(ToyModel(16))
        model, x = copy.deepcopy(whole), torch.randn(2, 8, 16)
        prepare = PrepareFloat8ModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        plan = {"ffn.w1": Float8ColwiseParallel(), "ffn.w2": Float8ColwiseParallel(), "ffn": prepare,
                "ffn.out_proj": Float8RowwiseParallel(output_layouts=Shard(1), use_local_output=False)}  # fmt: skip
        parallelize_module(model, mesh, plan)
        y = model(DTensor.from_local(x, mesh, [Shard(1)]))
        told = whole(x)
        assert torch.equal(y.full_tensor(), told)
        y.sum().backward()
        told.sum().backward()
        torch.testing.assert_close(model.ffn.w1.weight.grad.full_tensor(), whole.ffn.w1.weight.grad)
        for style, module, kind, words in (
            (Float8ColwiseParallel(), nn.Linear(16, 16), ValueError, "Expecting module to be Float8Linear"),
            (Float8RowwiseParallel(), convert_to_float8_training(nn.Linear(16, 16), config=high), AssertionError,
             "must be scaled dynamically"),
            (PrepareFloat8ModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()), ToyModel(16),
             AssertionError, "must have float8 layers with the same options, got none"),
        ):  # fmt: skip
            with pytest.raises(kind, match=words):
                parallelize_module(module, mesh, style)
        with pytest.raises(NotImplementedError, match="must be float8_e4m3fn"):
            PrepareFloat8ModuleInput(float8_dtype=torch.float8_e5m2)
    finally:
        dist.destroy_process_group()

"""torchao.float8: the float8 tensor of training, its casts, products and views, and training with converted models."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

FOLDER = Path(__file__).parent / "golden"
TOLD = load_file(FOLDER / "torchao_0.18_float8.safetensors")
E4M3 = torch.float8_e4m3fn
COMPILED = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
pytestmark = pytest.mark.usefixtures("torchao")


def cast(x: Tensor, axis: int | None = None, dtype: torch.dtype = E4M3, role: str = "input", **more: Any) -> Any:
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig

    granularity = ScalingGranularity.TENSORWISE if axis is None else ScalingGranularity.AXISWISE
    return hp_tensor_to_float8_dynamic(
        x, dtype, more.pop("config", LinearMMConfig()), gemm_input_role=GemmInputRole(role),
        scaling_granularity=granularity, axiswise_dim=axis, **more,
    )  # fmt: skip


def options(**kwargs: Any) -> Any:
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    return LinearMMConfig(*[ScaledMMConfig(**kwargs)] * 3)


# -- casts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", sorted(key.removesuffix(".data") for key in TOLD if key.endswith(".data")))
def test_casts_are_torchaos(key: str) -> None:
    from torchao.float8.float8_tensor import Float8Tensor
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    _, kind, fmt, hp, power = key.split(".")
    x, dtype = TOLD["x"].to(getattr(torch, hp)), getattr(torch, f"float8_{fmt}")
    t = cast(x, None if kind == "ten" else -1, dtype, round_scales_to_power_of_2=bool(int(power)))
    assert isinstance(t, Float8TrainingTensor)
    assert Float8Tensor is Float8TrainingTensor  # its name up to 0.12
    assert (t.dtype, t._orig_dtype, t._axiswise_dim) == (x.dtype, x.dtype, None if kind == "ten" else -1)
    assert t._data.dtype is dtype
    assert torch.equal(t._data.view(torch.uint8), TOLD[f"{key}.data"])
    assert torch.equal(t._scale, TOLD[f"{key}.scale"])
    value = t.to_original_precision()
    assert value.dtype is x.dtype
    assert torch.equal(value.float(), TOLD[f"{key}.value"])


def test_the_gradient_passes_through_casts() -> None:
    x = torch.randn(6, 4, requires_grad=True)
    (cast(x).to_original_precision() * torch.arange(4.0)).sum().backward()
    assert torch.equal(x.grad, torch.arange(4.0).expand(6, 4))


def test_extremes_of_casts() -> None:
    from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8

    assert torch.equal(cast(torch.zeros(3, 4)).to_original_precision(), torch.zeros(3, 4))
    assert cast(torch.randn(0, 4), -1).shape == (0, 4)
    big = hp_tensor_and_scale_to_float8(torch.tensor([-1e6, 1e6]), torch.tensor(1.0), E4M3)
    assert big.to_original_precision().tolist() == [-448.0, 448.0]
    with pytest.raises(ValueError, match=r"Unsupported float8_dtype: torch\.int8"):
        hp_tensor_and_scale_to_float8(torch.ones(2), torch.tensor(1.0), torch.int8)
    with pytest.raises(AssertionError, match="axiswise_dim must be None, 0 or -1, got 1"):
        hp_tensor_and_scale_to_float8(torch.ones(2, 2), torch.ones(2, 1), E4M3, axiswise_dim=1)


# -- products ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [{"emulate": True}, {}, {"pad_inner_dim": True}], ids=["emulate", "codes", "pad"])
@pytest.mark.parametrize("kind", ["ten", "axs"])
def test_products_are_torchaos(kind: str, config: dict[str, bool]) -> None:
    a = cast(TOLD["x"], None if kind == "ten" else -1, config=options(**config))
    b = cast(TOLD["w"], None if kind == "ten" else 0, role="weight", config=options(**config))
    bias = torch.arange(32.0)
    torch.testing.assert_close(torch.mm(a, b), TOLD[f"mm.{kind}"], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(torch.addmm(bias, a, b), TOLD[f"addmm.{kind}"], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(torch.matmul(a, b), TOLD[f"mm.{kind}"], rtol=1e-6, atol=1e-5)


def test_operands_of_different_granularity_and_odd_sizes() -> None:
    x, w = torch.randn(5, 7), torch.randn(7, 3)
    for one, two in ((None, 0), (-1, None), (-1, 0)):
        for more in ({}, {"pad_inner_dim": True}):
            a, b = cast(x, one, config=options(**more)), cast(w, two, role="weight", config=options(**more))
            told = a.to_original_precision() @ b.to_original_precision()
            torch.testing.assert_close(torch.mm(a, b), told, rtol=1e-5, atol=1e-5)
    half = torch.mm(cast(x.bfloat16()), cast(w.bfloat16(), role="weight"))
    assert half.dtype is torch.bfloat16
    gradient = cast(torch.randn(5, 3), role="grad_output", dtype=torch.float8_e5m2)
    grad_weight = torch.mm(gradient.t(), cast(x))
    told = gradient.to_original_precision().t() @ cast(x).to_original_precision()
    torch.testing.assert_close(grad_weight, told, rtol=1e-5, atol=1e-4)


def test_wrong_products_say_why() -> None:
    x, w = cast(torch.randn(4, 8)), cast(torch.randn(8, 4), role="weight")
    for call, words in (
        (lambda: torch.mm(x, torch.randn(8, 4)), "needs two of them, got Tensor"),
        (lambda: torch.mm(x, cast(torch.randn(8, 4))), "unexpected a_role"),
        (lambda: torch.mm(x, cast(torch.randn(8, 4), role="weight", config=options(emulate=True))), "output mismatch"),
        (lambda: torch.addmm(torch.zeros(4, dtype=torch.bfloat16), x, w), "bias dtype must match"),
        (lambda: torch.addmm(torch.zeros(4), x, w, alpha=2), "must be 1"),
        (lambda: torch.mm(*(cast(t, role=r, config=options(pad_inner_dim=True)) for t, r in
                            ((torch.randn(4, 8), "input"), (torch.randn(9, 4), "weight")))), "Inner dims must match"),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=words):
            call()
    with pytest.raises(NotImplementedError, match=r"aten.relu.default.*call to_original_precision\(\)"):
        x.relu()
    with pytest.raises(ValueError, match=r"one for each of 4 rows, got \[1, 8\]; cast with the other axiswise_dim"):
        torch.mm(cast(torch.randn(4, 8), 0), w)


def test_unwrapped_products() -> None:
    from torchao.float8.float8_ops import addmm_float8_unwrapped

    a, b = cast(torch.randn(4, 8), -1), cast(torch.randn(8, 3), 0)
    told = a.to_original_precision() @ b.to_original_precision() + 1
    args = (a._data, a._scale, b._data, b._scale, torch.float32)
    torch.testing.assert_close(addmm_float8_unwrapped(*args, bias=torch.ones(3)), told, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"shapes \[4, 8\] and \[4, 8\] do not match"):
        addmm_float8_unwrapped(a._data, a._scale, a._data, a._scale, torch.float32)
    with pytest.raises(ValueError, match=r"a must be float8_e4m3fn or float8_e5m2, got torch\.float32"):
        addmm_float8_unwrapped(torch.ones(2, 2), torch.ones(()), torch.ones(2, 2), torch.ones(()), torch.float32)


# -- views and copies --------------------------------------------------------------------------------------------------


def test_views_keep_codes_and_scale() -> None:
    x = torch.randn(6, 8)
    t = cast(x)
    value = t.to_original_precision()
    for call in (
        lambda v: v.t(), lambda v: v.transpose(0, 1), lambda v: v.view(3, 16), lambda v: v.reshape(-1),
        lambda v: v[2:4], lambda v: v.clone(), lambda v: v.detach(), lambda v: v.view(6, 8),
        lambda v: v.as_strided((3, 8), (16, 1)), lambda v: torch.cat(v.split(2)), lambda v: v.split(2)[1],
    ):  # fmt: skip
        made = call(t)
        assert type(made) is type(t)
        assert torch.equal(made.to_original_precision(), call(value))
    assert torch.equal(t.sum(0), value.sum(0))
    rows = cast(x, -1)
    assert (rows.t()._axiswise_dim, tuple(rows.t()._scale.shape)) == (0, (1, 6))
    assert torch.equal(rows.t().to_original_precision(), rows.to_original_precision().t())
    assert rows.detach()._axiswise_dim == rows.clone()._axiswise_dim == -1
    deep = cast(torch.randn(2, 3, 8), -1)
    flat = deep.reshape(-1, 8)
    assert tuple(flat._scale.shape) == (6, 1)
    assert torch.equal(flat.to_original_precision(), deep.to_original_precision().view(6, 8))
    assert torch.equal(flat.view(6, 8).to_original_precision(), flat.to_original_precision())
    for call in (lambda: rows.view(3, 16), lambda: rows[1:], lambda: rows.split(2)):
        with pytest.raises(AssertionError, match="not supported"):
            call()
    pieces = t.split(2)
    with pytest.raises(AssertionError, match="same scale"):
        torch.cat([pieces[0], cast(torch.randn(2, 8))])


def test_copies() -> None:
    x = torch.randn(4, 8)
    t = cast(x)
    plain = torch.empty(4, 8)
    plain.copy_(t)
    assert torch.equal(plain, t.to_original_precision())
    other = t.clone()
    other.fill_(0)
    assert other.to_original_precision().abs().max() == 0
    other.copy_(t)
    assert torch.equal(other.to_original_precision(), plain)
    with pytest.raises(RuntimeError, match="Unsupported semantics"):
        t.copy_(x)
    with pytest.raises(AssertionError, match="same scale"):
        t.copy_(cast(x * 3))
    half = t.to(torch.bfloat16)  # what autocast does with an operand
    assert (half.dtype, half._orig_dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(half._data.view(torch.uint8), t._data.view(torch.uint8))
    with pytest.raises(AssertionError, match="Only float16 and bfloat16"):
        t.to(torch.float64)
    target = t.clone()
    target.index_put_((torch.tensor([0, 2]),), t.split(2)[1])
    value = plain.clone()
    value[[0, 2]] = plain[2:]
    assert torch.equal(target.to_original_precision(), value)


def test_tensors_are_saved_and_shown(tmp_path: Path) -> None:
    t = cast(torch.randn(4, 8), -1, role="weight", config=options(emulate=True))
    torch.save(t, tmp_path / "t.pt")
    for again in (torch.load(tmp_path / "t.pt", weights_only=True), copy.deepcopy(t)):
        assert type(again) is type(t)
        assert torch.equal(again.to_original_precision(), t.to_original_precision())
        names = ("_orig_dtype", "_linear_mm_config", "_gemm_input_role", "_axiswise_dim")
        assert [getattr(again, n) for n in names] == [getattr(t, n) for n in names]
    theirs = torch.load(FOLDER / "torchao_0.18_float8.pt", weights_only=True)  # written by torchao
    assert type(theirs) is type(t)
    assert torch.equal(theirs.to_original_precision(), TOLD["cast.axs.e4m3fn.float32.0.value"])
    assert theirs._linear_mm_config == options(emulate=True)
    assert "lp_dtype=torch.float8_e4m3fn" in repr(t)
    assert "GemmInputRole.WEIGHT" in repr(t)
    from torchao.float8.float8_ops import implements

    with pytest.raises(RuntimeError, match="already registered to float8_mm"):
        implements([torch.ops.aten.mm.default])(lambda *a: None)


def test_whether_a_tensor_is_cast() -> None:
    from torchao.float8.distributed_utils import tensor_already_casted_to_fp8

    x = torch.tensor([[1.0, 0.0, -2.0], [0.0, 2.0, 0.5]])
    assert tensor_already_casted_to_fp8(cast(x))
    assert not tensor_already_casted_to_fp8(x)


@COMPILED
def test_compiled_casts_and_products() -> None:
    x, w = torch.randn(6, 8), torch.randn(8, 4)

    def run(x: Tensor, w: Tensor) -> Tensor:
        return torch.mm(cast(x, -1), cast(w, 0, role="weight"))

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, w), run(x, w))


# -- layers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_layers_gradients_are_torchaos(recipe: str) -> None:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    plain = nn.Linear(48, 32)
    plain.weight.data.copy_(TOLD["w"].t())
    plain.bias.data.copy_(torch.arange(32.0))
    config = Float8LinearConfig.from_recipe_name(recipe)
    layer = Float8Linear.from_float(plain, config)
    assert layer.linear_mm_config.output.use_fast_accum
    assert not layer.linear_mm_config.grad_input.emulate
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


# -- scales that are given, up to 0.9 ----------------------------------------------------------------------------------


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
        assert prepare.linear_mm_config == whole.ffn.w1.linear_mm_config
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

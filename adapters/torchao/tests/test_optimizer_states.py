"""torchao.optim's classes of quantized states, and training with each optimizer."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from pennyweight.core.tensor import AffineQuantizedTensor as QT

FOLDER = Path(__file__).parent / "golden"
TOLD = load_file(FOLDER / "torchao_0.18_optim.safetensors")
BLOCK = 64
pytestmark = pytest.mark.usefixtures("torchao")


def state_class(name: str) -> Any:
    from torchao.optim import subclass_4bit, subclass_8bit, subclass_fp8

    return {
        "8bit": subclass_8bit.OptimState8bit,
        "4bit": subclass_4bit.OptimState4bit,
        "fp8": subclass_fp8.OptimStateFp8,
    }[name]


def zeros(name: str, shape: Any, signed: bool, block_size: int) -> Any:
    signs = () if name == "fp8" else (signed,)
    return state_class(name).zeros(shape, *signs, block_size)


def test_stochastic_rounding_to_bfloat16() -> None:
    from torchao.optim.quant_utils import _fp32_to_bf16_sr

    torch.manual_seed(0)
    third = torch.full((20_000,), 1 / 3)
    got = _fp32_to_bf16_sr(third)
    assert got.dtype is torch.bfloat16
    low, high = sorted(got.unique().float().tolist())
    assert low < 1 / 3 < high
    assert high - low == 2.0**-9  # neighbours
    assert abs(float(got.float().mean()) - 1 / 3) < 4 * (high - low) / 2 / 20_000**0.5
    exact = torch.tensor([0.0, -0.0, 1.5, -3.0, float("inf"), float("-inf")])
    assert torch.equal(_fp32_to_bf16_sr(exact).float(), exact)
    assert _fp32_to_bf16_sr(torch.tensor(float("nan"))).isnan()
    assert not torch.equal(_fp32_to_bf16_sr(third), got)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_states_from_codes(signed: bool, bits: int) -> None:
    cls, codes = state_class(f"{bits}bit"), TOLD[f"codes.{int(signed)}.{bits}"]
    qmap = TOLD[f"map.{int(signed)}.7.8"] if bits == 8 else None
    if qmap is None:
        qmap = TOLD["map.1.3.4"] if signed else torch.arange(1, 17) / 16
    if bits == 8:
        state = cls(codes, TOLD["scale"], qmap, signed)
    else:
        packed = codes.view(-1)[::2] << 4 | codes.view(-1)[1::2]
        state = cls(packed, TOLD["scale"], qmap, signed, codes.shape)
    assert type(state) is QT
    assert isinstance(state, cls)
    assert not isinstance(state, state_class("4bit" if bits == 8 else "8bit"))
    torch.testing.assert_close(state.dequantize(), TOLD[f"value.{int(signed)}.{bits}"], rtol=3e-7, atol=0)
    assert torch.equal(state.codes, codes)
    assert torch.equal(state.scale.view(-1), TOLD["scale"])
    torch.testing.assert_close(state.qmap, qmap, rtol=3e-7, atol=0)
    assert state.signed is signed
    assert state.nbytes == codes.numel() * bits // 8 + 4 * TOLD["scale"].numel()
    told = cls.take(state)
    assert torch.equal(told["codes"], codes if bits == 8 else packed)
    assert torch.equal(state[2:].dequantize(), state.dequantize()[2:])  # as DCP shards it


def test_blocks_of_the_flattened_tensor() -> None:
    for shape, size, block in (
        ((4, 256), 64, (64,)), ((4, 256), 512, (2, -1)), ((4, 256), 1024, (4, -1)), ((1024,), 256, (256,)),
        ((4, 8, 32), 256, (-1, -1)), ((4, 8, 32), 128, (4, -1)), ((3, 5, 7), 35, (-1, -1)), ((6,), 6, (6,)),
    ):  # fmt: skip
        state = zeros("8bit", shape, True, size)
        assert state.spec.block == block
        x = torch.randn(shape)
        state.copy_(x)
        absmax = x.view(-1, size).abs().amax(1)
        assert torch.equal(state.scale.view(-1), absmax)
        error = (state.dequantize() - x).view(-1, size).abs().amax(1)
        assert bool((error <= 0.01 * absmax).all())
    with pytest.raises(ValueError, match=r"state \[64, 100\] in blocks of 256.*block_size that divides 100"):
        zeros("8bit", (64, 100), True, 256)
    with pytest.raises(AssertionError, match="one number per block"):
        state_class("8bit")(torch.zeros(8, dtype=torch.uint8), torch.ones(3), TOLD["map.1.7.8"], True)
    with pytest.raises(ValueError, match="unknown qmap of 256 numbers"):
        state_class("8bit")(torch.zeros(8, dtype=torch.uint8), torch.ones(1), torch.linspace(0, 1, 256), True)


@pytest.mark.parametrize("name", ["8bit", "4bit", "fp8"])
def test_two_steps_of_adam_are_torchaos(name: str) -> None:
    from torchao.optim.adam import single_param_adam

    first, second = (zeros(name, TOLD["x"].shape, signed, BLOCK) for signed in (True, False))
    assert first.dequantize().abs().max() == 0
    p = TOLD["x"].clone()
    for step in (1.0, 2.0):
        single_param_adam(
            p, TOLD["grad"], torch.tensor(step), first, second, None, torch.tensor(1e-2), 0.9, 0.999, 0.1, 1e-8, True,
            False,
        )  # fmt: skip
        torch.testing.assert_close(p, TOLD[f"p{int(step)}.{name}"], rtol=0, atol=2e-6)
    for state, told in ((first, TOLD[f"first.{name}"]), (second, TOLD[f"second.{name}"])):
        torch.testing.assert_close(state.dequantize(), told, rtol=1e-6, atol=0)
        assert isinstance(state, state_class(name))


def test_one_parameter_is_torchs_adam() -> None:
    from torchao.optim.adam import single_param_adam

    for decoupled, cls in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
        p = nn.Parameter(TOLD["x"].clone())
        mine, p.grad = p.detach().clone(), TOLD["grad"].clone()
        optimizer = cls([p], lr=0.1, weight_decay=0.1, amsgrad=True, foreach=False)
        states = [torch.zeros_like(p) for _ in range(3)]
        for step in range(1, 4):
            optimizer.step()
            single_param_adam(
                mine, p.grad, torch.tensor(float(step)), *states, torch.tensor(0.1), 0.9, 0.999, 0.1, 1e-8, decoupled,
                False,
            )  # fmt: skip
        torch.testing.assert_close(mine, p.detach(), rtol=1e-6, atol=1e-6)
        assert torch.equal(states[0], optimizer.state[p]["exp_avg"])
    wide = TOLD["x"].bfloat16()
    states = [torch.zeros(wide.shape) for _ in range(2)]
    torch.manual_seed(0)
    tiny = torch.tensor(1e-4)
    single_param_adam(wide, TOLD["grad"], torch.tensor(1.0), *states, None, tiny, 0.9, 0.999, 0.0, 1e-8, True, True)
    moved = wide.float() - TOLD["x"].bfloat16().float()
    assert float(moved.mean()) == pytest.approx(-float(TOLD["grad"].sign().mean()) * 1e-4, abs=1e-4)
    assert 0 < int((moved != 0).sum()) < moved.numel()


@pytest.mark.parametrize("name", ["8bit", "4bit", "fp8"])
def test_states_of_torchaos_checkpoints_load(name: str) -> None:
    """torch.save of torchao's optimizer: its states become ours, and our optimizers take them over."""
    from torchao import optim

    saved = torch.load(FOLDER / "torchao_0.18_optim.pt", weights_only=True)[name]
    for key, told in (("exp_avg", "first"), ("exp_avg_sq", "second")):
        assert type(saved[key]) is QT
        assert isinstance(saved[key], state_class(name))
        torch.testing.assert_close(saved[key].dequantize(), TOLD[f"{told}.{name}"], rtol=3e-7, atol=0)
    p = nn.Parameter(torch.zeros(TOLD["x"].shape))
    optimizer = getattr(optim, f"AdamW{name.capitalize()}" if name == "fp8" else f"AdamW{name}")([p])
    groups = [{"lr": torch.tensor(1e-3), "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False}]
    groups[0]["params"] = [0]
    optimizer.load_state_dict({"state": {0: saved}, "param_groups": groups})
    assert float(optimizer.state[p]["step"]) == 2
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], TOLD[f"first.{name}"], rtol=1e-6, atol=0)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


@pytest.mark.filterwarnings("ignore::pennyweight.FallbackWarning")  # views across rows, and lerp, are computed in float
@pytest.mark.parametrize("name", ["8bit", "4bit", "fp8"])
def test_states_copy_and_pickle(name: str, tmp_path: Path) -> None:
    state = zeros(name, (16, 256), True, 64)
    x = torch.randn(16, 256)
    state.copy_(x)
    other = zeros(name, (16, 256), True, 64)
    other.copy_(state)
    assert torch.equal(other.dequantize(), state.dequantize())
    target = torch.empty(16, 256)
    target.copy_(state)
    assert torch.equal(target, state.dequantize())
    assert torch.equal(state.view(-1).dequantize(), state.dequantize().view(-1))
    assert torch.equal(state.lerp(x, 0.5), state.dequantize().lerp(x, 0.5))
    torch.save({"s": state}, tmp_path / "s.pt")
    again = torch.load(tmp_path / "s.pt", weights_only=True)["s"]
    for one in (again, copy.deepcopy(state), state.clone(), state.detach(), state.to("cpu")):
        assert isinstance(one, state_class(name))
        assert torch.equal(one.dequantize(), state.dequantize())


NAMES = ("Adam8bit", "Adam4bit", "AdamFp8", "AdamW8bit", "AdamW4bit", "AdamWFp8", "_AdamW")
RATIO = {"8bit": 0.254, "4bit": 0.133, "Fp8": 0.254, "_AdamW": 1.0}


def train(make: Any, save: bool = False) -> tuple[list[float], torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    x = torch.randn(64, 64)
    y = x.roll(1, 1).sin()
    optimizer, losses = make(model.parameters()), []
    for step in range(40):
        if save and step == 20:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = make(model.parameters())
            optimizer.load_state_dict(state)
        loss = (model(x) - y).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, optimizer


@pytest.mark.parametrize("name", NAMES)
def test_training_falls_as_with_torchs_optimizer(name: str) -> None:
    from torchao import optim
    from torchao.optim.adam import _AdamBase

    plain = torch.optim.AdamW if "W" in name else torch.optim.Adam
    told, _ = train(lambda p: plain(p, lr=3e-3))
    got, optimizer = train(lambda p: getattr(optim, name)(p, lr=3e-3))
    assert isinstance(optimizer, _AdamBase)
    assert told[-1] < 0.5 * told[0]
    assert got[0] - got[-1] >= 0.97 * (told[0] - told[-1])
    resumed, _ = train(lambda p: getattr(optim, name)(p, lr=3e-3), save=True)
    assert resumed == got  # bit for bit
    memory = optimizer.memory()
    large = (memory.float32 - memory.floats) if name != "_AdamW" else memory.float32
    share = memory.quantized / large if name != "_AdamW" else memory.floats / large
    assert share == pytest.approx(next(v for k, v in RATIO.items() if name.endswith(k)), abs=2e-3)
    if name != "_AdamW":
        cls = state_class(name.removeprefix("AdamW").removeprefix("Adam").lower())
        states = [s for state in optimizer.state.values() for s in state.values() if isinstance(s, QT)]
        assert len(states) == 4
        assert all(isinstance(s, cls) for s in states)


def test_states_under_another_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        state = zeros("8bit", (4, 64), True, 64)
        state.copy_(torch.ones(4, 64))
    finally:
        torch.set_default_dtype(torch.float32)
    assert state.scale.dtype is torch.float32
    assert state.dtype is torch.float64
    assert torch.equal(state.dequantize(), torch.ones(4, 64, dtype=torch.float64))


def test_parameters_on_the_meta_device() -> None:
    state = state_class("8bit").zeros((4, 64), device="meta", block_size=64)
    assert state.is_meta
    assert state.nbytes == 4 * 64 + 16

"""A step: the plain rules beside torch.optim's, native code beside the plain rules, quantized beside float."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.kernels.cpu import library
from pennyweight.kernels.cpu import optimizer as native
from pennyweight.optim import (
    Adam4bit,
    Adam8bit,
    AdamW4bit,
    AdamW8bit,
    AdamWFp8,
    Lion8bit,
    LowBitOptimizer,
    SGD8bit,
    update_rules,
)
from tests.optim.models import SHAPES, parameters, set_gradients, trained

NATIVE = pytest.mark.skipif(library.available() is not True, reason="the native library is not built")


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """No native steps."""
    monkeypatch.setattr(native, "accepts", lambda *a: "for a test")


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """No parameter is large enough for quantized states."""
    monkeypatch.setattr(LowBitOptimizer, "LEAST", math.inf)


TORCH = {
    "adam": (Adam8bit, torch.optim.Adam, {}),
    "adam, decay, maximize": (Adam8bit, torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}),
    "adamw": (AdamW8bit, torch.optim.AdamW, {"lr": 3e-3}),
    "adamw, amsgrad": (AdamW8bit, torch.optim.AdamW, {"amsgrad": True, "betas": (0.4, 0.9), "eps": 1e-3}),
    "sgd": (SGD8bit, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}),
    "sgd, nesterov": (SGD8bit, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
}


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TORCH)
def test_with_float_states_the_rules_are_torchs_bit_for_bit(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch)
    ours, theirs, options = TORCH[name]
    mine, optimizer = trained(lambda p: ours(p, **options), 4, dtype=dtype)
    wanted, reference = trained(lambda p: theirs(p, foreach=False, **options), 4, dtype=dtype)
    for p, q in zip(mine, wanted, strict=True):
        assert torch.equal(p, q)
        for key, value in reference.state[q].items():
            if key != "step":
                assert torch.equal(optimizer.state[p][key], value), key


def test_lion_is_what_its_paper_says(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    params, _ = trained(lambda p: Lion8bit(p, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1), 3)
    wanted = parameters()
    m = [torch.zeros_like(p) for p in wanted]
    for step in range(3):
        set_gradients(wanted, step)
        for p, v in zip(wanted, m, strict=True):
            p.data -= 0.01 * ((0.9 * v + 0.1 * p.grad).sign() + 0.1 * p)
            v.copy_(0.99 * v + 0.01 * p.grad)
    for p, q in zip(params, wanted, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


CASES: list[tuple[Any, dict[str, Any]]] = [
    (AdamW8bit, {}),
    (AdamW4bit, {}),
    (AdamWFp8, {}),
    (Adam8bit, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    (Adam4bit, {"block_size": 128, "amsgrad": True}),
    (AdamW8bit, {"betas": (0.3, 0.9), "block_size": 48}),
    (Lion8bit, {"weight_decay": 0.1}),
    (SGD8bit, {"weight_decay": 0.1, "dampening": 0.1}),
    (SGD8bit, {"nesterov": True}),
]


def everything(params: list[Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Bits of parameters and states, by name."""
    out = {}
    for i, p in enumerate(params):
        out[f"{SHAPES[i]}"] = p.detach()
        for name, state in optimizer.state[p].items():
            parts = {"codes": state._codes, "scale": state._scale} if isinstance(state, QT) else {"": state}
            for part, t in parts.items():
                out[f"{SHAPES[i]} {name} {part}"] = t.view(torch.uint8) if t.dtype.itemsize == 1 else t
    return out


DTYPES = ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False))


@NATIVE
@pytest.mark.parametrize(("cls", "options"), CASES, ids=[f"{cls.__name__} {options}" for cls, options in CASES])
@pytest.mark.parametrize(("dtype", "by_chance"), DTYPES)
def test_native_steps_have_the_bits_of_the_plain_ones(
    cls: Any, options: dict[str, Any], dtype: torch.dtype, by_chance: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every instruction set, with a root that is rounded once, as native code's is."""

    def run() -> dict[str, Tensor]:
        return everything(*trained(lambda p: cls(p, bf16_stochastic_round=by_chance, **options), 3, dtype=dtype))

    fast = {}
    for isa in library.isas():
        library.use_isa(isa)
        try:
            fast[isa] = run()
        finally:
            library.use_isa("")
    monkeypatch.setattr(update_rules, "root", lambda v: v.double().sqrt().float())
    monkeypatch.setattr(native, "accepts", lambda *a: "for a test")
    slow = run()
    for isa, found in fast.items():
        assert [name for name in slow if not torch.equal(found[name], slow[name])] == [], isa


@NATIVE
def test_with_torchs_root_native_steps_differ_in_last_places_only(monkeypatch: pytest.MonkeyPatch) -> None:
    start = [p.detach().clone() for p in parameters()]
    fast, _ = trained(lambda p: AdamW8bit(p, lr=0.1), 1)
    monkeypatch.setattr(native, "accepts", lambda *a: "for a test")
    slow, _ = trained(lambda p: AdamW8bit(p, lr=0.1), 1)
    for p, q, before in zip(fast, slow, start, strict=True):
        bound = 2.0**-22 * (q - before).abs() + torch.finfo(torch.float32).eps * q.abs()
        assert bool(((p - q).abs() <= bound).all())


@NATIVE
def test_threads_are_not_seen() -> None:
    def run(threads: int) -> dict[str, Tensor]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            params = parameters(torch.bfloat16, [(700, 300), (40, 256)])
            optimizer = AdamW4bit(params, bf16_stochastic_round=True)
            for step in range(3):
                set_gradients(params, step)
                optimizer.step()
            return everything(params, optimizer)
        finally:
            torch.set_num_threads(before)

    one, many = run(1), run(4)
    assert all(torch.equal(one[name], many[name]) for name in one)


@NATIVE
def test_any_strides_are_as_good_as_none() -> None:
    a = torch.nn.Parameter(parameters(shapes=[(64, 80)])[0].detach().clone().t())
    b = torch.nn.Parameter(a.detach().clone(memory_format=torch.contiguous_format))
    assert not a.is_contiguous()
    for p in (a, b):
        optimizer = AdamW8bit([p], lr=0.1)
        for step in range(2):
            p.grad = torch.sin(torch.arange(5120.0) + step).view(80, 64)
            if p is a:
                p.grad = p.grad.t().contiguous().t()
            optimizer.step()
    assert torch.equal(a, b)


# Greatest error of an update, of its norm, after steps of like gradients; what there is to be exceeded was measured.
BOUNDS = {AdamW8bit: 0.1, AdamW4bit: 0.6, AdamWFp8: 0.15, SGD8bit: 0.05, Adam8bit: 0.1}


@pytest.mark.parametrize("cls", BOUNDS)
def test_an_update_is_near_that_of_float_states(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over blocks that hold gradients of several orders of magnitude."""

    def updates() -> Tensor:
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.zeros(64, 256))
        size = torch.randn(64, 256).mul(0.7).exp()
        optimizer = cls([p], lr=1e-3, weight_decay=0)
        for step in range(60):
            p.data.zero_()
            p.grad = size * torch.randn(64, 256, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        return p.detach()

    got = updates()
    small(monkeypatch)
    wanted = updates()
    assert (got - wanted).norm() < BOUNDS[cls] * wanted.norm()
    assert got.abs().max() < 2 * wanted.abs().max()


def test_a_small_second_moment_never_becomes_zero() -> None:
    """Elements that get next to nothing beside one that gets much: a map with a code for zero makes their updates 30
    times too large, or divides by eps where the gradient stops."""
    for cls in (AdamW8bit, AdamW4bit, AdamWFp8):
        p = torch.nn.Parameter(torch.zeros(16, 256))
        optimizer = cls([p], lr=1.0, weight_decay=0)
        g = torch.full((16, 256), 1e-6)
        g[:, 0] = 1.0
        for step in range(60):
            p.data.zero_()
            p.grad = g if step < 40 else torch.where(g == 1, g, 0)
            optimizer.step()
            assert p.abs().max() < 1.6, (cls, step)


def test_second_moments_follow_slow_changes() -> None:
    """Each step moves them by a thousandth, far less than half a code; to the nearest they would stay."""
    p = torch.nn.Parameter(torch.zeros(16, 256))
    optimizer = AdamW8bit([p], betas=(0.9, 0.99))
    g = torch.ones(16, 256)
    for _ in range(100):
        p.grad = g
        optimizer.step()
    g[:, 1:] = 2.0  # all but one, which keeps the block's scale in place
    g[:, 0] = 4.0
    for _ in range(400):
        p.grad = g
        optimizer.step()
    exact = 4 * (1 - 0.99**400) + 0.99**400 * (1 - 0.99**100)
    mean = optimizer.state[p]["exp_avg_sq"].dequantize()[:, 1:].mean()
    assert abs(mean - exact) < 0.02 * exact

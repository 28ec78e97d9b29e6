"""What a user of torch.optim expects of an optimizer: groups, schedules, files, errors."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pennyweight import QuantSpec, get_format, optim
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.kernels.cpu import library
from pennyweight.optim import (
    Adam8bit,
    AdamFp8,
    AdamW4bit,
    AdamW8bit,
    AdamWFp8,
    CPUOffloadOptimizer,
    Lion8bit,
    SGD8bit,
)
from tests.optim.models import SHAPES, Net, losses, parameters, set_gradients, trained

ALL = [Adam8bit, AdamW4bit, AdamW8bit, AdamWFp8, Lion8bit, SGD8bit]


@pytest.mark.parametrize("cls", ALL)
def test_states_are_tensors_of_the_parameters_shape(cls: Any) -> None:
    params, optimizer = trained(cls, 1)
    for p in params:
        for name, state in optimizer.state[p].items():
            if name == "step":
                continue
            assert state.shape == p.shape
            assert type(state) is (QT if p.numel() >= 4096 else torch.Tensor)
            assert state.dtype is torch.float32


def test_memory_is_counted() -> None:
    """All bytes of all tensors that a pickle of the states holds, beside 8 bytes a number."""
    for cls, bound in ((AdamW8bit, 0.255), (AdamW4bit, 0.142), (AdamWFp8, 0.255)):
        p = nn.Parameter(torch.randn(512, 768))
        small = nn.Parameter(torch.randn(7))
        optimizer = cls([p, small])
        for q in (p, small):
            q.grad = torch.randn_like(q)
        optimizer.step()
        memory = optimizer.memory()
        assert (memory.parameters, memory.floats) == ((1, 1), 2 * 4 * 7)
        assert memory.float32 == 8 * (p.numel() + 7)
        assert 0.9 * bound < memory.ratio < bound <= 0.27
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        assert memory.quantized < len(file.getvalue()) < memory.quantized + 20_000
        assert f"{memory.quantized:,}" in str(memory)
    odd = trained(AdamW4bit, 1)[1].memory()
    assert odd.ratio < 0.18  # rows of 3 codes take 2 bytes


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_has_the_losses_of_one_that_was_not_interrupted(
    cls: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Bit for bit, from a file that was read with weights_only."""
    options = {"lr": 0.5 if cls is SGD8bit else 2e-3, "bf16_stochastic_round": True}
    model = Net(dtype)
    optimizer = cls(model.parameters(), **options)
    whole = losses(model, optimizer, range(14))
    model = Net(dtype)
    optimizer = cls(model.parameters(), **options)
    begun = losses(model, optimizer, range(6))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    torch.manual_seed(99)
    model = Net(dtype)
    model.load_state_dict(saved["model"])
    optimizer = cls(model.parameters(), **options)
    optimizer.load_state_dict(saved["optimizer"])
    assert begun + losses(model, optimizer, range(6, 14)) == whole
    assert whole[-1] < whole[0]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, QT):
        return a.spec == b.spec and torch.equal(a.dequantize(), b.dequantize())
    return torch.equal(a, b)


def test_copies_are_equal_and_apart() -> None:
    """deepcopy and pickle, of the optimizer with its parameters."""
    params, optimizer = trained(AdamW8bit, 2, shapes=SHAPES[:3])
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        theirs = other.param_groups[0]["params"]
        assert theirs[0] is not params[0]
        for p, q in zip(params, theirs, strict=True):
            assert all(same(optimizer.state[p][k], other.state[q][k]) for k in ("step", "exp_avg", "exp_avg_sq"))
        set_gradients(theirs, 3)
        other.step()
        assert not torch.equal(params[0], theirs[0])


def test_states_of_torchs_adamw_are_quantized_when_loaded() -> None:
    params, source = trained(torch.optim.AdamW, 5)
    target = AdamW8bit(parameters())
    target.load_state_dict(source.state_dict())
    for p, q in zip(params, target.param_groups[0]["params"], strict=True):
        theirs, ours = source.state[p], target.state[q]
        assert ours["step"] == 5
        if p.numel() < 4096:
            assert torch.equal(ours["exp_avg"], theirs["exp_avg"])
            continue
        for name in ("exp_avg", "exp_avg_sq"):
            near = (ours[name].dequantize() - theirs[name]).norm() / theirs[name].norm()
            assert 0 < near < 0.04, name
    assert target.param_groups[0]["block_size"] == 256  # what torch's groups do not say
    with pytest.raises(ValueError, match=r"state of parameter 0 \[64, 256\] has \['momentum_buffer', 'step'\]"):
        AdamW8bit(parameters()).load_state_dict(trained(SGD8bit, 1)[1].state_dict())


def test_momentum_of_torchs_sgd_is_taken_though_it_counts_no_steps() -> None:
    """The next step is not the first one, whose dampening is left out."""
    params, source = trained(lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.5), 3, shapes=[(3, 5)])
    mine = [nn.Parameter(params[0].detach().clone())]
    target = SGD8bit(mine)
    target.load_state_dict(source.state_dict())
    for some, optimizer in ((params, source), (mine, target)):
        set_gradients(some, 9)
        optimizer.step()
    torch.testing.assert_close(mine[0], params[0])


def test_a_state_of_another_model_is_refused() -> None:
    saved = trained(AdamW8bit, 1, shapes=[(64, 256)])[1].state_dict()
    other = AdamW8bit(parameters(shapes=[(64, 320)]))
    with pytest.raises(ValueError, match=r"state exp_avg of parameter 0 \[64, 320\] has shape \[64, 256\]"):
        other.load_state_dict(saved)


def test_states_of_another_width_are_requantized() -> None:
    params, source = trained(AdamW8bit, 3, shapes=[(64, 256)])
    target = AdamW4bit(parameters(shapes=[(64, 256)]))
    target.load_state_dict(source.state_dict())
    ours = target.state[target.param_groups[0]["params"][0]]
    assert ours["exp_avg"].spec.format.name == "nf4"
    theirs = source.state[params[0]]["exp_avg"].dequantize()
    assert (ours["exp_avg"].dequantize() - theirs).norm() < 0.2 * theirs.norm()


def test_groups_closures_schedules_and_clipping() -> None:
    model = Net()
    optimizer = AdamW8bit(
        [{"params": [model.up.weight, model.down.weight]}, {"params": [model.up.bias], "weight_decay": 0.0, "lr": 0.5}],
        lr=0.1,
    )
    optimizer.add_param_group({"params": [model.down.bias], "lr": 0.0})
    before = model.down.bias.detach().clone()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 64)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        calls.append(float(loss.detach()))
        return loss

    assert float(optimizer.step(closure).detach()) == calls[0]
    schedule.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.25, 0.0]
    assert torch.equal(before, model.down.bias)
    assert len(optimizer.state) == 4


def test_a_learning_rate_may_be_a_tensor() -> None:
    rate = torch.tensor(1e-2)
    a, optimizer = trained(lambda p: AdamW8bit(p, lr=rate), 1, shapes=[(64, 256)])
    b, _ = trained(lambda p: AdamW8bit(p, lr=float(rate)), 1, shapes=[(64, 256)])
    assert torch.equal(a[0], b[0])
    rate.fill_(0)
    set_gradients(a, 1)
    optimizer.step()
    assert torch.equal(a[0], b[0])


def test_parameters_without_gradients_are_passed_over() -> None:
    params = parameters(shapes=[(64, 256), (64, 256)])
    set_gradients(params[:1], 0)
    optimizer = AdamW8bit(params)
    optimizer.step()
    assert len(optimizer.state) == 1
    empty = nn.Parameter(torch.zeros(0, 5))
    empty.grad = torch.zeros(0, 5)
    AdamW8bit([empty, nn.Parameter(torch.ones(()))]).step()


def test_a_trainable_quantized_parameter_is_updated_in_its_codes() -> None:
    """By the rule on its value; torchao's quantized training does so."""
    spec = QuantSpec(get_format("int8"), (-1,))
    w = nn.Parameter(QT.from_float(torch.randn(64, 128), spec), requires_grad=True)
    w.grad = torch.randn(64, 128)
    before, optimizer = w.dequantize().detach(), AdamW8bit([w], lr=0.1, weight_decay=0)
    optimizer.step()
    assert isinstance(w, QT)
    moved = (w.dequantize().detach() - before + 0.1 * w.grad.sign()).abs()
    assert moved.max() <= 1.01 * w.scale.max()
    if library.available() is True:
        assert "the parameter itself is quantized" in str(optimizer.memory())


def test_frozen_quantized_parameters_are_skipped() -> None:
    """A model with frozen quantized weights is passed as it is: model.parameters()."""
    model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 2))
    quantized = QT.from_float(model[0].weight.detach(), QuantSpec(get_format("int8"), (-1,)))
    model[0].weight = nn.Parameter(quantized, False)
    before = [p.dequantize() if isinstance(p, QT) else p.detach().clone() for p in model.parameters()]
    optimizer = AdamW8bit(model.parameters(), lr=0.1)
    model(torch.randn(3, 128)).square().sum().backward()
    optimizer.step()
    after = [p.dequantize() if isinstance(p, QT) else p.detach() for p in model.parameters()]
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, False, False, False]
    assert model[0].weight not in optimizer.state
    other = AdamW8bit(model.parameters())
    other.load_state_dict(optimizer.state_dict())
    assert len(other.state) == 3


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="only floating-point"):
        AdamW8bit([nn.Parameter(torch.ones(3, dtype=torch.complex64))])
    p = nn.Parameter(torch.randn(100, 64))
    for wrong, words in (
        ({"lr": -1.0}, "lr"), ({"betas": (0.9, 1.0)}, "betas"), ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -1}, "weight_decay"), ({"block_size": 14}, "even number of at least 16"),
        ({"block_size": 17}, "even number of at least 16"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            AdamW8bit([p], **wrong)
    with pytest.raises(ValueError, match=r"momentum must be positive.*torch.optim.SGD"):
        SGD8bit([p], momentum=0)
    optimizer = AdamW8bit([p])
    with pytest.raises(ValueError, match="lr"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": -1})
    assert len(optimizer.param_groups) == 1


def test_a_backward_pass_through_old_weights_is_an_error() -> None:
    """Native code writes where autograd does not look; it is told."""
    w = nn.Parameter(torch.randn(64, 128))
    x = torch.randn(3, 64, requires_grad=True)
    loss = (x @ w).square().sum()
    loss.backward(retain_graph=True)
    AdamW8bit([w]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_blocks_are_those_of_the_state_whatever_the_group_says_later() -> None:
    (p, q), optimizer = trained(AdamW8bit, 1, shapes=[(64, 256), (64, 256)])
    optimizer.param_groups[0]["block_size"] = 32
    set_gradients([p, q], 1)
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].spec.block == (-1,)  # rows of 256
    torch.testing.assert_close(p, trained(AdamW8bit, 2, shapes=[(64, 256), (64, 256)])[0][0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_shows_in_the_parameter(bad: float) -> None:
    for cls in (AdamW8bit, AdamW4bit, AdamWFp8):
        params = parameters(shapes=[(64, 256)])
        set_gradients(params, 0)
        params[0].grad[3, 5] = bad
        cls(params).step()
        assert params[0][3, 5].isnan()
        assert params[0][4:].isfinite().all()


def test_a_sparse_gradient_is_refused_before_anything_changes() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Embedding(100, 64, sparse=True))
    optimizer = AdamW8bit(model.parameters())
    model[0](model[1](torch.tensor([3]))).sum().backward()
    before = model[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"parameter 2 \[100, 64\] has a sparse gradient.*SparseAdam"):
        optimizer.step()
    assert torch.equal(model[0].weight, before)
    assert not optimizer.state


def test_a_compiled_step_is_the_step() -> None:
    a, b = Net(), Net()
    ours, compiled = AdamW8bit(a.parameters()), AdamW8bit(b.parameters())
    losses(a, ours, range(2))
    losses(b, compiled, range(1))
    step = torch.compile(compiled.step)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(32, 64, generator=g)
    compiled.zero_grad()
    (b(x) - x.roll(1, -1)).square().mean().backward()
    step()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)
    torch._dynamo.reset()


def test_names_and_classes() -> None:
    """The same first moment, and weight decay where it belongs."""
    p, q = parameters(shapes=[(64, 64)]), parameters(shapes=[(64, 64)])
    for some, cls in ((p, AdamFp8), (q, AdamWFp8)):
        set_gradients(some, 0)
        some[0].grad.zero_()
        cls(some, lr=0.1, weight_decay=0.5).step()
    start = parameters(shapes=[(64, 64)])[0]
    torch.testing.assert_close(q[0], 0.95 * start)
    torch.testing.assert_close(p[0], start - 0.1 * start.sign(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("inner", [AdamW8bit, torch.optim.AdamW])
def test_offload_on_a_cpu_is_the_optimizer_itself(inner: Any) -> None:
    a, b = Net(), Net()
    plain, offload = inner(a.parameters(), lr=0.01), CPUOffloadOptimizer(b.parameters(), inner, lr=0.01, **(
        {"foreach": False} if inner is torch.optim.AdamW else {}
    ))  # fmt: skip
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.1) for o in (plain, offload)]
    for step in range(4):
        assert losses(a, plain, range(step, step + 1)) == losses(b, offload, range(step, step + 1))
        for schedule in schedules:
            schedule.step()
    saved = copy.deepcopy(offload.state_dict())
    assert saved["param_groups"][0]["lr"] == plain.param_groups[0]["lr"] == pytest.approx(0.0001)
    fresh = CPUOffloadOptimizer(a.parameters(), inner)
    fresh.load_state_dict(saved)
    plain.load_state_dict(saved)  # the two can be exchanged
    assert fresh.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert all(same(fresh.state[p][k], offload.state[q][k]) for k in ("exp_avg", "exp_avg_sq"))
    with pytest.raises(ValueError, match="only in its constructor"):
        fresh.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(ValueError, match="empty"):
        CPUOffloadOptimizer([])


@pytest.mark.parametrize("name", ["Adam8bit", "AdamW8bit", "AdamW4bit", "AdamWFp8", "Lion8bit", "SGD8bit"])
def test_arguments_of_torch_s_that_say_how(name: str) -> None:
    """foreach and fused change no bit; what cannot be done is refused in the caller's own words."""
    make, found = getattr(optim, name), []
    for ways in ({}, {"foreach": True}, {"fused": True, "foreach": False}, {"fused": None, "capturable": False}):
        torch.manual_seed(0)
        w = torch.nn.Parameter(torch.randn(64, 128))
        optimizer = make([w], lr=1e-3, **ways)
        for _ in range(2):
            w.grad = torch.sin(w.detach() * 7)
            optimizer.step()
        found.append(w.detach().clone())
    assert all(torch.equal(w, found[0]) for w in found)
    for kind, ways, text in (
        (ValueError, {"capturable": True}, f"{name}: capturable=True is not supported"),
        (ValueError, {"differentiable": True}, f"{name}: differentiable=True is not supported"),
        (TypeError, {"fused": "yes"}, f"{name}: fused must be True, False or None, got 'yes'"),
        (TypeError, {"epsilon": 1}, f"{name} has no argument 'epsilon'"),
    ):
        with pytest.raises(kind, match=text):
            make([torch.nn.Parameter(torch.randn(4))], **ways)

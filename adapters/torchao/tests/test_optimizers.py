"""torchao.optim and its earlier home."""

import copy

import pytest
import torch

from pennyweight import QuantSpec, get_format, optim
from pennyweight.core.tensor import AffineQuantizedTensor as QT

NAMES = ("Adam4bit", "Adam8bit", "AdamFp8", "AdamW4bit", "AdamW8bit", "AdamWFp8", "CPUOffloadOptimizer")


@pytest.mark.usefixtures("torchao")
def test_optimizers_are_ours() -> None:
    import torchao
    from torchao.optim.adam import AdamW8bit, _AdamBase
    from torchao.optim.cpu_offload import CPUOffloadOptimizer
    from torchao.prototype import low_bit_optim

    assert CPUOffloadOptimizer is optim.CPUOffloadOptimizer
    assert AdamW8bit is torchao.optim.AdamW8bit
    p = torch.nn.Parameter(torch.zeros(4096))
    for name in NAMES[:-1]:
        mine = getattr(torchao.optim, name)
        assert mine is getattr(low_bit_optim, name)
        assert issubclass(mine, getattr(optim, name))
        made = mine([p], bf16_stochastic_round=True)
        assert isinstance(made, _AdamBase)
        assert (made.block_size, made.bf16_stochastic_round) == (128 if "4bit" in name else 256, True)
        assert made.is_adamw is ("W" in name)
        assert made.param_groups[0]["weight_decay"] == (0.01 if "W" in name else 0)


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("name", [*NAMES[:-1], "_AdamW"])
def test_learning_rates_are_filled_in_place(name: str) -> None:
    """Steps are those of our optimizer with the number; a scheduler, a copy and a checkpoint keep the tensor."""
    import torchao

    mine, ours = getattr(torchao.optim, name), getattr(optim, name.replace("_AdamW", "AdamW8bit"))
    block = 128 if "4bit" in name else 256
    p, q = (torch.nn.Parameter(torch.linspace(-1, 1, 8192).view(64, 128)) for _ in range(2))
    one, two = mine([p], lr=3e-3), ours([q], lr=3e-3, block_size=block)
    if name == "_AdamW":
        two.LEAST = one.LEAST
    for rate in (3e-3, 1e-3):
        one.param_groups[0]["lr"].fill_(rate)
        two.param_groups[0]["lr"] = rate
        for some, optimizer in ((p, one), (q, two)):
            some.grad = torch.sin(torch.arange(8192.0)).view(64, 128)
            optimizer.step()
        assert torch.equal(p, q)
    scheduler = torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5)
    rate = one.param_groups[0]["lr"]
    one.step()
    scheduler.step()
    assert one.param_groups[0]["lr"] is rate
    assert float(rate) == 5e-4
    again = mine([p])
    again.load_state_dict(copy.deepcopy(one.state_dict()))
    assert float(again.param_groups[0]["lr"]) == 5e-4
    two.load_state_dict(one.state_dict())
    one.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.25})
    assert torch.equal(one.param_groups[1]["lr"], torch.tensor(0.25, dtype=torch.float64))


@pytest.mark.usefixtures("torchao")
def test_its_readmes_lines_run() -> None:
    from torchao.optim import AdamW8bit, CPUOffloadOptimizer

    model = torch.nn.Linear(128, 64)
    for make in (lambda p: AdamW8bit(p, lr=torch.tensor(1e-3), block_size=128), CPUOffloadOptimizer):
        optimizer = make(model.parameters())
        model(torch.ones(2, 128)).sum().backward()
        before = model.weight.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(model.weight, before)
        assert model.weight.grad is None


@pytest.mark.usefixtures("torchao")
def test_adamw_with_float_states_is_torchs_and_takes_quantized_parameters() -> None:
    from torchao.optim import _AdamW

    p, q = (torch.nn.Parameter(torch.linspace(-1, 1, 8192).view(64, 128)) for _ in range(2))
    for some, optimizer in ((p, _AdamW([p])), (q, torch.optim.AdamW([q], foreach=False))):
        some.grad = torch.sin(torch.arange(8192.0)).view(64, 128)
        optimizer.step()
    torch.testing.assert_close(p, q, rtol=0, atol=2.0**-24)
    w = torch.nn.Parameter(QT.from_float(p.detach(), QuantSpec(get_format("int8"), (-1,))), requires_grad=True)
    w.grad = torch.ones(64, 128)
    before = w.dequantize().detach()
    optimizer = _AdamW([w], lr=0.1)
    optimizer.step()
    assert type(optimizer.state[w]["exp_avg"]) is torch.Tensor
    assert float((w.dequantize().detach() - before).mean()) == pytest.approx(-0.1, rel=0.01)

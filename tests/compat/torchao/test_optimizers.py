"""torchao.optim and its earlier home."""

import pytest
import torch

from pennyweight import QuantSpec, get_format, optim
from pennyweight.core.tensor import AffineQuantizedTensor as QT

NAMES = ("Adam4bit", "Adam8bit", "AdamFp8", "AdamW4bit", "AdamW8bit", "AdamWFp8", "CPUOffloadOptimizer")


@pytest.mark.usefixtures("torchao")
def test_names_are_ours() -> None:
    import torchao
    from torchao.optim.adam import AdamW8bit
    from torchao.optim.cpu_offload import CPUOffloadOptimizer
    from torchao.prototype import low_bit_optim

    assert AdamW8bit is optim.AdamW8bit
    assert CPUOffloadOptimizer is optim.CPUOffloadOptimizer
    for name in NAMES:
        assert getattr(torchao.optim, name) is getattr(low_bit_optim, name) is getattr(optim, name)


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

"""Batch norms folded into the layers before them: the same function, and nothing left where it cannot be."""

import copy

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.algorithms import Fold
from pennyweight.planning.config_resolution import PlanError

INT8 = pw.Int8DynamicActivationInt8WeightConfig()


def layers(module: nn.Module, name: str) -> bool:
    return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.depthwise, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8, affine=True, eps=1e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bn2(self.depthwise(self.bn(self.conv(x)).relu()))


def net(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU6(), Block(), *more)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -1, 1)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.2, 4)  # type: ignore[arg-type]
            nn.init.uniform_(module.weight, -2, 2)
            nn.init.uniform_(module.bias, -1, 1)
    return model.eval()


def test_the_function_is_the_same_and_the_norms_are_gone() -> None:
    model, x = net(), torch.randn(3, 3, 12, 12)
    was = model(x)
    notes = Fold().apply(model, {}, [x])
    torch.testing.assert_close(model(x), was, rtol=1e-5, atol=1e-5)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert notes == {
        "0.weight": "1 folded in", "3.conv.weight": "3.bn folded in; bias added",
        "3.depthwise.weight": "3.bn2 folded in"
    }  # fmt: skip


def test_in_a_recipe() -> None:
    model, x = net(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)), torch.randn(4, 3, 16, 16)
    expected = model(x)
    report = pw.quantize_(model, INT8, calibration=[x], algorithm=["fold", "nearest"], filter_fn=layers)
    assert "folded in" in str(report)
    assert float(((model(x) - expected).norm() / expected.norm()).detach()) < 0.05


def test_what_reads_a_layer_besides_its_norm_keeps_both() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
            nn.init.uniform_(self.bn.running_var, 2, 4)  # type: ignore[arg-type]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            return y + self.bn(y)

    model, x = Shared().eval(), torch.randn(2, 3, 5, 5)
    before, was = copy.deepcopy(model.state_dict()), model(x)
    with pytest.raises(PlanError, match="outputs changed by"):
        Fold().apply(model, {}, [x])
    assert torch.equal(model(x), was)
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize("kind", ["twice", "no statistics", "no layer", "no data"])
def test_what_cannot_be_folded(kind: str) -> None:
    conv, norm, x = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), torch.randn(2, 4, 5, 5)
    model: nn.Module = nn.Sequential(conv, norm)
    if kind == "twice":
        model = nn.Sequential(conv, norm, conv, norm)
    elif kind == "no statistics":
        model = nn.Sequential(conv, nn.BatchNorm2d(4, track_running_stats=False))
    elif kind == "no layer":
        model = nn.Sequential(conv, nn.ReLU(), norm)
    with pytest.raises(PlanError, match="pass calibration" if kind == "no data" else "no batch norm reads"):
        Fold().check(model.eval(), {}, [] if kind == "no data" else [x])


def test_linear_layers_and_one_dimension() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3)
    )
    for module in model:
        if isinstance(module, nn.BatchNorm1d):
            nn.init.uniform_(module.running_mean, -1, 1)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.2, 4)  # type: ignore[arg-type]
    model, x = model.eval(), torch.randn(7, 6)
    was = model(x)
    assert len(Fold().apply(model, {}, [x])) == 2
    torch.testing.assert_close(model(x), was, rtol=1e-5, atol=1e-5)

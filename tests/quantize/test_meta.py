"""quantize_ of a model without values, on the meta device: what checkpoints are loaded into."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

import pennyweight as pw
from tests.every.test_configs import build, every, small

QT = pw.AffineQuantizedTensor
FEW = "pw.Int4WeightOnlyConfig(32)"


def in_context() -> nn.Sequential:
    with torch.device("meta"):
        return small()


def by_accelerate() -> nn.Sequential:
    with init_empty_weights():
        return small()


def moved() -> nn.Sequential:
    return small().to("meta")


def form(w: Any) -> Any:
    """All of a tensor but its values."""
    if isinstance(w, QT):
        return w.spec, w.act, w.axes, tuple(w.shape), w.dtype, [form(p) for p in w.parts]
    return None if w is None else (tuple(w.shape), w.dtype)


CASES = [(text, in_context) for text in every.args[1]] + [(FEW, by_accelerate), (FEW, moved)]


@pytest.mark.parametrize(("text", "empty"), CASES)
def test_it_becomes_what_a_model_with_values_becomes(text: str, empty: Callable[[], nn.Sequential]) -> None:
    real, model, x = small(), empty(), torch.randn(3, 96)
    whole, report = pw.quantize_(real, build(text)), pw.quantize_(model, build(text))
    y, state = real(x), real.state_dict()
    assert all(p.is_meta for p in model.parameters())
    assert [form(p) for p in model.parameters()] == [form(p) for p in real.parameters()]
    for row, other in zip(report.rows, whole.rows, strict=True):
        assert (row.name, row.scheme, row.kernel, row.bytes_after) == (
            other.name, other.scheme, other.kernel, other.bytes_after,
        )  # fmt: skip
        assert row.sqnr is None
        assert ("without values" in row.note) == bool(row.scheme)
    model.load_state_dict(state, assign=True)
    assert torch.equal(model(x), y)
    model = empty()
    pw.quantize_(model, build(text))
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    assert torch.equal(model(x), y)
    assert [form(p) for p in model.parameters()] == [form(p) for p in real.parameters()]


def test_within_the_contexts_and_from_files(tmp_path: Path) -> None:
    real, x = small(), torch.randn(3, 96)
    pw.quantize_(real, pw.Int4WeightOnlyConfig(32))
    y = real(x)
    pw.save(real, tmp_path / "ours")
    torch.save(real.state_dict(), tmp_path / "state.pt")
    for context in (lambda: torch.device("meta"), init_empty_weights):
        for load in ("load", "assign"):
            with context():
                model = small()
                pw.quantize_(model, pw.Int4WeightOnlyConfig(32))
                pw.inference.freeze_(model)
            assert all(p.is_meta for p in model.parameters())
            if load == "load":
                pw.inference.thaw_(model)
                pw.load(tmp_path / "ours", model)
            else:
                model.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), assign=True)
            assert torch.equal(model(x), y)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.table.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.table(index))


def test_ties_stay() -> None:
    real, index = Tied(), torch.arange(5)
    with torch.device("meta"):
        model = Tied()
    for m in (real, model):
        pw.quantize_(m, pw.Int8WeightOnlyConfig())
    assert model.head.weight is model.table.weight
    model.load_state_dict(real.state_dict(), assign=True)
    assert torch.equal(model(index), real(index))


def test_what_needs_values_says_so() -> None:
    for more in ({"measure": True}, {"algorithm": "hqq"}, {"algorithm": "gptq", "calibration": [torch.randn(4, 96)]}):
        model = in_context()
        with pytest.raises(pw.PlanError, match=r"0\.weight is on the meta device and has no values"):
            pw.quantize_(model, pw.Int4WeightOnlyConfig(32), **more)
        assert not any(isinstance(p, QT) for p in model.parameters())

"""Sparse weights: patterns to the element, outputs as near as the method promises."""

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.algorithms.sparsify import SparsityPattern, prune, sparse_gpt
from pennyweight.optim import QuantOptimizer

METHODS = ("magnitude", "wanda", "sparsegpt")


def data(k: int = 64, n: int = 400) -> Tensor:
    g = torch.Generator().manual_seed(k)
    mix = torch.randn(k, k, generator=g) / k**0.5 + 0.4 * torch.eye(k)
    return torch.randn(n, k, generator=g) @ mix * torch.exp(0.8 * torch.randn(k, generator=g))


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 8))


def zeros_of(w: Tensor) -> int:
    return int((w == 0).sum())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pattern", ["2:4", "1:4", "4:8"])
def test_of_each_run_so_many_are_kept(method: str, pattern: str) -> None:
    model = network()
    report = pw.sparsify_(model, method, pattern, [data()])
    kept, of = map(int, pattern.split(":"))
    for name in ("0", "2", "4"):
        w = model.get_submodule(name).weight
        assert ((w.unflatten(1, (-1, of)) != 0).sum(-1) == kept).all()
    assert [r.name for r in report.quantized] == ["0.weight", "2.weight", "4.weight"]
    assert all(r.scheme == pattern and 0 < r.sqnr < 30 for r in report.quantized)
    assert "3 parameters pruned" in str(report)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("share", [0.25, 0.5, 0.7])
def test_a_share_is_zero(method: str, share: float) -> None:
    model = network()
    pw.sparsify_(model, method, share, [data()])
    for name in ("0", "2", "4"):
        w = model.get_submodule(name).weight
        if method == "sparsegpt":
            assert zeros_of(w) == round(share * w.numel())
        else:
            assert ((w == 0).sum(1) == round(share * w.shape[1])).all()


@pytest.mark.parametrize("pattern", ["2:4", 0.5, 0.6])
@torch.no_grad()
def test_the_more_is_known_the_less_is_lost(pattern: str | float) -> None:
    x, errors = data(), []
    layer = nn.Linear(64, 32, bias=False)
    wanted = layer(x)
    for method in METHODS:
        sparse = nn.Sequential(copy.deepcopy(layer))
        pw.sparsify_(sparse, method, pattern, [x[:200], x[200:]])
        errors.append(float((sparse(x) - wanted).square().mean()))
    magnitude, wanda, sparsegpt = errors
    assert sparsegpt < 0.9 * wanda < 0.9 * 0.8 * magnitude


def test_kept_weights_are_as_they_were_but_for_sparsegpt() -> None:
    for method in ("magnitude", "wanda"):
        model = network()
        before = model[0].weight.clone()
        pw.sparsify_(model, method, "2:4", [data()])
        w = model[0].weight
        assert torch.equal(w, torch.where(w == 0, 0, before))


def test_sparsegpt_by_hand() -> None:
    """Column by column with the inverse of the Hessian of what is left (Frantar and Alistarh 2023, equation 3)."""
    x = data(12).double()
    hessian, w = x.t() @ x / len(x), torch.randn(5, 12, dtype=torch.float64)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(12)
    expected = w.clone()
    for start in range(0, 12, 4):
        left = [torch.linalg.inv(damped[j:, j:]) for j in range(start, start + 4)]
        score = torch.stack([expected[:, start + i] ** 2 / left[i][0, 0] for i in range(4)], 1)
        out = torch.zeros(5, 4, dtype=torch.bool).scatter_(1, score.argsort(1)[:, :2], True)
        for i in range(4):
            j = start + i
            error = torch.where(out[:, i], expected[:, j], 0) / left[i][0, 0]
            expected[:, j:] -= error[:, None] * left[i][0]
            expected[:, j] = torch.where(out[:, i], 0, expected[:, j])
    got = sparse_gpt(w.float(), hessian.float(), SparsityPattern.read("2:4"))
    torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=1e-4)


def test_conv_and_transposed_weights() -> None:
    conv = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2))
    x = torch.randn(8, 4, 10, 10)
    pw.sparsify_(conv, "sparsegpt", 0.5, [x], filter_fn=lambda m, _: isinstance(m, nn.Conv2d))
    assert zeros_of(conv[0].weight) == 2 * round(0.5 * conv[0].weight.numel() / 2)
    from transformers.pytorch_utils import Conv1D

    layer = nn.Sequential(Conv1D(16, 32))  # [in, out]
    pw.sparsify_(layer, "wanda", "2:4", [data(32)])
    assert ((layer[0].weight.t().unflatten(1, (-1, 4)) != 0).sum(-1) == 2).all()


@pytest.mark.parametrize("algorithm", ["nearest", "gptq", "auto", "mse"])
def test_zeros_outlive_quantization(algorithm: str) -> None:
    model, x = network(), data()
    pw.sparsify_(model, "sparsegpt", "2:4", [x])
    pattern = {n: p == 0 for n, p in model.named_parameters() if n.endswith("weight")}
    spec = pw.QuantSpec(pw.get_format("int4"), (32,))
    pw.quantize_(model, pw.SpecConfig(spec), calibration=[x], algorithm=algorithm)
    for name, was in pattern.items():
        assert (model.get_parameter(name).dequantize()[was] == 0).all()


def test_what_sees_no_data_goes_by_magnitude() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Idle()
    done: list[tuple[int, int, str]] = []
    report = pw.sparsify_(model, "wanda", "2:4", [torch.randn(4, 8)], progress=lambda *a: done.append(a))
    notes = {r.name: r.note for r in report.rows}
    assert notes["idle.weight"] == "pruned by magnitude: no calibration data"
    assert notes["used.weight"] == ""
    assert done == [(1, 2, "used.weight"), (2, 2, "idle.weight")]
    assert ((model.idle.weight.unflatten(1, (-1, 4)) != 0).sum(-1) == 2).all()


def test_ties_stay_tied_and_dtypes_stay() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).bfloat16()
    model[1].weight = model[0].weight
    pw.sparsify_(model, "magnitude", 0.5)
    assert model[0].weight is model[1].weight
    assert model[0].weight.dtype is torch.bfloat16
    assert ((model[0].weight == 0).sum(1) == 8).all()


def test_bad_requests_change_nothing() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    for args, text in (
        (("magnitude", "4:2"), "pattern must be like '2:4'"),
        (("magnitude", 1.5), "between 0 and 1"),
        (("pruning",), "method must be one of magnitude, wanda, sparsegpt"),
        (("wanda",), "wanda needs calibration data; pass calibration=batches"),
        (("wanda", "2:4", []), "calibration has no batches"),
        (("magnitude", "1:5"), r"0\.weight: its 64 inputs are not divisible by 5; .*share of zeros such as 0\.8"),
    ):
        with pytest.raises(pw.PlanError, match=text):
            pw.sparsify_(model, *args)
    with pytest.raises(ValueError, match=r"calibration batch 0 \(2, 64\) has 128 NaN"):
        pw.sparsify_(model, "wanda", "2:4", [torch.full((2, 64), torch.nan)])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    pw.quantize_(model, pw.Int8WeightOnlyConfig())
    with pytest.raises(pw.PlanError, match="is already quantized"):
        pw.sparsify_(model, "magnitude")


@pytest.mark.parametrize("algorithm", ["nearest", "gptq"])
def test_a_scheme_may_ask_for_sparsity(algorithm: str) -> None:
    """Quantizing under it is pruning by magnitude, then quantizing; the error counts both."""

    @dataclass(frozen=True)
    class Sparse(pw.Int8WeightOnlyConfig):
        def scheme(self, site: Any, on_indivisible: str = "pad") -> Any:
            return replace(super().scheme(site, on_indivisible), sparsity="2:4")

    model, steps = network(), network()
    wanted = [m.weight.detach().clone() for m in model if isinstance(m, nn.Linear)]
    more = {} if algorithm == "nearest" else {"calibration": [data()], "algorithm": algorithm}
    report = pw.quantize_(model, Sparse(), **more)
    pw.sparsify_(steps, "magnitude")
    pw.quantize_(steps, pw.Int8WeightOnlyConfig(), **more)
    for i, row, w in zip((0, 2, 4), report.quantized, wanted, strict=True):
        values = model[i].weight.dequantize()
        if algorithm == "nearest":
            assert torch.equal(values, steps[i].weight.dequantize())
        assert ((values.unflatten(1, (-1, 4)) != 0).sum(-1) <= 2).all()
        error = float((values - w).square().sum() / w.square().sum())
        assert row.sqnr == pytest.approx(-10 * math.log10(error), abs=1e-3)
        assert row.scheme_short == "int8 per row, 2:4 sparse"
    with pytest.raises(pw.PlanError, match="training does not keep 2:4 sparsity"):
        pw.quantize_(network(), pw.QATConfig(Sparse()))
    with pytest.raises(pw.PlanError, match=r"its config prunes the weight \(2:4\)"):
        QuantOptimizer(torch.optim.SGD(network().parameters(), 0.1), network(), Sparse(), end=2)
    dense = network()
    pw.quantize_(dense, pw.Int8WeightOnlyConfig())
    pw.quantize_(dense, Sparse())
    assert ((dense[0].weight.dequantize().unflatten(1, (-1, 4)) != 0).sum(-1) <= 2).all()
    assert prune(torch.tensor([[[1.0, -3.0], [2.0, 0.5]]]), 0.5).tolist() == [[[0, -3], [2, 0]]]
    with pytest.raises(pw.PlanError, match="rows of 6 inputs are not divisible by 4"):
        prune(torch.ones(2, 6), "2:4")

"""Solvers that search blocks: against every candidate by hand, and the GGUF writer's own search."""

import copy

import pytest
import torch
from torch import Tensor

import pennyweight as pw
from pennyweight.algorithms import Task
from pennyweight.algorithms.solvers.block_search import MSE, BlockSearch, Importance
from pennyweight.algorithms.solvers.hqq import HQQ
from pennyweight.algorithms.solvers.kquant_search import search_kquant
from pennyweight.algorithms.solvers.rtn import Nearest
from pennyweight.core import spec as specs
from pennyweight.core.formats import INT4, UINT4
from pennyweight.core.numerics import Parts, dequantize, quantize
from pennyweight.core.qparams import Params
from pennyweight.core.spec import SPECS, QuantSpec
from pennyweight.io.gguf.quantize import quantize as gguf_quantize


def heavy(n: int, k: int) -> Tensor:
    """Weights with heavy tails."""
    g = torch.Generator().manual_seed(n + k)
    return torch.randn(n, k, generator=g) / (torch.rand(n, k, generator=g) + 0.1) * 0.02


def task(weight: Tensor, spec: QuantSpec, moment: Tensor | None = None) -> Task:
    return Task("w", weight, spec, stats={} if moment is None else {"second_moment": moment.unsqueeze(0)})


def loss(solver: object, t: Task, weight: Tensor | float = 1.0) -> float:
    parts: Parts = solver.solve(t).parts  # type: ignore[attr-defined]
    return float(((dequantize(parts, t.spec, t.weight.shape) - t.weight).double().square() * weight).sum())


def test_mse_is_the_best_of_the_ranges_it_names() -> None:
    spec, w = QuantSpec(INT4, (16,)), heavy(6, 64)
    t, best = task(w, spec), torch.full((6, 4), torch.inf)
    for i in range(51):
        scale = w.unflatten(1, (4, 16)).abs().amax(-1) * (1 - i / 100) / 7.5
        values = dequantize(quantize(w, spec, params=Params(scale)), spec, w.shape)
        best = torch.minimum(best, (values - w).square().unflatten(1, (4, 16)).sum(-1))
    assert loss(MSE(), t) == pytest.approx(float(best.sum()), rel=1e-4)
    assert loss(MSE(), t) < 0.92 * loss(Nearest(), t)


def test_numbers_that_are_not_evenly_spaced_try_wider_ranges() -> None:
    """Such as the block's largest element as 4 instead of 6 (Cook et al. 2025)."""
    w = torch.randn(64, 256) * 0.05
    assert loss(MSE(), task(w, SPECS["nvfp4"])) < 0.87 * loss(Nearest(), task(w, SPECS["nvfp4"]))
    clipped = quantize(w, SPECS["nvfp4"], "mse")
    alone = float((dequantize(clipped, SPECS["nvfp4"], w.shape) - w).square().sum())
    assert loss(MSE(), task(w, SPECS["nvfp4"])) < 0.97 * alone


@pytest.mark.parametrize("offset", [False, True])
def test_fitted_scales_are_least_squares(offset: bool) -> None:
    spec = QuantSpec(UINT4, (16,), offset=torch.float32 if offset else None, mid=8)
    w, h = heavy(4, 32), torch.rand(32) + 0.1
    found = BlockSearch(task(w, spec), torch.square, h)
    codes, fitted = found.codes(found.best)[0], found.fitted()
    u = (codes.float() - 8).permute(0, 2, 1, 3).reshape(8, 16)
    x, weight = w.reshape(8, 16), h.reshape(2, 16).repeat(4, 1)
    columns = torch.stack([u, torch.ones_like(u)], -1) if offset else u.unsqueeze(-1)
    root = weight.sqrt().unsqueeze(-1)
    expected = torch.linalg.lstsq(columns * root, x.unsqueeze(-1) * root).solution.squeeze(-1)
    assert fitted.scale is not None
    torch.testing.assert_close(fitted.scale.flatten(), expected[:, 0], rtol=1e-4, atol=1e-6)
    if offset:
        assert fitted.offset is not None
        torch.testing.assert_close(fitted.offset.flatten(), expected[:, 1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["int4_group", "uint4_group", "tinygemm", "q4_0", "nf4_block", "nvfp4", "q2_k", "q6_k"]
)
def test_importance_is_worth_it(name: str) -> None:
    spec, w = SPECS[name], heavy(8, 256)
    moment = torch.exp(1.5 * torch.randn(256))
    t = task(w, spec, moment)
    weighted = loss(Importance(), t, moment)
    assert weighted < 0.92 * loss(MSE(), t, moment)
    assert weighted < 0.8 * loss(Nearest(), t, moment)
    even = task(w, spec, torch.ones(256))
    assert loss(Importance(), even) <= loss(MSE(), even) * 1.02  # where all inputs are alike it is not worse for it


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_block_types_of_ggml_have_its_search(name: str) -> None:
    spec, w = getattr(specs, name), heavy(6, 512)
    moment = torch.exp(torch.randn(512))
    (found,) = search_kquant(w, spec, moment.expand(6, 512))
    theirs = gguf_quantize(w, name, moment)
    for a, b in zip(leaves(found), leaves(theirs), strict=True):
        assert torch.equal(a, b)
    t, plain = task(w, spec, moment), gguf_quantize(w, name)
    assert loss(Importance(), t, moment) <= rows(found, t, moment) * (1 + 1e-6)
    assert loss(Importance(), t, moment) < 0.95 * rows(plain, t, moment)


def rows(parts: Parts, t: Task, weight: Tensor) -> float:
    return float(((dequantize(parts, t.spec, t.weight.shape) - t.weight).double().square() * weight).sum())


def leaves(parts: Parts) -> list[Tensor]:
    return [t for p in parts if p is not None for t in (leaves(p) if isinstance(p, Parts) else [p])]


def test_what_has_no_such_search() -> None:
    assert search_kquant(heavy(2, 300), specs.Q4_K, torch.ones(2, 300)) == []  # no whole super-blocks
    assert search_kquant(heavy(2, 256), specs.TINYGEMM, torch.ones(2, 256)) == []
    assert search_kquant(heavy(2, 256) * 1e8, specs.Q4_K, torch.ones(2, 256)) == []  # beyond float16
    assert search_kquant(heavy(0, 256), specs.Q4_K, torch.ones(0, 256)) == []


def test_hqq_by_hand() -> None:
    """One block, its offset moved as the formula says; the best step by the norm is kept."""
    spec, w = QuantSpec(UINT4, (-1,), offset=torch.float32), heavy(1, 48)
    got = HQQ().solve(task(w, spec)).parts
    low, high = float(w.min()), float(w.max())
    scale, zero, beta = (high - low) / 15, -low / ((high - low) / 15), 10.0
    best = (float("inf"), zero)
    for _ in range(21):
        codes = (w / scale + zero).round().clamp(0, 15)
        error = w / scale - (codes - zero)
        cost = float((error * scale).abs().pow(0.7).sum())
        best = min(best, (cost, zero))
        outlying = error.sign() * (error.abs() - error.abs().pow(-0.3) / beta).clamp(min=0)
        zero = float((codes - w / scale + outlying).mean())
        beta *= 1.01
    assert float(got.offset) == pytest.approx(-best[1] * scale, rel=1e-4)
    assert best[0] < 0.99 * float(
        (dequantize(Nearest().solve(task(w, spec)).parts, spec, w.shape) - w).abs().pow(0.7).sum()
    )


def test_hqq_says_where_it_has_nothing_to_move() -> None:
    note = HQQ().solve(task(heavy(2, 32), SPECS["int4_group"])).note
    assert note == "rounded to nearest: hqq optimizes zero points or offsets, and this scheme has none"


def test_hqq_lowers_its_norm_on_heavy_tails() -> None:
    for name in ("tinygemm", "q4_1"):
        t = task(heavy(32, 256), SPECS[name])
        norms = []
        for solver in (HQQ(), Nearest()):
            values = dequantize(solver.solve(t).parts, t.spec, t.weight.shape)
            norms.append(float((values - t.weight).abs().pow(0.7).sum()))
        assert norms[0] < 0.985 * norms[1]


@pytest.mark.parametrize("seed", range(3))
def test_hqq_says_where_no_integer_zero_point_gains(seed: int) -> None:
    """A zero point that moves by whole steps shifts the same numbers: it is rounding, and called so."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 16))
    plain = copy.deepcopy(model)
    report = pw.quantize_(model, pw.UIntXWeightOnlyConfig(torch.uint4, 32), algorithm="hqq")
    pw.quantize_(plain, pw.UIntXWeightOnlyConfig(torch.uint4, 32))
    same = torch.equal(model[0].weight.dequantize(), plain[0].weight.dequantize())
    assert same == report.rows[0].note.startswith(
        "rounded to nearest: no integer zero point of this scheme can be improved"
    )
    moved = pw.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 16)), pw.Int4WeightOnlyConfig(32), algorithm="hqq")
    assert "rounded to nearest" not in moved.rows[0].note

"""Every solver on every named number scheme: sound parts, the same bits twice, never worse than round-to-nearest."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.algorithms import ALGORITHMS, Solution, Solver, Task
from pennyweight.algorithms.solvers.rtn import nearest_parts, output_error
from pennyweight.core import blocks
from pennyweight.core.formats import E4M3, E8M0, learned
from pennyweight.core.numerics import Parts, dequantize
from pennyweight.core.spec import SPECS, QuantSpec
from tests.every.solvers_table import SOLVERS, output

NAMES = sorted(SPECS)
# each solver with each kind of parts on the shapes and values that break them
FEW = ("int4_group", "uint4_group", "tinygemm", "fp8_row", "nvfp4", "q4_k")
WIDE = ("adam8", "nf4_double", "q2_k", "q4_k", "q6_k", "iq4_xs", "ternary_256")  # their blocks are of 256


def test_every_solver_is_enrolled() -> None:
    assert SOLVERS.keys() == {name for name, cls in ALGORITHMS.items() if issubclass(cls, Solver)}
    for name, row in SOLVERS.items():
        assert row.make().name == name
        assert all(spec in SPECS and why for spec, why in row.exempt)


@lru_cache
def inputs(k: int, tokens: int = 400) -> Tensor:
    """Correlated, some channels much larger than others."""
    g = torch.Generator().manual_seed(k)
    x = torch.randn(tokens, k, generator=g) @ (torch.randn(k, k, generator=g) / k**0.5 + 0.3 * torch.eye(k))
    return x * torch.exp(0.7 * torch.randn(k, generator=g))


def weights(n: int, k: int) -> Tensor:
    g = torch.Generator().manual_seed(n * 1000 + k)
    w = torch.randn(n, k, generator=g) * 0.05
    return w * torch.exp(0.3 * torch.randn(n, 1, generator=g))


def task_for(weight: Tensor, x: Tensor, spec: QuantSpec) -> Task:
    """x [tokens, K] or [G, tokens, K]."""
    x = x if x.ndim == 3 else x.unsqueeze(0)
    hessian = x.mT @ x / max(1, x.shape[1])
    twin = x + 0.05 * x.roll(1, 2)
    stats = {
        "hessian": hessian,
        "drift": (twin - x).mT @ x / max(1, x.shape[1]),
        "second_moment": x.square().mean(1),
        "absmax": x.abs().amax(1),
        "absmean": x.abs().mean(1),
    }
    return Task("layer.weight", weight, spec, stats=stats, tokens=x.shape[1])


def leaves(parts: Parts) -> list[Tensor]:
    return [t for p in parts if p is not None for t in (leaves(p) if isinstance(p, Parts) else [p])]


def bits(parts: Parts) -> list[bytes]:
    return [t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in leaves(parts)]


def check_parts(parts: Parts, spec: QuantSpec, shape: tuple[int, ...]) -> None:
    """Dtypes and shapes that the spec stores, codes that its format has, everything finite."""
    f = spec.format
    assert tuple(parts.codes.shape) == spec.codes_shape(shape)
    assert parts.codes.dtype is f.code_dtype
    if f.kind == "int":
        assert f.lo <= int(parts.codes.min()) and int(parts.codes.max()) <= f.hi  # noqa: PT018
    elif f.kind == "learned":
        assert (parts.table.dtype, tuple(parts.table.shape)) == (torch.float16, (1 << f.bits, f.dim))
        assert parts.table.isfinite().all()
        assert int(parts.codes.max()) < 1 << f.bits
    elif not f.native_float:
        assert int(parts.codes.max()) < (255 if f is E8M0 else len(f.values))
    part_shape = blocks.counts(spec.block, shape)
    for name, kind in spec.part_specs().items():
        part = getattr(parts, name)
        if isinstance(kind, QuantSpec):
            check_parts(part, kind, part_shape)
        else:
            assert (part.dtype, tuple(part.shape)) == (kind, part_shape)
            if part.is_floating_point():
                assert part.isfinite().all()
            else:
                assert f.lo <= int(part.min()) and int(part.max()) <= f.hi  # noqa: PT018
    for name in {"scale", "zero_point", "offset"} - spec.part_specs().keys():
        assert getattr(parts, name) is None


def check(name: str, task: Task, share: float = 1.0) -> Solution:
    """Sound, repeatable, and at most ``share`` of what round-to-nearest costs."""
    solver, cost = SOLVERS[name].make(), SOLVERS[name].cost
    before = task.weight.clone(), {k: v.clone() for k, v in task.stats.items()}
    solution = solver.solve(task)
    assert torch.equal(task.weight, before[0])
    assert all(torch.equal(v, before[1][k]) for k, v in task.stats.items())
    check_parts(solution.parts, task.spec, task.weight.shape)
    values = dequantize(solution.parts, task.spec, task.weight.shape)
    assert values.isfinite().all()
    again = solver.solve(task)
    assert bits(again.parts) == bits(solution.parts)
    rounded = nearest_parts(task)[1]
    nearest = cost(task, rounded - task.weight).double()
    found = cost(task, values - task.weight).double()
    assert found.sum() <= nearest.sum() * share * (1 + 1e-5) + 1e-30, solution.note
    if solution.error is not None:  # of the output, of the solution that is handed back
        error, plain = (float(output(task, d).sum()) for d in (values - task.weight, rounded - task.weight))
        whole = task.stats["hessian"].abs().double()
        lost, gone = (
            1e-20 + 1e-7 * float(output_error(d.abs().double(), whole).sum())  # what cancels is known to float32
            for d in (values - task.weight, rounded - task.weight)
        )
        assert solution.error == pytest.approx(error, rel=1e-2, abs=1e-7 * abs(plain) + lost)
        assert solution.nearest == pytest.approx(plain, rel=1e-2, abs=gone)
    return solution


@pytest.mark.parametrize("spec", NAMES)
@pytest.mark.parametrize("name", SOLVERS)
def test_on_every_scheme(name: str, spec: str) -> None:
    exempt = dict(SOLVERS[name].exempt)
    if spec in exempt:
        pytest.skip(exempt[spec])
    k = 256 if spec in WIDE and name != "auto" else 64
    check(name, task_for(weights(4, k), inputs(k), SPECS[spec]))


# What error feedback is worth on inputs that are correlated; every format whose numbers are chosen column by column
@pytest.mark.parametrize("spec", ["int4_group", "uint4_group", "tinygemm", "mxfp4", "nvfp4", "nf4_block", "q4_k"])
@pytest.mark.parametrize(("name", "share"), [("gptq", 0.7), ("imatrix", 0.97), ("mse", 0.97)])
def test_by_how_much(name: str, share: float, spec: str) -> None:
    check(name, task_for(weights(8, 256), inputs(256), SPECS[spec]), share)


# Only one solver learns numbers; what it is worth beside k-means of the weights alone
LEARNED = {
    "3 bits": QuantSpec(learned(3), (-1,)),
    "4 bits in groups": QuantSpec(learned(4), (16,), torch.float16),
    "2 bits": QuantSpec(learned(8, 4), (-1,), torch.bfloat16),
    "4 for 1": QuantSpec(learned(6, 4), (16,)),
    "squares": QuantSpec(learned(4, 2), (2, 8)),
    "one scale": QuantSpec(learned(4, 2), None),
    "no scale": QuantSpec(learned(3), None, scale=None),
    "an offset": QuantSpec(learned(3), (16,), offset=torch.float16),
    "nested": QuantSpec(learned(4), (8,), scale=QuantSpec(E4M3, None)),
}


@pytest.mark.parametrize("spec", LEARNED)
def test_learned_numbers(spec: str) -> None:
    check("kmeans", task_for(weights(24, 128), inputs(128), LEARNED[spec]), 0.9)


DEGENERATE = {
    "one sample": (lambda: (weights(3, 32), inputs(32)[:1])),
    "no variation": (lambda: (weights(3, 32), inputs(32)[:1].expand(32, -1))),
    "fewer tokens than inputs": (lambda: (weights(3, 48), inputs(48)[:10])),
    "dead columns": (lambda: (weights(3, 32), inputs(32) * (torch.arange(32) % 3 > 0))),
    "dead inputs": (lambda: (weights(3, 32), torch.zeros(16, 32))),
    "zero weight": (lambda: (torch.zeros(3, 32), inputs(32))),
    "constant weight": (lambda: (torch.full((3, 32), -0.3), inputs(32))),
    "one row": (lambda: (weights(1, 32), inputs(32))),
    "one column": (lambda: (weights(4, 1), inputs(32)[:, :1])),
    "no multiple of the group": (lambda: (weights(3, 45), inputs(45))),
    "an outlier column": (lambda: (weights(3, 32), inputs(32) * torch.where(torch.arange(32) == 5, 1e4, 1.0))),
    "an outlier weight": (lambda: (weights(3, 32).index_fill(1, torch.tensor([9]), 50.0), inputs(32))),
    "tiny inputs": (lambda: (weights(3, 32), inputs(32) * 1e-9)),
}


@pytest.mark.parametrize("case", DEGENERATE)
@pytest.mark.parametrize("name", SOLVERS)
def test_degenerate(name: str, case: str) -> None:
    weight, x = DEGENERATE[case]()
    for spec in FEW[:3] if name == "auto" else FEW:
        if spec not in dict(SOLVERS[name].exempt):
            check(name, task_for(weight, x, SPECS[spec]))


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("case", DEGENERATE)
def test_learned_numbers_of_degenerate_weights(case: str, every: bool) -> None:
    """A third of the specs, another for each case; once a week all."""
    weight, x = DEGENERATE[case]()
    turn = 0 if every else list(DEGENERATE).index(case) % 3
    for spec in list(LEARNED.values())[turn :: 1 if every else 3]:
        check("kmeans", task_for(weight, x, spec))


def test_learned_numbers_of_rows_with_inputs_of_their_own() -> None:
    x = torch.stack([inputs(32)[:200], inputs(32)[200:400] * 3])
    for spec in LEARNED.values():
        check("kmeans", task_for(weights(8, 32), x, spec))


@pytest.mark.parametrize("name", SOLVERS)
def test_groups_of_a_convolution_have_inputs_of_their_own(name: str) -> None:
    x = torch.stack([inputs(32)[:200], inputs(32)[200:400] * 3])
    weight = weights(4, 32)
    for spec in ("int4_group", "uint4_group", "int8_row"):
        both = check(name, task_for(weight, x, SPECS[spec]))
        alone = [check(name, task_for(weight[2 * g : 2 * g + 2], x[g], SPECS[spec])) for g in range(2)]
        assert torch.equal(both.parts.codes, torch.cat([a.parts.codes for a in alone]))
    check(name, task_for(weight, x, SPECS["fp8_tensor"]))  # a scale over both groups


@pytest.mark.parametrize("name", SOLVERS)
def test_values_that_are_not_finite_are_refused_by_name(name: str) -> None:
    solver = SOLVERS[name].make()
    model = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 8))
    before = [p.clone() for p in model.parameters()]
    good, config = [torch.randn(4, 32)], pw.Int8WeightOnlyConfig()
    if solver.needs:
        with pytest.raises(ValueError, match=r"calibration batch 0 \(1, 32\) has 1 NaN"):
            pw.quantize_(model, config, calibration=[good[0].clone().index_fill_(1, torch.tensor(3), torch.nan)[:1]],
                         algorithm=solver)  # fmt: skip
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with torch.no_grad():
        model[1].weight[2, 3] = torch.inf
    with pytest.raises(ValueError, match=r"1\.weight"):
        pw.quantize_(model, config, calibration=good, algorithm=solver)
    assert type(model[0].weight.data) is Tensor

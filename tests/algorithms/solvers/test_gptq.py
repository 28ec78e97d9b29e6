"""GPTQ against slow formulas: error compensation, coordinate descent, refitted scales, asymmetric targets."""

from typing import Any

import pytest
import torch
from torch import Tensor

import pennyweight as pw
from pennyweight.algorithms import Task, solve
from pennyweight.algorithms.calibration.statistics import collect
from pennyweight.algorithms.solvers import gptq, refinement
from pennyweight.algorithms.solvers.gptq import (
    AUTO,
    GPTAQ,
    GPTQ,
    Auto,
    CholeskyFactor,
    asymmetric_target,
    inverse_cholesky,
    quantize_columns,
    undamped_error,
)
from pennyweight.algorithms.solvers.qparam_grid import QParamGrid, grid_candidates, make_grid
from pennyweight.algorithms.solvers.refinement import (
    BestCandidate,
    coordinate_descent,
    normal_equations,
    output_errors,
    refit,
    refit_and_descend,
)
from pennyweight.algorithms.solvers.rtn import Nearest, output_error, total_error
from pennyweight.core.formats import E4M3, INT4, INT8, UINT4
from pennyweight.core.numerics import dequantize
from pennyweight.core.qparams import choose, default_rule
from pennyweight.core.spec import QuantSpec
from pennyweight.kernels.cpu import library
from tests.algorithms.solvers.test_qparam_grid import SPECS as COLUMN_SPECS
from tests.kernels.cpu.instruction_set import instruction_set

K = 40
SPECS = {
    "symmetric": QuantSpec(INT4, (8,)),
    "zero point": QuantSpec(UINT4, (8,), zero_point=True),
    "offset": QuantSpec(UINT4, (8,), offset=torch.float32, mid=8),
}


def inputs(k: int = K, tokens: int = 300) -> Tensor:
    g = torch.Generator().manual_seed(k)
    return torch.randn(tokens, k, generator=g) @ torch.randn(k, k, generator=g) / k**0.5


def setting(spec: QuantSpec, n: int = 6) -> tuple[Task, Tensor, QParamGrid]:
    x = inputs()
    h = x.t() @ x / len(x)
    task = Task("w", torch.randn(n, K) * 0.1, spec, stats={"hessian": h.unsqueeze(0)}, tokens=len(x))
    _, params = next(grid_candidates(task, ("scheme",), None))
    return task, h, make_grid(params, spec, task.weight.shape)


def error(task: Task, values: Tensor, h: Tensor) -> float:
    return float(output_error((values.t() - task.weight).double(), h.double().unsqueeze(0)).sum())


def by_loop(weight: Tensor, g: QParamGrid, f: CholeskyFactor, keep: Tensor | None = None) -> tuple[Tensor, ...]:
    """quantize_columns of [K, N], with its columns in their own order."""
    codes, values, left_over = quantize_columns(f.in_order(weight), g, f, None if keep is None else f.in_order(keep))
    return f.in_own_order(codes), f.in_own_order(values), left_over


@pytest.mark.parametrize(("order", "shrinkage"), [(False, 0.0), (True, 0.0), (True, 0.4)])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_feedback_by_hand(spec: QuantSpec, order: bool, shrinkage: float) -> None:
    """Each column: round, then solve again for all remaining columns (optimal brain surgeon, without Cholesky)."""
    task, h, g = setting(spec)
    f = inverse_cholesky(h, 0.01, order, shrinkage)
    assert f is not None
    codes, values, left_over = by_loop(task.weight.t(), g, f)
    damped = h.double() + 0.01 * h.diagonal().double().mean() * torch.eye(K)
    damped += shrinkage / (1 - shrinkage) * h.diagonal().double().diag()  # H with less of what is off its diagonal
    w, expected = task.weight.double().clone(), torch.zeros(values.shape)
    left = f.order.tolist()
    assert left == (h.diagonal().argsort(descending=True, stable=True).tolist() if order else list(range(K)))
    while left:
        j, rest = left[0], left[1:]
        expected[j] = g.nearest(w[:, j].float().unsqueeze(0), j)[1][0]
        delta = expected[j].double() - w[:, j]
        if rest:  # least squares of the rest given this column's error
            w[:, rest] -= delta[:, None] * torch.linalg.solve(damped[rest][:, rest], damped[rest, j])[None]
        left = rest
    different = (values - expected).abs() > 1e-6
    assert different.float().mean() < 0.02  # ties, which float32 rounds one way or the other
    assert error(task, values, h) == pytest.approx(error(task, expected, h), rel=0.05)
    torch.testing.assert_close(g.values(codes), values)
    off = values - task.weight.t()
    exact = output_error(off.t().double(), damped.unsqueeze(0))
    torch.testing.assert_close(left_over.double(), exact, rtol=1e-4, atol=0)
    undamped = output_error(off.t().double(), h.double().unsqueeze(0))
    torch.testing.assert_close(undamped_error(left_over, off, h, f.added), undamped, rtol=1e-3, atol=0)
    torch.testing.assert_close(output_errors(off.double(), h.double()), undamped)


@pytest.mark.parametrize("k", [40, 64, 200])
def test_panels_of_large_matrices(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels of 16 columns, the last one narrower, against LAPACK and whole products."""
    x = inputs(k)
    h = x.t() @ x / len(x)
    weight, drift = torch.randn(5, k), torch.randn(k, k) * 0.01
    monkeypatch.setattr(gptq, "_PANEL", 16)
    f = inverse_cholesky(h, 0.01, True)
    assert f is not None
    damped = h.double() + 0.01 * h.diagonal().double().mean() * torch.eye(k)
    inverse = torch.linalg.inv(damped[f.order][:, f.order])
    torch.testing.assert_close(f.upper.double(), torch.linalg.cholesky(inverse, upper=True), rtol=1e-5, atol=1e-6)
    lower = damped.clone()
    assert gptq.cholesky_in_place(lower)
    torch.testing.assert_close(lower, torch.linalg.cholesky(damped))
    lower = damped.clone()
    lower[k - 3, k - 3] = -1  # in the last panel
    assert not gptq.cholesky_in_place(lower)
    found = asymmetric_target(weight, drift, f, 0.5)
    want = weight.double() + 0.5 * weight.double() @ drift.double() @ torch.linalg.inv(damped)
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(library.available() is not True, reason="no native library")
@pytest.mark.parametrize("isa", library.isas())
@pytest.mark.parametrize("name", sorted(COLUMN_SPECS))
def test_native_code_has_the_bits_of_the_loop(name: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec: Any = COLUMN_SPECS[name]
    torch.manual_seed(0)
    calls: list[int] = []
    native_block = gptq.gptq_block
    monkeypatch.setattr(gptq, "gptq_block", lambda *a, **k: (calls.append(1), native_block(*a, **k)))
    for n, k, threads in ((1, 32, 1), (7, 96, 1), (64, 128, 2), (65, 160, 1), (530, 288, 2), (530, 288, 1)):
        w, h = torch.randn(n, k) * 0.1, inputs(k)
        w[: n // 3] *= 1e-30  # scales whose reciprocals overflow
        h = h.t() @ h / len(h)
        grid = make_grid(choose(w, spec, default_rule(spec), None), spec, w.shape)
        keep = None if n % 2 else torch.rand(k, n) < 0.7
        f = inverse_cholesky(h, 0.01, k % 64 == 0)
        assert f is not None
        with instruction_set(isa, threads):
            found = by_loop(w.t(), grid, f, keep)
            with monkeypatch.context() as patch:
                patch.setattr(gptq, "usable", lambda: "off")
                want = by_loop(w.t(), grid, f, keep)
        for a, b in zip(want, found, strict=True):
            assert a.dtype is b.dtype
            assert torch.equal(a, b)
    assert bool(calls) == (spec.format is not E4M3)


@pytest.mark.skipif(library.available() is not True, reason="no native library")
@pytest.mark.parametrize("isa", library.isas())
@pytest.mark.parametrize("name", sorted(COLUMN_SPECS))
def test_native_descent_has_the_bits_of_the_loop(name: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec: Any = COLUMN_SPECS[name]
    torch.manual_seed(0)
    calls: list[bool] = []
    native_block = refinement.gptq_block
    monkeypatch.setattr(refinement, "gptq_block", lambda *a, **k: (calls.append(k["descent"]), native_block(*a, **k)))
    for n, k, threads in ((1, 32, 1), (7, 96, 1), (65, 160, 2), (130, 288, 1)):
        w, h = torch.randn(n, k) * 0.1, inputs(k)
        w[: n // 3] *= 1e-30  # scales whose reciprocals overflow
        h[:, 5] = 0  # an input that is always 0
        h = h.t() @ h / len(h)
        grid = make_grid(choose(w, spec, default_rule(spec), None), spec, w.shape)
        codes, values = grid.nearest(w.t().contiguous(), 0)
        pull = h @ (w.t() - values)
        given, keep = codes.clone(), None if n % 2 else torch.rand(k, n) < 0.7
        with instruction_set(isa, threads):
            found = coordinate_descent(codes, values, grid, h, pull.clone(), keep)
            with monkeypatch.context() as patch:
                patch.setattr(refinement, "usable", lambda: "off")
                want = coordinate_descent(codes, values, grid, h, pull.clone(), keep)
        bits = lambda codes: codes.view(torch.uint8)  # noqa: E731
        assert torch.equal(bits(codes), bits(given))
        assert n == 1 or not torch.equal(bits(want[0]), bits(codes))
        assert torch.equal(bits(want[0]), bits(found[0]))
        assert torch.equal(want[1], found[1])
        assert torch.equal(want[2], found[2])
        before, after = (output_errors((v - w.t()).double(), h.double()) for v in (values, found[1]))
        torch.testing.assert_close(before + found[2], after, rtol=1e-4, atol=1e-6 * float(before.max()))
    assert calls == [True] * len(calls)
    assert bool(calls) == (spec.format is not E4M3)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_descent_ends_where_no_single_code_is_better(spec: QuantSpec) -> None:
    task, h, g = setting(spec, 3)
    w = task.weight.t().contiguous()
    codes, values = g.nearest(w, 0)
    least = error(task, values, h)
    for _ in range(60):
        new_codes, values, _ = coordinate_descent(codes, values, g, h, h @ (w - values))
        found = error(task, values, h)
        assert found <= least * (1 + 1e-5)
        least, done, codes = found, torch.equal(new_codes, codes), new_codes
        if done:
            break
    assert done
    f = spec.format
    for j in range(0, K, 3):
        for step in (-1, 1):
            tried = codes.clone()
            tried[j] = (codes[j].int() + step).clamp(int(f.lo), int(f.hi)).to(codes.dtype)
            assert error(task, g.values(tried), h) >= least * (1 - 1e-4)


@pytest.mark.parametrize("spec", [SPECS["symmetric"], SPECS["zero point"], SPECS["offset"]], ids=SPECS)
def test_refitted_scales_are_least_squares_for_those_codes(spec: QuantSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    task, h, g = setting(spec)
    f = inverse_cholesky(h, 0.01, True)
    assert f is not None
    codes, values, _ = by_loop(task.weight.t(), g, f)
    again = refit(codes, g, h, h @ task.weight.t(), task.weight.shape)
    monkeypatch.setattr(refinement, "_CHUNK", 4 * K)
    pieces = refit(codes, g, h, h @ task.weight.t(), task.weight.shape)  # 4 rows, then 2; with offsets one by one
    torch.testing.assert_close(pieces.chosen.scale, again.chosen.scale, rtol=1e-3, atol=1e-5)
    assert error(task, again.values(codes), h) < 0.99 * error(task, values, h)
    root = torch.linalg.cholesky(h.double() + 1e-9 * torch.eye(K)).t()  # |root d|^2 = d H d^T
    for row in range(2):
        u = spec.format.decode(codes[:, row], torch.float64) - spec.mid
        if g.stored.zero_point is not None:
            u = u - g.stored.zero_point[:, row].double().repeat_interleave(8)
        basis = torch.block_diag(*(part[:, None] for part in u.split(8)))
        if spec.offset is not None:
            basis = torch.cat([basis, torch.block_diag(*torch.ones(5, 8, 1).double())], 1)
        solved = torch.linalg.lstsq(root @ basis, (root @ task.weight[row].double())[:, None]).solution.flatten()
        if (solved[:5] > 0).all():
            torch.testing.assert_close(again.chosen.scale[row].double(), solved[:5], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pruned", [False, True])
def test_the_error_that_refinement_carries_along_is_that_of_its_values(scale: torch.dtype, pruned: bool) -> None:
    """After six sweeps some rows' refitted scales are no better once they are stored, and these rows keep theirs."""
    torch.manual_seed(0)
    k, n = 200, 33  # two blocks of columns
    h = inputs(k)
    h, w = h.t() @ h / len(h), torch.randn(k, n)
    keep = torch.rand(k, n) < 0.7 if pruned else None
    w = w if keep is None else w * keep
    spec = QuantSpec(UINT4, (40,), scale, zero_point=True)
    grid = make_grid(choose(w.t(), spec, "asymmetric", None), spec, torch.Size((n, k)))
    codes, values = grid.nearest(w, 0)
    best = BestCandidate(grid, codes, values, output_errors(values - w, h), torch.Size((n, k)))
    before, offered = best.error.clone(), []
    offer = best.offer
    best.offer = lambda *a: (offered.append(offer(*a)), offered[-1])[1]  # type: ignore[method-assign]
    refit_and_descend(best, w, h, 6, keep)
    assert any(0 < int(better.sum()) < n for better in offered[0::2])
    assert bool((best.error < before).all())
    torch.testing.assert_close(
        best.error, output_errors(best.values - w, h), rtol=1e-4, atol=1e-6 * float(before.max())
    )
    torch.testing.assert_close(best.grid.values(best.codes), best.values)
    if keep is not None:
        assert not best.values[~keep].any()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_more_work_is_never_worse(spec: QuantSpec) -> None:
    task, _, _ = setting(spec, 12)
    errors = [GPTQ(sweeps=n).solve(task).error for n in (0, 1, 3)]
    assert errors[0] > errors[1] >= errors[2]
    alone = [GPTQ(grids=(name,)).solve(task).error for name in AUTO]
    assert GPTQ(grids=AUTO).solve(task).error <= min(alone) * (1 + 1e-5)
    assert Auto().solve(task).error <= GPTQ(grids=AUTO).solve(task).error


def test_the_moved_target_is_that_of_the_float_inputs() -> None:
    x = inputs().double()
    exact = x + 0.3 * x.roll(1, 1) ** 2
    weight, h, drift = torch.randn(5, K), x.t() @ x / len(x), (exact - x).t() @ x / len(x)
    f = inverse_cholesky(h.float(), 1e-9, True)
    assert f is not None
    target = asymmetric_target(weight, drift.float(), f, 1.0)
    best = torch.linalg.lstsq(x, exact @ weight.double().t()).solution.t()
    torch.testing.assert_close(target.double(), best, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(asymmetric_target(weight, drift.float(), f, 0.0), weight)


def test_without_a_twin_gptaq_is_gptq_and_says_so() -> None:
    task, _, _ = setting(SPECS["symmetric"])
    ours, theirs = GPTAQ().solve(task), GPTQ().solve(task)
    assert torch.equal(ours.parts.codes, theirs.parts.codes)
    assert ours.note == "target is its own output: no float inputs"


@pytest.mark.parametrize("seed", range(5))
def test_the_error_that_is_told_is_that_of_the_parts(seed: int) -> None:
    torch.manual_seed(seed)
    for spec in (QuantSpec(INT8, (-1,)), QuantSpec(UINT4, (8,), offset=torch.float32, mid=8)):
        task, h, _ = setting(spec, 8)
        solution = GPTQ().solve(task)
        values = dequantize(solution.parts, spec, task.weight.shape)
        error = total_error(values - task.weight, h.unsqueeze(0))
        assert solution.error == pytest.approx(error, rel=3e-5)  # summed by the loop, in float32
        assert 0 < solution.error <= solution.nearest


def test_few_tokens_are_damped_more() -> None:
    """Directions that no token shows: with little damping errors there seem to cost nothing."""
    for tokens, given, want in ((1, 0.01, 0.3), (16, 0.01, 0.3), (31, 0.02, 0.3), (32, 0.01, 0.01), (0, 0.01, 0.01)):
        assert GPTQ(damping=given).damping_of(32, tokens) == want
    assert GPTQ(damping=0.5).damping_of(32, 4) == 0.5
    assert GPTQ(damping=None).damping_of(32, 160) == 0.1
    model = torch.nn.Sequential(torch.nn.Linear(32, 16))
    report = pw.quantize_(model, pw.Int4WeightOnlyConfig(16), calibration=[torch.randn(1, 32)], algorithm="gptq")
    assert report.rows[0].note == "damping raised to 0.3"


def test_damping_grows_until_it_works() -> None:
    x = inputs()[:3]  # of rank 3
    h = x.t() @ x / 3
    assert inverse_cholesky(h, 0.01, True).damping == 0.01
    assert inverse_cholesky(h, 0.0, True).damping > 0
    assert inverse_cholesky(torch.zeros(4, 4), 0.01, True) is None
    assert inverse_cholesky(torch.full((4, 4), torch.nan), 0.01, True) is None
    task = Task("w", torch.randn(4, K), SPECS["symmetric"], stats={"hessian": h.unsqueeze(0)})
    assert "damping raised to" in GPTQ(damping=0.0, shrinkage=0.0).solve(task).note


@pytest.mark.parametrize("k", [1, 3, 128, 129, 300, 577])
def test_the_factor_is_that_of_the_inverse(k: int) -> None:
    h = inputs(k)
    h = h.t() @ h / len(h)
    f = inverse_cholesky(h, 0.01, True)
    assert f is not None
    damped = h.double() + 0.01 * h.diagonal().double().mean() * torch.eye(k)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped[f.order][:, f.order]))
    torch.testing.assert_close(f.upper, torch.linalg.cholesky(inverse, upper=True).float(), rtol=1e-6, atol=1e-7)
    assert torch.equal(f.upper, f.upper.triu())


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize(("n", "k", "size"), [(5, 24, 8), (7, 29, 8), (3, 16, 16), (9, 30, 5)])
def test_normal_equations_are_those_of_whole_matrices(n: int, k: int, size: int, offsets: bool) -> None:
    torch.manual_seed(0)
    units, hessian, pull = torch.randn(n, k), torch.randn(k, k), torch.randn(n, k)
    hessian = hessian @ hessian.t()
    member = torch.arange(-(-k // size)).unsqueeze(1) == torch.arange(k) // size
    bases = [units, torch.ones_like(units)][: 1 + offsets]
    basis = torch.cat([torch.where(member, u.unsqueeze(1), 0.0) for u in bases], 1)
    system, wanted = normal_equations(units.t(), hessian, pull.t(), size, offsets=offsets)
    torch.testing.assert_close(system, basis @ hessian @ basis.mT, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(wanted, (basis @ pull.unsqueeze(-1)).squeeze(-1), rtol=1e-4, atol=1e-4)


def test_large_weights_are_searched_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from pennyweight.algorithms.solvers.block_search import MSE, Importance
    from pennyweight.algorithms.solvers.hqq import HQQ

    weight = torch.randn(10, 64)
    x = inputs(64)
    both = {"hessian": (x.t() @ x / len(x)).unsqueeze(0), "drift": torch.randn(1, 64, 64) * 0.01}
    for solver in (MSE(), HQQ(), Importance(), GPTQ(), Auto()):
        for spec in SPECS.values():
            stats = both if isinstance(solver, GPTQ) else {"second_moment": torch.rand(2, 64)}
            task = Task("w", weight, spec, stats=stats, tokens=300)
            whole = solver.solve(task)
            with monkeypatch.context() as patch:
                patch.setattr("pennyweight.algorithms.solvers.block_search.CHUNK", 3 * 64)
                pieces = solver.solve(task)
            assert torch.equal(whole.parts.codes, pieces.parts.codes)
            torch.testing.assert_close(whole.parts.scale, pieces.parts.scale, rtol=1e-5, atol=0)  # refitted ones
    nested = QuantSpec(INT4, (1, 16), scale=QuantSpec(INT8, (1, 2)))
    for spec in (*SPECS.values(), nested):
        task = Task("w", weight, spec, stats=both, tokens=300)
        parts = GPTQ().solve(task).parts
        sums = solve._signal_and_noise(parts, task)
        with monkeypatch.context() as patch:
            patch.setattr(solve, "CHUNK", 3 * 64)
            assert solve._signal_and_noise(parts, task) == pytest.approx(sums)
        lost = (dequantize(parts, spec, weight.shape) - weight).double().square().sum()
        assert sums == pytest.approx((float(weight.double().square().sum()), float(lost)))


def test_shrinkage_by_the_number_of_tokens() -> None:
    assert GPTQ(shrinkage=0.2).shrinkage_of(64, 1) == 0.2
    assert GPTQ().shrinkage_of(64, 0) == 0  # not known
    assert GPTQ().shrinkage_of(64, 64) == 0.5
    assert GPTQ().shrinkage_of(64, 1 << 20) == 0.1
    for wrong in (-0.1, 1.0):
        with pytest.raises(ValueError, match="gptq: shrinkage must be at least 0 and below 1"):
            GPTQ(shrinkage=wrong)


@pytest.mark.parametrize("count", [16, 64])
@pytest.mark.parametrize("solver", [GPTQ, Auto])
def test_few_tokens_do_not_overfit(solver: type[GPTQ], count: int) -> None:
    """On inputs that the statistics have not seen, the error is below that without shrinkage, and below nearest's."""
    g = torch.Generator().manual_seed(0)
    mixing = torch.randn(128, 128, generator=g) * torch.logspace(0, -1, 128)
    calibration, others = (torch.randn(n, 128, generator=g) @ mixing for n in (count, 4096))
    spec, weight = pw.QuantSpec(pw.get_format("int3"), (32,)), torch.randn(48, 128, generator=g)
    task = Task("w", weight, spec, stats={"hessian": collect("hessian", [calibration])[None]}, tokens=count)
    unseen = collect("hessian", [others])[None]

    def loss(solution: Any) -> float:
        return float(output_error(dequantize(solution.parts, spec, weight.shape) - weight, unseen).sum())

    nearest, shrunk, plain = (loss(s.solve(task)) for s in (Nearest(), solver(), solver(shrinkage=0.0)))
    assert shrunk < plain
    assert shrunk < nearest

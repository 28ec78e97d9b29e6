"""Learned tables: the pieces of the solver against formulas, and the whole of it in models."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.algorithms import ALGORITHMS, GPTQ, KMeans, Task
from pennyweight.algorithms.solvers.gptq import inverse_cholesky
from pennyweight.algorithms.solvers.kmeans import Problem
from pennyweight.cli.explain import describe
from pennyweight.core.formats import learned
from pennyweight.core.numerics import dequantize
from pennyweight.core.spec import QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.export.onnx import export_onnx
from pennyweight.io import flatten, unflatten

SPEC = QuantSpec(learned(4, 2), (16,))


def data(k: int, tokens: int = 300) -> Tensor:
    g = torch.Generator().manual_seed(k)
    return torch.randn(tokens, k, generator=g) @ (torch.randn(k, k, generator=g) / k**0.5 + 0.3 * torch.eye(k))


def task(n: int, k: int, spec: QuantSpec = SPEC) -> Task:
    x = data(k)
    h = (x.t() @ x / len(x)).unsqueeze(0)
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(n)) * 0.05
    return Task("w", w, spec, stats={"hessian": h, "second_moment": x.square().mean(0, keepdim=True)}, tokens=len(x))


def prepared(t: Task) -> tuple[Problem, Tensor]:
    problem = Problem(t, t.stats["hessian"].diagonal(dim1=1, dim2=2))
    problem.cluster(5)
    return problem, t.stats["hessian"]


def error(problem: Problem, h: Tensor) -> float:
    d = (problem.quantized() - problem.target).double()
    return float(((d @ h[0].double()) * d).sum())


def test_the_table_is_that_of_least_squares() -> None:
    """Against the normal equations, in full."""
    t = task(12, 32)
    problem, h = prepared(t)
    rows = torch.zeros(12, 16, 16 * 2, 2, dtype=torch.float64)  # d values / d table, by code
    for n in range(12):
        for i in range(16):
            for j in range(2):
                rows[n, i, 2 * int(problem.codes[n, i]) + j, j] = problem.scale[n, 2 * i + j]
    design = rows.permute(0, 1, 3, 2).reshape(12, 32, 32)
    normal = torch.einsum("nka,kl,nlb->ab", design, h[0].double(), design)
    right = torch.einsum("nka,kl,nl->a", design, h[0].double(), problem.target.double())
    best = torch.linalg.lstsq(normal, right, driver="gelsd").solution.view(16, 2)
    d = (best[problem.codes].flatten(1) * problem.scale - problem.target).double()
    least, before = float(((d @ h[0].double()) * d).sum()), error(problem, h)
    problem.fit_table(h)
    assert error(problem, h) < before
    assert error(problem, h) - least < 0.02 * (before - least) + 1e-4 * before


def test_a_sweep_lowers_the_error_and_ends_where_no_single_code_helps() -> None:
    t = task(6, 32)
    problem, h = prepared(t)
    errors = [error(problem, h)]
    for _ in range(15):
        problem.descend(h)
        errors.append(error(problem, h))
    assert all(b <= a * (1 + 1e-6) for a, b in pairwise(errors))
    assert errors[1] < 0.9 * errors[0]
    least = errors[-1]
    for n in range(6):
        for i in range(16):
            was = int(problem.codes[n, i])
            for code in range(16):
                problem.codes[n, i] = code
                assert error(problem, h) >= least * (1 - 1e-4)
            problem.codes[n, i] = was


def test_feedback_of_one_column_codes_is_that_of_gptq() -> None:
    """With dim 1 the loop is GPTQ's: the same codes as a column by column one, by hand."""
    t = task(8, 24, QuantSpec(learned(3), (-1,)))
    problem, h = prepared(t)
    order = h[0].diagonal().argsort(descending=True, stable=True)
    f = inverse_cholesky(h[0][order][:, order], 0.01, False)
    w, codes = problem.target[:, order].clone(), torch.empty(8, 24, dtype=torch.int64)
    for j in range(24):
        s = problem.scale[:, order[j]]
        codes[:, j] = (w[:, j : j + 1] / s[:, None] - problem.table.t()).abs().argmin(1)
        left = (w[:, j] - problem.table[codes[:, j], 0] * s) / f.upper[j, j]
        w[:, j + 1 :] -= left[:, None] * f.upper[j, j + 1 :]
    problem.feed_back(h, 0.01)
    assert torch.equal(problem.codes[:, order], codes)


@pytest.mark.parametrize(("spec", "share"), [
    (QuantSpec(learned(8, 4), (-1,)), 0.6), (QuantSpec(learned(3), (-1,)), 0.6), (SPEC, 0.6),
    (QuantSpec(learned(4, 2), (2, 16)), 0.7), (QuantSpec(learned(4, 2), None, scale=None), 0.7),
])  # fmt: skip
def test_what_it_is_worth(spec: QuantSpec, share: float) -> None:
    t = task(64, 96, spec)
    found = KMeans().solve(t)
    assert found.error < share * found.nearest
    first = KMeans(sweeps=0).solve(t)
    assert found.error <= first.error < found.nearest
    light = KMeans(feedback=False).solve(t)
    h = t.stats["second_moment"]
    costs = [float(((dequantize(s.parts, spec, t.weight.shape) - t.weight).square() * h).sum()) for s in (light, found)]
    assert costs[0] < costs[1]
    assert light.error is None


def test_more_rows_than_one_batch_of_columns() -> None:
    """K beyond the width of a lazy batch, and not a multiple of a code."""
    t = task(16, 301, QuantSpec(learned(8, 4), (-1,)))
    found = KMeans().solve(t)
    assert found.error < 0.8 * found.nearest
    assert tuple(found.parts.codes.shape) == (16, 76)


def test_options_are_checked() -> None:
    for options, words in (({"damping": 2}, "damping"), ({"rounds": 0}, "rounds"), ({"sweeps": -1}, "sweeps")):
        with pytest.raises(ValueError, match=f"kmeans: .*{words}"):
            KMeans(**options)
    assert ALGORITHMS["kmeans"] is KMeans


# -- in models -------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(8, 16, 4, padding=2)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.conv(x).transpose(1, 2))))


CONFIG = pw.CodebookWeightOnlyConfig()
EVERYTHING = (nn.Linear, nn.Conv1d)


def quantized(config: pw.AOBaseConfig = CONFIG, **more: object) -> tuple[nn.Module, pw.Report]:
    model = Small()
    return model, pw.quantize_(model, config, lambda m, n: isinstance(m, EVERYTHING), **more)


def test_a_model_and_its_file() -> None:
    batches = [torch.randn(4, 8, 10) for _ in range(8)]
    plain, _ = quantized()
    model, report = quantized(calibration=batches, algorithm="kmeans")
    exact = Small()(batches[0])
    assert (model(batches[0]) - exact).norm() < (plain(batches[0]) - exact).norm()
    assert {str(model.get_submodule(n).weight.spec.format) for n in ("conv", "up", "down")} == {"learned8x4"}
    assert all(row.error is not None and row.error < 1 for row in report.rows if row.name.endswith("weight"))
    back = unflatten(*flatten(model.state_dict()))
    other = Small()
    pw.quantize_(other, CONFIG, lambda m, n: isinstance(m, EVERYTHING))
    other.load_state_dict(back)
    assert torch.equal(other(batches[0]), model(batches[0]))


def test_any_solver_leaves_learned_numbers_to_kmeans_and_says_so() -> None:
    batches = [torch.randn(4, 8, 10) for _ in range(4)]
    want, _ = quantized(calibration=batches, algorithm="kmeans")
    for algorithm in (None, "gptq", GPTQ(sweeps=1)):
        model, report = quantized(calibration=batches, algorithm=algorithm)
        assert all(torch.equal(a.dequantize(), b.dequantize()) if isinstance(a, QT) else torch.equal(a, b)
                   for a, b in zip(model.state_dict().values(), want.state_dict().values(), strict=True))  # fmt: skip
        assert "solved by kmeans: learned format" in report.rows[0].note
    _, report = quantized(calibration=batches, algorithm="imatrix")
    assert "solved by kmeans: learned format" in report.rows[0].note
    _, report = quantized(algorithm="mse")
    assert "solved by nearest: learned format" in report.rows[0].note
    _, report = quantized(pw.Int8WeightOnlyConfig(), calibration=batches, algorithm="kmeans")
    assert "int8 has fixed values" in report.rows[0].note


def test_codes_that_end_with_a_kernel_are_no_matrix() -> None:
    model = nn.Sequential(nn.Conv1d(8, 16, 3))
    report = pw.quantize_(model, CONFIG, lambda m, n: True, calibration=[torch.randn(4, 8, 10)], algorithm="kmeans")
    assert "its blocks are not contiguous along one axis" in report.rows[0].note
    assert tuple(model[0].weight.codes.shape) == (16, 8, 1)


def test_configs() -> None:
    for (bits, dim), name in {
        (2, 4): "learned8x4",
        (3, 2): "learned6x2",
        (4, 2): "learned8x2",
        (3, 1): "learned3",
    }.items():
        model, _ = quantized(pw.CodebookWeightOnlyConfig(bits, dim, 16))
        assert (model.up.weight.spec.format.name, model.up.weight.spec.block) == (name, (16,))
    for arguments, words in (
        ((4, 4), "bits .* 1 to 8"),
        ((2, 3), "1, 2, 4 or 8 numbers"),
        ((2, 4, 10), "not divisible by dim 4"),
    ):
        with pytest.raises(ValueError, match=words):
            pw.CodebookWeightOnlyConfig(*arguments)


def test_improving_and_tuning_leave_it_sound() -> None:
    batches = [torch.randn(4, 8, 10) for _ in range(4)]
    model, _ = quantized(calibration=batches, algorithm=["kmeans", "bias"])
    before = model(batches[0])
    report = pw.algorithms.improve(model, Small(), batches)
    assert "learned format; unchanged" in report.rows[1].note
    assert torch.equal(model(batches[0]), before)
    tuned, report = quantized(calibration=batches, algorithm=["kmeans", "tune"])
    assert any("held-out divergence" in note for note in report.notes), report.notes
    exact = Small()(batches[0])
    assert (tuned(batches[0]) - exact).norm() < 1.1 * (quantized()[0](batches[0]) - exact).norm()


def test_other_formats_take_it_anew_or_refuse(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 128, dtype=torch.float16, bias=False))
    pw.quantize_(model, CONFIG)
    pw.save({"up.weight": model[0].weight}, tmp_path / "model.safetensors")
    for to, note in (("float", "dequantized from learned8x4"), ("gptq", "requantized from learned8x4")):
        report = pw.convert(tmp_path / "model.safetensors", tmp_path / to, to=to)
        assert note in report.rows[0].note
    with pytest.raises(pw.CheckpointError, match="compressed-tensors does not support learned8x4"):
        pw.convert(tmp_path / "model.safetensors", tmp_path / "other", to="compressed-tensors")
    args = (torch.randn(2, 64),)
    with pytest.raises(ValueError, match="its codes index its own table"):
        export_onnx(model.float().eval(), args, tmp_path / "m.onnx")
    words = describe(model[0].weight.spec, (128, 64))
    assert "learned8x4: 8-bit indices, one for 4 neighbours of a row, into the tensor's own table of 256" in words

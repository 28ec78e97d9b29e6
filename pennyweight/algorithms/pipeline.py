"""quantize_(model, config, calibration=..., algorithm=...): quantization with calibration data and a recipe."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.numerics import dequantize
from ..core.tensor import AffineQuantizedTensor
from ..distributed.dtensor import full_tensor, is_dtensor
from ..quantize import pipeline as plainly
from ..quantize.config_resolution import Filter, PlanError
from ..quantize.configs import AOBaseConfig
from ..quantize.module_handlers import MODEL_HANDLERS
from ..quantize.plan import Plan, PlanRow, plan
from ..quantize.report import Report
from ..quantize.save_pretrained import settle_saving_
from ..quantize.scheme import Scheme
from . import recipe as recipes
from .base import Solution, Solver, Task
from .calibration import memory_budget
from .calibration.batches import Batches, read
from .calibration.journal import Journal
from .calibration.loop import CalibrationLoop, CollectedStatistics
from .rollback import ModelSnapshot
from .solvers.kmeans import learner
from .solvers.reshape import as_matrix, flat_spec, unflatten
from .solvers.rtn import Nearest

Solved = tuple[AffineQuantizedTensor, float, float | None, str]  # (weight, SQNR in dB, error / error of RTN, note)


def quantize_(
    model: nn.Module,
    config: AOBaseConfig | Callable[[nn.Module], nn.Module],
    filter_fn: Filter | None = None,
    device: torch.device | str | None = None,
    *,
    calibration: Any = None,
    algorithm: Any = None,
    resume: str | Path | None = None,
    spill: str | Path | None = None,
    max_ram: str | int | None = None,
    dry_run: bool = False,
    on_indivisible: str = "pad",
    measure: bool | Sequence[int] = False,
    on_slower: str = "keep",
    progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Quantize the model's parameters in place and return a report.

    config          the quantization scheme of the selected parameters
    filter_fn       (module, fqn) -> bool; default: linear modules
    device          move each selected module to this device, its weight before quantization
    calibration     batches of inputs: tensors, tuples of arguments, or mappings of keyword arguments. Tokens whose
                    ``attention_mask`` is 0 do not count
    algorithm       a name ("gptq"), {name: options}, an algorithm object, a list of rewrites, one solver and tuners
                    (["smooth", "gptq"]), or a YAML file with one of these. Default: "auto" with calibration data,
                    round-to-nearest without. See docs/algorithms
    resume          folder to save each finished block; a second run with the same model, data and options continues
                    from there. Raises if any of them differs
    spill           folder for hidden states between blocks and for the snapshot that restores the model after an error:
                    for data and models that do not fit into memory
    max_ram         "4 GB": memory limit for hidden states plus the statistics of a block, and for the snapshot. What
                    does not fit goes to a temporary folder. Statistics that do not fit raise before they are computed
    dry_run         only plan, and measure if requested
    on_indivisible  group sizes that do not divide: "pad" (exact), "largest_divisor", "skip", "error"
    measure         time each linear shape against float on this machine, at these row counts; True: 1 and 64
    on_slower       a layer that is slower than float at one of them: "keep" it and warn, or "skip" it (stays float)
    progress        called with (done, total, name)

    The plan, the data (NaN and inf raise) and every step of the recipe are checked before the model changes. If a step
    fails or the run is interrupted (KeyboardInterrupt), the model is restored bit for bit: float weights stay in memory
    next to the quantized ones until the end, and tensors that rewrites and tuners write into are copied. With
    ``spill``, or above ``max_ram``, both are on disk.

    Calibration proceeds block by block in call order. Each block sees the outputs of the quantized blocks before it;
    only one block's statistics are in memory at a time. A weight that no data reaches, or whose statistics cannot be
    used, is rounded to nearest with a note in its report row. Tied parameters stay tied. With torch.distributed, each
    rank passes its own share of the data, and all ranks get the same model. Raises PlanError (a ValueError).
    """
    if calibration is None and algorithm is None:
        return plainly.quantize_(
            model, config, filter_fn, device, dry_run=dry_run, on_indivisible=on_indivisible, measure=measure,
            on_slower=on_slower, progress=progress,
        )  # fmt: skip
    if not isinstance(config, AOBaseConfig):
        raise PlanError("an algorithm needs a config such as Int4WeightOnlyConfig(), not a function over modules")
    run = partial(
        _quantize, filter_fn=filter_fn, device=device, calibration=calibration, algorithm=algorithm, resume=resume,
        spill=spill, max_ram=max_ram, dry_run=dry_run, on_indivisible=on_indivisible, measure=measure,
        on_slower=on_slower, progress=progress,
    )  # fmt: skip
    handler = MODEL_HANDLERS.get(type(config))
    report = run(model, config) if handler is None else handler(model, config, run)
    if not dry_run:
        settle_saving_(model, config)
    return report


def _quantize(
    model: nn.Module, config: AOBaseConfig, *, filter_fn: Filter | None, device: Any, calibration: Any, algorithm: Any,
    resume: str | Path | None, spill: str | Path | None, max_ram: str | int | None, dry_run: bool, on_indivisible: str,
    measure: bool | Sequence[int], on_slower: str, progress: Any, put: plainly.Put | None = None,
) -> Report:  # fmt: skip
    recipe = recipes.read("auto" if algorithm is None else algorithm)
    if put is not None and recipe.tuners:
        names = ", ".join(tuner.name for tuner in recipe.tuners)
        raise PlanError(f"{names}: tuners need weights that are really quantized; leave them out and train the model")
    batches = _batches(calibration, recipe)
    limit = None if max_ram is None else memory_budget.parse_bytes(max_ram)
    with torch.inference_mode(False), torch.no_grad():
        todo = plainly.checked_plan(
            model, config, filter_fn, device, dry_run=dry_run, on_indivisible=on_indivisible, measure=measure,
            on_slower=on_slower,
        )  # fmt: skip
        if dry_run:
            return todo.report()
        spread = next((row.name for row in todo.active if is_dtensor(row.tensor)), None)
        if spread is not None and (recipe.needs_data or recipe.rewrites or recipe.tuners):
            raise PlanError(
                f"{spread} is already sharded over ranks, and {recipe} runs the whole model on data; call quantize_ "
                "first (each rank with its own data), then parallelize_module"
            )
        target = _target(todo)
        for step in (*recipe.rewrites, *recipe.tuners):
            step.check(model, target, batches)
        notes: dict[str, list[str]] = {}
        with _restore_on_error(model, todo, recipe, spill, limit) as before:
            for rewrite in recipe.rewrites:
                _add(notes, rewrite.apply(model, _target(todo), batches))
                todo = plan(model, config, filter_fn, on_indivisible=on_indivisible, device=device)
            teacher = _teacher(model, todo) if recipe.tuners else None
            report = todo.report()
            journal = None if resume is None else Journal(resume, model, todo, recipe, batches)
            release = None if teacher is not None else before.release
            _quantize_rows(
                model, todo, report, device, recipe.solver, batches, (spill, limit), journal, progress, put, release
            )
            for tuner in recipe.tuners:
                assert teacher is not None
                _add(notes, tuner.tune(model, teacher, batches))
    for out in report.rows:
        if out.name in notes:
            out.note = "; ".join(filter(None, (out.note, *notes[out.name])))
    report.notes += notes.get("", [])
    report.config = f"{report.config}, {recipe}"
    return report


def _target(todo: Plan) -> dict[str, Scheme | None]:
    return {row.name: row.scheme for row in todo.active if row.call is None}


@contextmanager
def _restore_on_error(
    model: nn.Module, todo: Plan, recipe: recipes.Recipe, spill: str | Path | None, limit: float | None
) -> Iterator[ModelSnapshot]:
    """Restore the model if the recipe does not finish, for any reason."""
    # Tensors that only the solver replaces are kept by reference. Rewrites may write into any tensor, tuners into those
    # that are not replaced.
    replaced = {id(row.tensor) for row in todo.active if row.call is None}
    modules = [m for row in todo.active if row.call is not None for m in _modules(model, row)]
    handled = {id(t) for m in modules for t in (*m.parameters(), *m.buffers())}
    size = sum(int(p.nbytes) for p in model.parameters())
    on_disk = spill is not None or (limit is not None and size > limit)
    with tempfile.TemporaryDirectory(dir=spill) if on_disk else nullcontext() as folder:
        before = ModelSnapshot(model, None if folder is None else Path(folder))
        for t in before.tensors:
            if recipe.rewrites or id(t) in handled or (recipe.tuners and id(t) not in replaced):
                before.copy([t])
        try:
            yield before
        except BaseException as error:
            before.restore()
            error.add_note("the model was restored to its state before quantize_")
            raise


def _modules(model: nn.Module, row: PlanRow) -> list[nn.Module]:
    """The module that a handler will transform; the whole model if the row names a parameter."""
    found = dict(model.named_modules()).get(row.name)
    return [model if found is None else found]


def _teacher(model: nn.Module, todo: Plan) -> nn.Module:
    """A copy of the model that shares the weights that the solver will replace; the solver does not write into them."""
    shared = [row.tensor for row in todo.active if row.call is None and row.tensor is not None]
    return copy.deepcopy(model, {id(t): t for t in shared})


def _add(notes: dict[str, list[str]], more: Mapping[str, str]) -> None:
    for name, text in more.items():
        notes.setdefault(name, []).append(text)


def _batches(calibration: Any, recipe: recipes.Recipe) -> Batches:
    if calibration is None:
        if recipe.needs_data:
            raise PlanError(
                f"algorithm {recipe} needs calibration data; pass calibration=batches (tensors, tuples, or mappings "
                "such as {'input_ids': ..., 'attention_mask': ...})"
            )
        return Batches()
    batches = read(calibration, together=recipe.needs_data)
    if not batches and recipe.needs_data:
        raise PlanError(f"calibration has no batches; algorithm {recipe} needs calibration data")
    return batches


def _quantize_rows(
    model: nn.Module, todo: Plan, report: Report, device: Any, solver: Solver, batches: list[Any],
    store: tuple[str | Path | None, float | None], journal: Journal | None, progress: Any, put: plainly.Put | None,
    release: Callable[[Tensor | None], None] | None,
) -> None:  # fmt: skip
    pairs = {row.name: (row, out) for row, out in zip(todo.rows, report.rows, strict=True) if row.active}
    total, done = len(pairs), 0

    def finish(name: str, seen: CollectedStatistics | None, missing: str = "") -> None:
        nonlocal done
        row, out = pairs.pop(name)
        if row.call is not None:
            plainly.run_handler_row(model, row, out, device)
        else:
            kept = None if journal is None else journal.get(name)
            weight, sqnr, out.error, note = kept or solve_row(row, solver, seen, device, missing)
            if journal is not None and kept is None:
                journal.put(name, (weight, sqnr, out.error, note))
            out.note = "; ".join(filter(None, (out.note, note)))
            was = row.tensor
            (put or plainly.put_)(row, out, weight, sqnr, device)
            if release is not None and row.places[0].get() is not was:
                release(was)
        done += 1
        if progress is not None:
            progress(done, total, name)

    _in_order(model, pairs, solver, batches, store, journal, finish)
    if journal is not None:
        journal.flush()


def _in_order(
    model: nn.Module, pairs: dict[str, Any], solver: Solver, batches: list[Any],
    store: tuple[str | Path | None, float | None], journal: Journal | None, finish: Callable[..., None],
) -> None:  # fmt: skip
    """Call finish(name, input statistics) for each weight in the model's call order; weights never called come last."""
    for name in [name for name, (row, _) in pairs.items() if row.call is not None]:
        finish(name, None)
    if solver.needs:
        weights = {id(row.tensor): name for name, (row, _) in pairs.items()}
        known = frozenset() if journal is None else journal.names
        wanted = (*solver.needs, *solver.wants)
        for names, seen in CalibrationLoop(model, weights, batches, wanted, store[0], known, store[1]).stages():
            for name in names:
                finish(name, seen.get(name, CollectedStatistics()), "no calibration data")
            if journal is not None:
                journal.flush()
    for name in list(pairs):
        finish(name, CollectedStatistics() if solver.needs else None, "no calibration data" if solver.needs else "")


def solve_row(
    row: PlanRow, solver: Solver, seen: CollectedStatistics | None = None, device: Any = None, missing: str = ""
) -> Solved:
    """Quantize one planned weight with a solver, in its kernel's layout and logical order. If the solver cannot: RTN,
    with the reason in the note."""
    assert row.scheme is not None
    assert row.site is not None
    assert row.tensor is not None
    x = full_tensor(row.tensor.detach())
    if isinstance(x, AffineQuantizedTensor):
        x = x.dequantize()
    x = x if device is None else x.to(device)
    flip, scheme = row.site.transposed, row.scheme
    x = x.transpose(-2, -1) if flip else x
    seen = seen or CollectedStatistics()
    unfolded = row.site.op == "convolution"
    spec = flat_spec(scheme.weight, x.shape, unfolded)
    asked, solver, why = solver, learner(solver, scheme.weight, seen.stats), ""
    if spec is None:
        why = "its blocks are not contiguous along one axis"
    elif solver.needs and not set(solver.needs) <= seen.stats.keys():
        why = (
            missing
            if not seen.stats
            else f"missing statistics: {', '.join(sorted(set(solver.needs) - seen.stats.keys()))}"
        )
    if why or spec is None:
        w, sqnr = plainly.quantize_weight(x, scheme, row.name, row.layout)
        return _flipped(w, flip), sqnr, None, f"rounded to nearest: {why}"
    matrix = as_matrix(x, unfolded).float()
    task = Task(row.name, matrix, spec, scheme.rule, scheme.eps, seen.stats, seen.tokens)
    solution = _solution(solver, task)
    values = dequantize(solution.parts, spec, matrix.shape)
    sqnr = plainly.decibels(float(matrix.double().square().sum()), float((values - matrix).double().square().sum()))
    parts = unflatten(solution.parts, scheme.weight, x.shape)._replace(**plainly.static_parts(scheme, x.device))
    w = AffineQuantizedTensor(parts, scheme.weight.with_(layout="plain"), x.shape, x.dtype, scheme.act)
    gain = solution.error / solution.nearest if solution.error is not None and solution.nearest else None
    other = "" if solver is asked else f"solved by {solver.name}: learned format"
    return _flipped(w.to_layout(row.layout), flip), sqnr, gain, "; ".join(filter(None, (other, solution.note)))


def _flipped(w: AffineQuantizedTensor, flip: bool) -> AffineQuantizedTensor:
    return w.transpose(-2, -1) if flip else w  # type: ignore[return-value]


def _solution(solver: Solver, task: Task) -> Solution:
    """The solver's solution; round-to-nearest if its linear algebra fails or the result is not finite."""
    try:
        solution = solver.solve(task)
        if bool(dequantize(solution.parts, task.spec, task.weight.shape).isfinite().all()):
            return solution
        why = "the solution is not finite"
    except torch.linalg.LinAlgError as error:
        why = str(error).splitlines()[0]
    return Nearest().solve(task)._replace(note=f"rounded to nearest: {why}")

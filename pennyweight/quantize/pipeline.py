"""quantize_(model, config): plan, calibrate, solve and place, one parameter at a time; dequantize_(model)."""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..algorithms import recipe as recipes
from ..algorithms.calibration.batches import Batches, read
from ..algorithms.calibration.collect_statistics import CollectedStatistics
from ..algorithms.calibration.estimate_cost import estimate_cost, solving_bytes
from ..algorithms.calibration.journal import Journal
from ..algorithms.calibration.loop import SharedWork, parse_bytes
from ..algorithms.solve import Solved, solve, stages
from ..algorithms.tied_weights import solve_in_model
from ..core.model_arguments import ReturnedInPlaceOfModel, check_arguments
from ..core.tensor import AffineQuantizedTensor
from ..distributed.dtensor import distribute_like, is_dtensor, is_fully_sharded
from ..planning.config_resolution import Filter, PlanError, Skip, not_a_config, resolve_arguments
from ..planning.configs import AOBaseConfig
from ..planning.configs.by_name import algorithm_of
from ..planning.engines import check_plan
from ..planning.layer_timing import measure_, row_counts, skip_slower_, warn_slower
from ..planning.module_handlers import apply_callable, module_nbytes
from ..planning.plan import Plan, PlanRow, check_values, plan
from ..planning.quantize_report import ALGORITHM, Report, Row
from ..planning.scheme import Scheme
from ..support.arguments import check_folder, did_you_mean
from ..support.errors import ArgumentTypeError
from ..support.progress import Callback, Progress, ignore, step
from .rollback import ModelSnapshot
from .save_pretrained import settle_saving_

_LOG = logging.getLogger(__name__)
ON_SLOWER = ("keep", "skip")


@check_arguments()
def quantize_(
    model: nn.Module,
    config: AOBaseConfig | str | Plan | Callable[[nn.Module], nn.Module],
    filter_fn: Filter | None = None,
    device: torch.device | str | None = None,
    *,
    skip: Skip = (),
    calibration: Any = None,
    algorithm: Any = None,
    resume: str | Path | None = None,
    spill: str | Path | None = None,
    max_ram: str | int | None = None,
    dry_run: bool = False,
    on_indivisible: str = "pad",
    measure: bool | Sequence[int] = False,
    on_slower: str = "keep",
    progress: Progress = None,
    for_: str | None = None,
) -> Report:
    """Quantize the model's parameters in place and return a report.

    config          the quantization scheme of the selected parameters: a config, its short name ("int4"), the path of
                    its file ("mixed.yaml"), or a PennyweightConfig or a :class:`Plan` of this model, which bring
                    ``skip`` and ``on_indivisible``, a plan also ``filter_fn``.
                    "w4a16-awq" also stands for its algorithm, and needs calibration data
    filter_fn       (module, fqn) -> bool; default: linear modules
    device          move each selected module to this device, its weight before quantization
    skip            modules and parameters to leave alone: names, ends of names ("lm_head"), globs
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
    dry_run         only plan, and measure if requested. With calibration data the report's notes say how much time,
                    memory and disk the algorithm will take, from a measurement of up to half a minute
    on_indivisible  group sizes that do not divide: "pad" (exact), "largest_divisor", "skip", "error"
    measure         time each linear shape against float on this machine, at these row counts; True: 1 and 64
    on_slower       a layer that is slower than float at one of them: "keep" it and warn, or "skip" it (stays float)
    progress        a bar after two seconds by default; False: none; or a function, called with (done, total, name)
    for_            "vllm", "vllm-gpu", "llama.cpp", "transformers", "onnxruntime" or "openvino": check before anything
                    is computed that this engine reads every weight, and say from which file format. A scheme that it
                    does not read raises with the layer and a config that it reads

    The plan, the data (NaN and inf raise) and every step of the recipe are checked before the model changes. A
    parameter that already has the scheme is left unchanged. Tied parameters stay tied.

    Without ``calibration`` and ``algorithm`` each float weight is freed before the next is read. Parameters on the meta
    device are quantized there, without values, packed as for a CPU; load a checkpoint into them with
    ``load_state_dict(..., assign=True)``, or with ``to_empty`` and ``load_state_dict``.

    With one of them, the model is restored bit for bit if a step fails or the run is interrupted (KeyboardInterrupt):
    float weights stay in memory next to the quantized ones until the end, and tensors that rewrites and tuners write
    into are copied. With ``spill``, or above ``max_ram``, both are on disk. Calibration proceeds block by block in call
    order. Each block sees the outputs of the quantized blocks before it; only one block's statistics are in memory at a
    time. A weight that no data reaches, or whose statistics cannot be used, is rounded to nearest with a note in its
    report row. With torch.distributed, each rank passes its own share of the data, and all ranks get the same model.

    Raises PlanError (a ValueError).

    >>> import torch, pennyweight as pw
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
    >>> report = pw.quantize_(model, pw.Int8WeightOnlyConfig(), skip=["2"])
    >>> [(row.name, row.bytes_before, row.bytes_after) for row in report.quantized]
    [('0.weight', 32768, 8704)]
    >>> type(model[0].weight).__name__, tuple(model(torch.randn(3, 64)).shape)
    ('AffineQuantizedTensor', (3, 8))
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps a module and puts its own prefix on names
    if isinstance(config, Plan):
        if filter_fn is not None or skip or on_indivisible != "pad":
            raise PlanError("a plan has its filter_fn, skip and on_indivisible; leave them out, or pass them to plan")
        config.check_model(model)
        filter_fn, skip, on_indivisible, config = config.filter_fn, config.skip, config.on_indivisible, config.config
    a_class = isinstance(config, type) and not issubclass(config, nn.Module)
    if a_class or isinstance(config, (nn.Module, ReturnedInPlaceOfModel)):
        raise ArgumentTypeError(not_a_config("config", config))
    if not isinstance(config, (AOBaseConfig, str)) and callable(config):
        if calibration is not None or algorithm is not None:
            raise PlanError("an algorithm needs a config such as Int4WeightOnlyConfig(), not a function over modules")
        if measure or on_slower != "keep" or skip or for_ is not None:
            raise PlanError("measure, on_slower, skip and for_ need a config, got a function over modules")
        report = apply_callable(model, config, filter_fn, device)
        settle_saving_(model)
        return report
    algorithm = algorithm_of(config) or None if algorithm is None else algorithm
    config, skip, on_indivisible = resolve_arguments(config, skip, on_indivisible)
    options = Options(
        filter_fn, device, skip, calibration, algorithm, resume, spill, max_ram, dry_run, on_indivisible, measure,
        on_slower, progress, for_,
    )  # fmt: skip
    report = (config.pipeline or Pipeline)(model, config, options).run()
    if not dry_run:
        settle_saving_(model, config)
        if _LOG.isEnabledFor(logging.INFO):
            _LOG.info("quantize_: %s: %s", report.config, report.summary())
    return report


@dataclass(frozen=True)
class Options:
    """The arguments of :func:`quantize_`."""

    filter_fn: Filter | None = None
    device: torch.device | str | None = None
    skip: Skip = ()
    calibration: Any = None
    algorithm: Any = None
    resume: str | Path | None = None
    spill: str | Path | None = None
    max_ram: str | int | None = None
    dry_run: bool = False
    on_indivisible: str = "pad"
    measure: bool | Sequence[int] = False
    on_slower: str = "keep"
    progress: Progress = None
    for_: str | None = None

    @property
    def has_recipe(self) -> bool:
        """Whether the caller gave data or an algorithm."""
        return self.calibration is not None or self.algorithm is not None


class Pipeline:
    """One run of :func:`quantize_`: plan -> calibrate -> solve -> place.

    A config class names a subclass in its attribute ``pipeline`` to change what becomes of the weights: preparing a
    model for QAT replaces :meth:`place`.
    """

    replaces = True  # whether place() replaces the float weights: then tuners may run, and the meta device is supported
    restores = True  # whether the model is restored if a step fails
    in_files = False  # whether weights and hidden states are in files
    journal = Journal

    def __init__(self, model: nn.Module, config: AOBaseConfig, options: Options) -> None:
        self.model, self.config, self.options = model, config, options
        self.advance: Callback = ignore

    def run(self) -> Report:
        # Parameters created in inference mode cannot be used by autograd later.
        progress = self.options.progress
        with step("quantize_", progress) as self.advance, torch.inference_mode(False), torch.no_grad():
            for name in ("spill", "resume"):
                check_folder(name, getattr(self.options, name), create=name == "resume")
            if self.options.resume is not None and not self.options.has_recipe:
                raise PlanError(
                    "resume keeps the finished blocks of a calibration, and without calibration or algorithm there is "
                    "none; leave it out"
                )
            recipe = self._recipe()
            batches = _batches(self.options.calibration, recipe)
            if self.options.max_ram is not None:
                parse_bytes(self.options.max_ram, "max_ram")
            todo = self.plan()
            readable = "" if self.options.for_ is None else check_plan(todo.rows, self.options.for_)
            if self.options.dry_run:
                report = todo.report()
                report.notes += self.forecast(todo, recipe, batches)
            else:
                self._check_recipe(todo, recipe, batches)
                report = self._carry_out(todo, recipe, batches, self.room(todo, recipe))
            report.notes += [readable] if readable else []
            return report

    # -- plan ----------------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """The plan, with layers timed if requested. All checks of the model and the options; changes nothing."""
        o = self.options
        counts = row_counts(o.measure)
        if o.on_slower not in ON_SLOWER:
            guess = did_you_mean(o.on_slower, ON_SLOWER, 1)
            raise PlanError(f"on_slower must be one of {', '.join(ON_SLOWER)}, got {o.on_slower!r}{guess}")
        if o.on_slower == "skip" and not counts:
            raise PlanError("on_slower='skip' needs measure=True, or numbers of rows such as measure=(1, 64)")
        todo = self._plan()
        if not o.dry_run and any(map(is_fully_sharded, self.model.modules())):
            raise PlanError(
                "fully_shard manages parameters of this model, so they cannot be replaced; call quantize_ first, then "
                "fully_shard"
            )
        if counts or not o.dry_run:
            check_values(todo, meta=self.replaces and not counts and not o.has_recipe)
        if counts:
            measure_(todo, lambda row: counts, lambda row: solve(row, device=o.device).weight)
            (skip_slower_ if o.on_slower == "skip" else warn_slower)(todo)
        return todo

    def _plan(self) -> Plan:
        o = self.options
        return plan(self.model, self.config, o.filter_fn, skip=o.skip, on_indivisible=o.on_indivisible, device=o.device)

    def forecast(self, todo: Plan, recipe: recipes.Recipe, batches: Batches) -> list[str]:
        """Notes of a dry run: what the calibration will take; none without data. Raises as the run would, if a step of
        the recipe does not apply. A model without values is not run."""
        tensors = [row.tensor for row in todo.active]
        if not tensors or any(t is None or t.is_meta for t in tensors):
            return []
        self._check_recipe(todo, recipe, batches)
        if not batches:
            return []
        cost = estimate_cost(self.model, todo, recipe, batches, room=self.room(todo, recipe))
        finished = sum(row.bytes_after for row in todo.active) if self.in_files else None
        return cost.notes(largest=solving_bytes(todo, recipe.solver), finished=finished)

    def room(self, todo: Plan, recipe: recipes.Recipe) -> float | None:
        """Bytes for hidden states and the statistics of a block; None: no limit."""
        return None if self.options.max_ram is None else parse_bytes(self.options.max_ram, "max_ram")

    # -- calibrate and solve -------------------------------------------------------------------------------------------

    def _recipe(self) -> recipes.Recipe:
        default = "auto" if self.options.calibration is not None else "nearest"
        recipe = recipes.read(default if self.options.algorithm is None else self.options.algorithm)
        if recipe.tuners and not self.replaces:
            names = ", ".join(tuner.name for tuner in recipe.tuners)
            raise PlanError(
                f"{names}: tuners need weights that are really quantized; leave them out and train the model"
            )
        return recipe

    def _check_recipe(self, todo: Plan, recipe: recipes.Recipe, batches: Batches) -> None:
        sharded = next((row.name for row in todo.active if is_dtensor(row.tensor)), None)
        if sharded is not None and (recipe.needs_data or recipe.rewrites or recipe.tuners):
            raise PlanError(
                f"{sharded} is already sharded over ranks, and {recipe} runs the whole model on data; call quantize_ "
                "first (each rank with its own data), then parallelize_module"
            )
        target = _target(todo)
        steps: tuple[Any, ...] = (*recipe.rewrites, *recipe.tuners)
        for one in steps:
            one.check(self.model, target, batches)

    def _carry_out(self, todo: Plan, recipe: recipes.Recipe, batches: Batches, max_ram: float | None) -> Report:
        notes: dict[str, list[str]] = {}
        options = self.options
        restores = options.has_recipe and self.restores
        guard = _restore_on_error(self.model, todo, recipe, options, max_ram) if restores else nullcontext()
        with guard as before:
            todo = self._rewrite(todo, recipe, batches, notes)
            teacher = self._teacher(todo) if recipe.tuners else None
            report = todo.report()
            journal = None
            if options.resume is not None and options.has_recipe:
                journal = self.journal(options.resume, self.model, todo, recipe, batches)
            release = None if before is None or teacher is not None else before.release
            self._solve_and_place(todo, report, recipe, batches, journal, max_ram, release)
            for tuner in recipe.tuners:
                assert teacher is not None
                _add(notes, tuner.tune(self.model, teacher, batches))
        for out in report.rows:
            _note(out, *notes.get(out.name, ()))
        report.notes += notes.get("", [])
        if options.has_recipe:
            report.config = f"{report.config}, {recipe}"
            if self.replaces and recipe != recipes.read("nearest"):
                setattr(self.model, ALGORITHM, str(recipe))
        return report

    def _rewrite(self, todo: Plan, recipe: recipes.Recipe, batches: Batches, notes: dict[str, list[str]]) -> Plan:
        """Apply the rewrites. Returns the plan of the model as it is then."""
        for rewrite in recipe.rewrites:
            _add(notes, rewrite.apply(self.model, _target(todo), batches))
            todo = self._plan()
        return todo

    def _teacher(self, todo: Plan) -> nn.Module:
        """A copy of the model that shares the weights that the solver will replace; it does not write into them."""
        shared = [row.tensor for row in todo.active if row.call is None and row.tensor is not None]
        return copy.deepcopy(self.model, {id(t): t for t in shared})

    def _solve_and_place(
        self, todo: Plan, report: Report, recipe: recipes.Recipe, batches: Batches, journal: Journal | None,
        max_ram: float | None, release: Callable[[Tensor | None], None] | None,
    ) -> None:  # fmt: skip
        pairs = {row.name: (row, out) for row, out in zip(todo.rows, report.rows, strict=True) if row.active}
        total, device = len(pairs), self.options.device

        def solved(name: str, seen: CollectedStatistics | None = None) -> Solved:
            row, solver = pairs[name][0], recipe.solver if self.options.has_recipe else None
            kept = None if journal is None else journal.get(name)
            _LOG.debug("%s: %s", name, "taken from the interrupted run" if kept is not None else row.scheme)
            if kept is not None:
                return Solved(*kept)
            new = solve_in_model(self.model, row, solver, seen, batches, device)
            if journal is not None:
                journal.put(name, tuple(new))
            return new

        def place(name: str, new: Solved) -> None:
            row, out = pairs.pop(name)
            was = row.tensor
            self.place(row, out, new)
            if release is not None and row.places[0].get() is not was:
                release(was)
            was = row.tensor = None  # frees the float weight before the next is read
            self.advance(total - len(pairs), total, name)

        for name in [name for name, (row, _) in pairs.items() if row.call is not None]:
            row, out = pairs.pop(name)
            assert row.call is not None
            module = row.call(self.model, device=device)
            out.type, out.bytes_after = type(module).__name__, _nbytes_after(module, row)
            self.advance(total - len(pairs), total, name)
        known = frozenset() if journal is None else journal.names
        weights = {name: row for name, (row, _) in pairs.items()}
        before: list[str] = []
        share = self.share(todo)
        for names, seen in stages(
            self.model, weights, recipe.solver, batches, spill=self.options.spill, known=known, max_ram=max_ram,
            share=share,
        ):  # fmt: skip
            self.retire([weights[name] for name in before], journal)
            own = share.weights([name for name in names if name not in known])
            waiting: dict[str, Solved] = {}
            for name in own:
                if seen.several:  # the statistics of the others need this weight as it is
                    waiting[name] = solved(name, seen.get(name))
                else:
                    place(name, solved(name, seen.get(name)))
            seen.close()
            for name in [*waiting]:
                place(name, waiting.pop(name))
            del seen  # before the statistics of the next block are collected
            if journal is not None:
                journal.flush()
            for name in names:
                if name in pairs:  # the journal has it, of an interrupted run or of another rank
                    place(name, solved(name))
            before = names
        self.retire([weights[name] for name in before], journal)

    def share(self, todo: Plan) -> SharedWork:
        """The part of the work of this process: all of it. Ranks with their own data solve every weight too."""
        return SharedWork()

    def retire(self, rows: Sequence[PlanRow], journal: Journal | None) -> None:
        """Called when the blocks behind these weights have seen the outputs of theirs."""

    # -- place ---------------------------------------------------------------------------------------------------------

    def place(self, row: PlanRow, out: Row, solved: Solved) -> None:
        """Put a solved weight into the model, in every place of its parameter, and complete its report row."""
        w, out.error = solved.weight, solved.error
        out.sqnr, out.bytes_after = (None if w.is_meta else solved.sqnr), w.nbytes
        _note(out, solved.note, "on the meta device, without values" if w.is_meta else "")
        w.readers = row.ops
        value = nn.Parameter(distribute_like(w, row.tensor), requires_grad=False)
        for place in row.places:
            place.set(value)
            if self.options.device is not None:
                _move_rest(place.module, self.options.device)


def _target(todo: Plan) -> dict[str, Scheme | None]:
    return {row.name: row.scheme for row in todo.active if row.call is None}


def _add(notes: dict[str, list[str]], more: Mapping[str, str]) -> None:
    for name, text in more.items():
        notes.setdefault(name, []).append(text)


def _note(out: Row, *texts: str) -> None:
    out.note = "; ".join(filter(None, (out.note, *texts)))


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
        raise PlanError(
            f"calibration has no batches, and algorithm {recipe} needs calibration data; an iterator that was read "
            "before is empty, so pass a list"
        )
    return batches


@contextmanager
def _restore_on_error(
    model: nn.Module, todo: Plan, recipe: recipes.Recipe, options: Options, max_ram: float | None
) -> Iterator[ModelSnapshot]:
    """Restore the model if the recipe does not finish, for any reason."""
    # Tensors that only the solver replaces are kept by reference. Rewrites may write into any tensor, tuners into those
    # that are not replaced.
    replaced = {id(row.tensor) for row in todo.active if row.call is None}
    modules = [m for row in todo.active if row.call is not None for m in _modules(model, row)]
    handled = {id(t) for m in modules for t in (*m.parameters(), *m.buffers())}
    size = sum(int(p.nbytes) for p in model.parameters())
    on_disk = options.spill is not None or (max_ram is not None and size > max_ram)
    with tempfile.TemporaryDirectory(dir=options.spill) if on_disk else nullcontext() as folder:
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


def _nbytes_after(new: nn.Module, row: PlanRow) -> int:
    """Bytes of what a handler returned: of the parameter that the row names, or of the whole module."""
    return int(getattr(new, row.name.rpartition(".")[2]).nbytes) if row.shape else module_nbytes(new)


def _move_rest(module: nn.Module, device: torch.device | str) -> None:
    """Move the other tensors of a module (a bias) to the device of its quantized weight."""
    for p in module._parameters.values():
        if p is not None and not isinstance(p, AffineQuantizedTensor):
            p.data = p.data.to(device)
    for name, b in module._buffers.items():
        module._buffers[name] = None if b is None else b.to(device)

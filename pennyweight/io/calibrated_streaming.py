"""Quantizes a model whose weights stay in files with an algorithm: float weights are read from the mapped checkpoint,
finished ones are written after each block and mapped again.

In memory are one block's statistics and the weight that is being solved; hidden states between two blocks are in files.
Rewrites change a copy of the float weights in mapped files. The result has the bits of :func:`pennyweight.quantize_` in
memory.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..algorithms.calibration.disk_offload import offload_to, offload_weights_
from ..algorithms.calibration.estimate_cost import room_beside
from ..algorithms.calibration.journal import KEY, PREFIX, Journal, SharedJournal
from ..algorithms.calibration.loop import SharedWork, parse_bytes
from ..algorithms.mixed_precision.measurements import SearchJournal
from ..algorithms.recipe import Recipe
from ..algorithms.rewrites.quarot import ROWS
from ..algorithms.solve import Solved
from ..algorithms.tuners.distill import Learner
from ..core.tensor import AffineQuantizedTensor
from ..distributed import all_reduce
from ..distributed.rank_group import RankGroup
from ..planning.config_resolution import PlanError, Skip, resolve_arguments
from ..planning.configs import AOBaseConfig
from ..planning.configs.by_name import algorithm_of
from ..planning.parameters import Place
from ..planning.plan import Plan, PlanRow
from ..planning.quantize_report import Report, Row, size
from ..quantize.pipeline import Options, Pipeline
from ..support.progress import Progress
from .atomic_write import folder_lock
from .config_files import copy_side_files, is_tied, quantization_config
from .detect_format import open as open_any
from .file import CheckpointError
from .loading import load
from .meta_model import fresh_model
from .replace_checkpoint import replacing
from .saving import save, write_shard
from .state_dict import items, metadata_of

STATE = ".calibration"  # in the folder of the result during a run: the finished weights
WRITTEN = "written"  # in STATE once the result is complete: what is beside it then is this result
SOLVED = "solved"  # in the metadata of a file: SQNR, error and note of each weight
# Copies of a weight in float32 that are held at once, with room to spare. Rewrites: float64 values before and after.
# Training: values, gradients, Adam's moments, products of a step
REWRITTEN, TRAINED = 6, 12


class FinishedWeights(SharedJournal):
    """A journal of files in the native format."""

    ending = "safetensors"

    def read_file(self, path: Path) -> dict[str, Any]:
        """name -> weight, SQNR, error, note."""
        with open_any(path) as opened:  # mapped tensors stay valid
            about = json.loads(opened.metadata[SOLVED])
            return {name: (opened[name], *more) for name, more in about.items()}

    def write_file(self, path: Path, solved: dict[str, Any]) -> None:
        about = {name: list(more) for name, (_, *more) in solved.items()}
        path.unlink(missing_ok=True)  # what a killed run left of it
        some = items({name: weight for name, (weight, *_) in solved.items()})
        write_shard(str(path), some, metadata_of(some, {SOLVED: json.dumps(about)}))


class FilesPipeline(Pipeline):
    """A run on a model with mapped weights, which is made for it and not restored after an error.

    max_memory  bytes of the largest weight while it is solved, and of a block's statistics or training
    """

    restores = False
    in_files = True

    def __init__(
        self, model: nn.Module, config: AOBaseConfig, options: Options, max_memory: float | None, team: RankGroup
    ) -> None:
        super().__init__(model, config, options)
        self.team = team
        self.journal = partial(FinishedWeights, team=team)  # type: ignore[assignment]
        self.max_memory, self.hooks = max_memory, []  # type: ignore[var-annotated]

    def run(self) -> Report:
        try:
            with offload_to(self.options.spill), all_reduce.same_data(), self.team.share_errors():
                return super().run()
        finally:
            for hook in self.hooks:
                hook.remove()

    def room(self, todo: Plan, recipe: Recipe) -> float | None:
        """Bytes that the largest weight leaves for statistics; None: no limit. Raises PlanError if it does not fit."""
        return None if self.max_memory is None else room_beside(todo, recipe.solver, self.max_memory)

    def _check_recipe(self, todo: Plan, recipe: Recipe, batches: Any) -> None:
        for one in (*recipe.rewrites, *recipe.tuners):
            why = one.needs_memory()
            if why:
                raise PlanError(f"{one.name}: {why}, so the model must be in memory; load it and call quantize_")
        if any(row.call is not None for row in todo.active):
            raise PlanError("handlers of modules need the model in memory: load it and call quantize_")
        self.room(todo, recipe)
        self._check_room(recipe)
        super()._check_recipe(todo, recipe, batches)

    def _check_room(self, recipe: Recipe) -> None:
        """Raises PlanError if a rewrite or the training of a block takes more than max_memory."""
        if self.max_memory is None:
            return
        matrices = {name: p for name, p in self.model.named_parameters() if p.ndim > 1}
        sizes = {name: p.numel() for name, p in matrices.items()}
        needs: list[tuple[Any, str, int]] = []
        if recipe.rewrites and sizes:
            # Planned weights take no more than while they are solved; of others some rows at a time are changed
            parts = {name: sizes[name] // len(p) * min(len(p), ROWS) for name, p in matrices.items()}
            name = max(parts, key=parts.__getitem__)
            needs.append((recipe.rewrites[0], name, 4 * REWRITTEN * parts[name]))
        trained = [one for one in recipe.tuners if isinstance(one, Learner)]
        if trained:
            blocks: dict[str, int] = {}
            for name, count in sizes.items():
                found = re.match(r"(.*?\.\d+)\.", name)
                if found:
                    blocks[found[1]] = blocks.get(found[1], 0) + count
            name = max(blocks, key=blocks.__getitem__, default="")
            needs.append((trained[0], name, 4 * TRAINED * blocks.get(name, 0)))
        for one, name, needed in needs:
            if needed > self.max_memory:
                limit = size(int(self.max_memory))
                raise PlanError(
                    f"max_memory is {limit}, but {one.name} takes up to {size(needed)} for {name}; raise max_memory, "
                    "or leave this step out"
                )

    def _rewrite(self, todo: Plan, recipe: Recipe, batches: Any, notes: dict[str, list[str]]) -> Plan:
        """On a copy of the float weights in files. Raises PlanError if a model made from config.json would lack what a
        rewrite adds."""
        if recipe.rewrites and self.options.spill is not None:
            offload_weights_(self.model)
        before = _names(self.model)
        todo = super()._rewrite(todo, recipe, batches, notes)
        changed = sorted(_names(self.model) ^ before)
        if changed:
            raise PlanError(
                f"{recipe} adds or removes {', '.join(changed[:3])}, and a model made from config.json has other "
                "names; load the model, call quantize_, and save it with the code that makes it"
            )
        return todo

    def _teacher(self, todo: Plan) -> nn.Module:
        """Shares all matrices: tuners for weights in files train vectors in place, and replace matrices."""
        shared = {id(p): p for p in self.model.parameters() if p.ndim > 1}
        return copy.deepcopy(self.model, shared)  # type: ignore[arg-type]

    def share(self, todo: Plan) -> SharedWork:
        return SharedWork.of(self.team, todo.active)

    def place(self, row: PlanRow, out: Row, solved: Solved) -> None:
        """A weight of an interrupted run comes as the file has it, and is packed as a new one is."""
        super().place(row, out, solved._replace(weight=solved.weight.to_layout(row.layout)))

    def retire(self, rows: Sequence[PlanRow], journal: Journal | None) -> None:
        """Put the mapped weights in place of those in memory. A module that still runs, as all do for the statistics of
        the head, gets its weight packed for the call: results do not depend on where weights are."""
        assert journal is not None
        for row in rows:
            mapped = journal.done[row.name][0]
            mapped.readers = row.ops
            value = nn.Parameter(mapped, requires_grad=False)
            for at in row.places:
                at.set(value)
                packed = _PackedForCall(at, row.layout)
                self.hooks += [
                    at.module.register_forward_pre_hook(packed.before),
                    at.module.register_forward_hook(packed.after, always_call=True),
                ]


class _PackedForCall:
    """Packs a weight as its kernel wants it while its module runs."""

    def __init__(self, at: Place, layout: str) -> None:
        self.at, self.layout = at, layout
        self.mapped: Tensor | None = None

    def before(self, module: nn.Module, args: Any) -> None:
        weight = self.at.get()
        if isinstance(weight, AffineQuantizedTensor):  # a tuner calls the module with the values it trains
            self.mapped = weight
            self.at.set(nn.Parameter(weight.to_layout(self.layout), requires_grad=False))

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.mapped is not None:
            self.at.set(self.mapped)
            self.mapped = None


def _names(model: nn.Module) -> set[str]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return parameters | {name for name, _ in model.named_buffers(remove_duplicate=False)}


@contextmanager
def merge_on_disk_of(dst: str) -> Iterator[None]:
    """Inside, ``load`` puts what a model merges of several tensors, such as experts, into files without names in the
    folder where ``dst`` is or will be."""
    place = Path(dst).absolute()
    with offload_to(next(folder for folder in place.parents if folder.is_dir())):
        yield


def quantize_mapped(
    model: nn.Module, config: AOBaseConfig | str, folder: str | None, max_memory: str | int | None, *, calibration: Any,
    algorithm: Any, skip: Skip = (), on_indivisible: str = "pad", dry_run: bool = False, progress: Progress = None,
    for_: str | None = None, team: RankGroup | None = None,
) -> Report:  # fmt: skip
    """As :func:`pennyweight.quantize_` of a model that ``load`` has mapped, within ``max_memory`` bytes of arrays.

    folder      for finished weights and hidden states, on the disk of the result; a second run with the same arguments
                continues after the last finished block. None for a dry run
    max_memory  "6 GB": the statistics of a block get what the largest weight leaves of it. Pages of the mapped
                checkpoint are not counted: the system takes them back when it needs them
    team        ranks that have the same model and data, and share the work; ``folder`` is one that all can write to

    Afterwards quantized weights are those of the files in ``folder``, and the model is ready to be saved. Raises
    PlanError if the limit is too low, or for an algorithm that needs the model in memory.
    """
    config, skip, on_indivisible = resolve_arguments(config, skip, on_indivisible)
    if config.pipeline is not None:
        raise PlanError(f"{type(config).__name__} prepares a model for training: load it and call quantize_")
    limit = None if max_memory is None else parse_bytes(max_memory, "max_memory")
    if folder is not None:
        os.makedirs(folder, exist_ok=True)
    algorithm = algorithm_of(config) or None if algorithm is None else algorithm
    options = Options(
        skip=skip, calibration=calibration, algorithm=algorithm, resume=folder, spill=folder,
        dry_run=dry_run, on_indivisible=on_indivisible, progress=progress, for_=for_,
    )  # fmt: skip
    return FilesPipeline(model, config, options, limit, team or RankGroup(folder or "", False)).run()


def quantize_with_data(
    src: str, dst: str, config: AOBaseConfig | str, *, calibration: Any, algorithm: Any, max_memory: str | int | None,
    skip: Skip, on_indivisible: str, max_shard_bytes: int, resume: bool, dry_run: bool, progress: Progress,
    for_: str | None, ranks: bool,
) -> Report:  # fmt: skip
    """:func:`pennyweight.quantize_checkpoint` with an algorithm."""
    team = RankGroup(dst, ranks)
    with team.share_errors():
        team.first(lambda: _check_empty(dst))
        model = fresh_model(src)
        with merge_on_disk_of(dst):
            load(src, model)
        tied = is_tied(model)
        with kept_state(dst, None if dry_run else resume, team) as folder:
            report = quantize_mapped(
                model, config, folder, max_memory, calibration=calibration, algorithm=algorithm, skip=skip,
                on_indivisible=on_indivisible, dry_run=dry_run, progress=progress if team.rank == 0 else False,
                for_=for_, team=team,
            )  # fmt: skip
            if not dry_run:
                chosen, left_out, _ = resolve_arguments(config, skip, on_indivisible)
                method = quantization_config(chosen, None if callable(left_out) else left_out or None)
                team.first(partial(write_folder, model, src, dst, method, max_shard_bytes, tied=tied, state=folder))
                del model  # some systems do not remove files that are mapped
    return report


def write_folder(
    model: nn.Module, src: str, dst: str, method: dict[str, Any], max_shard_bytes: int, *, tied: bool,
    finish: Callable[[str], None] | None = None, state: str | None = None,
) -> None:  # fmt: skip
    """Write a model with the side files of the folder that it was read from, and put both in place of ``dst``.

    method  the "quantization_config" of config.json
    tied    :func:`is_tied` of the model before it was quantized: a rewrite may untie it
    finish  called with the folder before it is put in place
    state   the folder of :func:`kept_state`
    """
    with replacing(dst) as made:
        save(model, made, max_shard_bytes=max_shard_bytes)
        copy_side_files(src, made, method, untied=tied and not is_tied(model))
        if finish is not None:
            finish(made)
        if state is not None:
            Path(state, WRITTEN).write_text(json.dumps(sorted(os.listdir(made))))


def is_written(dst: str) -> bool:
    """Whether a run was killed when its result was complete, and the folder holds nothing but files of that result: the
    same run may replace them."""
    try:
        ours = json.loads(Path(dst, STATE, WRITTEN).read_text())
    except (OSError, ValueError):  # none was complete, or the list of its files was not
        return False
    return set(os.listdir(dst)) - {STATE} <= set(ours)


def _check_empty(dst: str) -> None:
    if is_written(dst):
        return
    there = sorted(set(os.listdir(dst)) - {STATE}) if os.path.isdir(dst) else []
    if there or os.path.isfile(dst):
        found = f"contains {', '.join(there[:3])}" if there else "is a file"
        raise CheckpointError(dst, None, f"{found}; choose a new or empty folder, or that of an interrupted run")


@contextmanager
def kept_state(out_dir: str, resume: bool | None, team: RankGroup | None = None) -> Iterator[str | None]:
    """The folder of finished weights, and of those of a search, during a run; an error before the first of them removes
    it.

    resume   True: continue an interrupted run in out_dir; False: start again; None: keep no state, the folder is None
    team     the ranks that run it; the first makes and removes the folder
    """
    if resume is None:
        yield None
        return
    team = team or RankGroup(out_dir, False)
    folder = os.path.join(out_dir, STATE)
    with ExitStack() as lock:
        made = team.first(lambda: _begin(out_dir, folder, resume, lock))
        try:
            yield folder
        except BaseException:
            if team.rank:
                raise
            finished = os.path.isdir(folder) and any(name.startswith(PREFIX) for name in os.listdir(folder))
            if os.path.isdir(folder) and not finished:
                shutil.rmtree(folder)
                if made:
                    os.rmdir(out_dir)
            raise
        team.step(lambda: None)  # until no rank uses it
        if team.rank == 0 and os.path.isdir(folder):
            shutil.rmtree(folder)


def _begin(out_dir: str, folder: str, resume: bool, lock: ExitStack) -> bool:
    """Whether the run makes out_dir. Locks the folder against another run, and removes what a killed one left there but
    cannot use: hidden states and unfinished files; without ``resume`` all."""
    made = not os.path.isdir(out_dir)
    os.makedirs(folder, exist_ok=True)
    lock.enter_context(folder_lock(folder, patience=0))
    for entry in Path(folder).iterdir():
        finished = entry.name in (KEY, SearchJournal.key_file, WRITTEN) or (
            entry.name.startswith(PREFIX) and entry.suffix != ".part"
        )
        if resume and finished:
            continue
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return made

"""QuaRot: rotates the residual stream and the attention values to a basis without outlier channels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...distributed import all_reduce
from ...planning.config_resolution import PlanError
from ...planning.scheme import Scheme
from ..base import Rewrite, register
from ..calibration.batches import Batches, held_out, read
from ..calibration.disk_offload import copy_of
from .equalization import EqualizationPair, LinearRows, NormWeight, find_pairs, shared_readers
from .graph import Matrix, trace
from .hadamard import mean_preserving_rotation, rotation
from .online_hadamard import RotatedLinear, rotate_inputs_, undo_
from .residual_stream import ResidualStream, find_stream
from .spinquant import learn_rotation
from .verify_rewrite import (
    HeldOutCheck,
    SavedTensors,
    float_outputs,
    probe_batch,
    relative_difference,
    schemes_by_name,
    tolerance,
)

ROWS = 4096  # of a table that are in float64 at once


@register("rotate")
@dataclass(frozen=True)
class Rotate(Rewrite):
    """Rotates the residual stream of a pre-norm transformer, and the values of attention (Ashkboos et al. 2024).

        x -> x Q;  W_read -> W_read diag(gain) Q;  W_write -> Q^T W_write;  gain -> 1
        v -> v R per head;  W_o -> W_o R per head

    Q and R are Hadamard matrices with random signs (:func:`pennyweight.algorithms.rewrites.hadamard.rotation`). With
    LayerNorm Q is a random rotation that preserves (1, .. 1) and thereby the mean. No run-time cost.

    stream  rotate the residual stream
    values  rotate the values of attention
    online  rotate inputs that neither of these reaches at run time (down_proj; with stream=False, values=False: every
            layer that will be quantized, in any model), with
            :class:`pennyweight.algorithms.rewrites.online_hadamard.RotatedLinear`
    untie   copy a table shared by embedding and output, so that the last norm's gain can be folded into the output.
            The state dict keeps its names; the config's tie_word_embeddings becomes False
    learn   number of steps that train the stream's rotation on all of the calibration data, starting from Q, at
            ``rate`` (SpinQuant); 0: fixed. See :func:`pennyweight.algorithms.rewrites.spinquant.learn_rotation`
    create_bias     add a bias to the output if a LayerNorm's bias must be folded into it and it has none
    held_out        fraction of the data that is held out: if the rotation does not decrease the divergence of the model
                    rounded to nearest, it is undone. With a single row of data, that row. 0: always rotate
    """

    seed: int = 0
    stream: bool = True
    values: bool = True
    online: bool = False
    untie: bool = True
    create_bias: bool = True
    learn: int = 0
    rate: float = 0.01
    held_out: float = 0.25

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise ValueError(f"rotate: held_out must be a fraction of the data in [0, 1), got {self.held_out}")
        if self.learn < 0 or not self.rate > 0:
            raise ValueError(
                f"rotate: learn must not be negative and rate must be positive, got learn={self.learn}, "
                f"rate={self.rate}"
            )
        if self.learn and not self.stream:
            raise ValueError("rotate: learn trains the rotation of the residual stream; it needs stream=True")

    def needs_memory(self) -> str:
        if self.learn:
            return "learn trains the rotation of all layers at once"
        return "online adds a rotation at run time, which a model made from config.json lacks" if self.online else ""

    @torch.no_grad()
    def check(self, model: nn.Module, target: Mapping[str, Scheme | None], batches: Any) -> None:
        """Raises PlanError if the model has no residual stream that can be rotated."""
        self._stream(model, self._probe(read(batches)))

    def _probe(self, batches: Batches) -> Any:
        if not batches:
            raise PlanError("rotate runs the model to find its structure; pass calibration=batches")
        if not (self.stream or self.values or self.online):
            raise PlanError("rotate: stream, values and online are all False, so nothing would be rotated")
        return all_reduce.broadcast_batch(probe_batch(batches[0]))

    def _stream(self, model: nn.Module, batch: Any) -> ResidualStream:
        return find_stream(model, batch) if self.stream else ResidualStream(0, [], False, [], [])

    @torch.no_grad()
    def apply(self, model: nn.Module, target: Mapping[str, Scheme | None], batches: Any) -> dict[str, str]:
        """See :class:`Rewrite`. Runs the first batch, the held-out ones, and with ``learn`` all. Raises PlanError, with
        the model restored, if there is no residual stream that can be rotated, or if the outputs change."""
        batches = read(batches)
        batch = self._probe(batches)
        stream = self._stream(model, batch)
        heads = []
        if self.values:
            mixed = [r.name for node, found in shared_readers(trace(model, batch)) if node.kind == "op" for r in found]
            heads = [
                c for c in find_pairs(model, batch, mixed).pairs if c.head > 1 and isinstance(c.writer, LinearRows)
            ]
        learned_on, guard = held_out(batches, self.held_out)
        reference = float_outputs(model, batch, before=True)
        compared = self.held_out and any(s is not None for s in target.values())
        trial = HeldOutCheck(model, target, guard or batches) if compared else None
        before = 0.0 if trial is None else trial.divergence()
        change = _Change(model, stream, heads)
        try:
            notes = change.make(self, target, learned_on)
            off = all_reduce.max_number(relative_difference(reference, float_outputs(model, batch)))
            if off > tolerance(model):
                raise PlanError(
                    f"rotate: the model's outputs changed by {off:.1e} (relative), more than {tolerance(model):.1e}; "
                    "something other than its norms reads the residual stream"
                )
            if trial is not None:
                trial.forget_all()
                after = trial.divergence()
                note = f"held-out divergence with RTN {before:.3g} -> {after:.3g}"
                if not after < before:
                    change.undo()
                    return {"": f"rotation undone: {note}", **dict.fromkeys(target, "not rotated: it did not help")}
                notes[""] = "; ".join(filter(None, (notes.get(""), f"rotated: {note}")))
        except BaseException:
            change.undo()
            raise
        return notes


@dataclass
class _Change:
    """The rotation of one model, and how to undo it."""

    model: nn.Module
    stream: ResidualStream
    heads: list[EqualizationPair]
    kept: SavedTensors | None = None
    replaced: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    config: tuple[Any, Any] | None = None
    online: list[nn.Module] = field(default_factory=list)

    def make(self, options: Rotate, target: Mapping[str, Scheme | None], batches: Any) -> dict[str, str]:
        s = self.stream
        notes: dict[str, str] = {}
        tensors = [t for gain, readers in s.norms for t in (*gain.tensors(), *_of(readers))]
        tensors += [*_of(s.writers), *(module._parameters[p] for _, module, p in s.parameters)]  # type: ignore[list-item]
        tensors += [t for c in self.heads for t in c.tensors()]
        schemes = schemes_by_name(self.model, target)  # before tables are untied
        reached = {r.name for _, readers in s.norms for r in readers} | {r.name for c in self.heads for r in c.readers}
        left = [n for n in target if options.online and n not in reached and n.endswith("weight")]
        tensors += [self.model.get_parameter(n) for n in left]
        self.kept = SavedTensors(tensors)
        more = self._untie(options)
        for gain, readers in s.norms:
            self._fold(gain, readers, options.create_bias, notes)
        for pair in self.heads:
            _rotate_heads(pair, options.seed + 1)
            for r in pair.readers:
                notes[r.name] = f"rotated; {pair.writer.name} rotated in heads of {pair.head}"
        for name in left:
            layer = name.rpartition(".")[0]
            text = rotate_inputs_(self.model, [layer])[name]
            if isinstance(self.model.get_submodule(layer), RotatedLinear):
                self.online.append(self.model.get_submodule(layer))
            notes[name] = "; ".join(filter(None, (notes.get(name), text)))
        q = (
            torch.empty(0, dtype=torch.float32, device="cpu")
            if not s.width
            else (mean_preserving_rotation if s.centred else rotation)(s.width, options.seed)
        )
        if options.learn:
            q, notes[""] = learn_rotation(self.model, s, q, schemes, batches, options.learn, options.rate)
        done: set[int] = set()
        for r in (r for _, readers in s.norms for r in readers):
            if id(r.weight) not in done:
                done.add(id(r.weight))
                _rotate_rows(r.view, q.to(r.weight.device))
            notes[r.name] = "; ".join(filter(None, ("rotated", notes.get(r.name), more.get(r.name))))
        for w in s.writers:
            if id(w.weight) not in done:
                done.add(id(w.weight))
                _write(w, q.to(w.weight.device))
            known = notes.get(w.name, "")
            notes[w.name] = known if known.startswith("rotated") else "; ".join(filter(None, ("rotated", known)))
        for _, module, name in s.parameters:
            p = module._parameters[name]
            assert p is not None
            if id(p) not in done:
                done.add(id(p))
                _rotate_rows(p.data, q.to(p.device))
        return notes

    def undo(self) -> None:
        for layer in self.online:
            undo_(layer)
        for module, name, was in reversed(self.replaced):
            module._parameters[name] = was
        if self.config is not None:
            self.config[0].tie_word_embeddings = self.config[1]
        if self.kept is not None:
            self.kept.restore()

    def _untie(self, options: Rotate) -> dict[str, str]:
        """Copy a table shared by embedding and output if a norm's gain must be folded into one. Returns notes."""
        written, notes = {id(w.weight): w for w in self.stream.writers}, {}
        for gain, readers in self.stream.norms:
            for r in readers:
                table = written.get(id(r.weight))
                if table is None or (gain.bias is None and bool((gain.value() == 1).all())):
                    continue
                if not options.untie:
                    raise PlanError(
                        f"rotate: {r.name} is shared by embedding and output, and the gain of {gain.name} must be "
                        "folded into the output only; rotate with untie=True, which copies the table"
                    )
                place = self._second_place(r)
                self.replaced.append((place[0], place[1], r.weight))
                place[0]._parameters[place[1]] = nn.Parameter(copy_of(r.weight), r.weight.requires_grad)
                r.name, r.module, r.param = place[2], place[0], place[1]
                config = getattr(self.model, "config", None)
                if getattr(config, "tie_word_embeddings", None):
                    self.config = (config, config.tie_word_embeddings)  # type: ignore[union-attr]
                    config.tie_word_embeddings = False  # type: ignore[union-attr]
                notes[r.name] = f"untied from {table.name}: a model that loads this checkpoint must not tie them"
                notes[table.name] = f"untied from {r.name}"
        return notes

    def _second_place(self, r: Matrix) -> tuple[nn.Module, str, str]:
        """The other module that holds a shared table: the output layer."""
        for prefix, module in self.model.named_modules():
            for name, p in module._parameters.items():
                if p is r.weight and not isinstance(module, nn.Embedding):
                    return module, name, f"{prefix}.{name}" if prefix else name
        raise PlanError(f"rotate: {r.name} is embedding and output in one module, so it cannot be untied")

    def _fold(self, gain: NormWeight, readers: tuple[Matrix, ...], create: bool, notes: dict[str, str]) -> None:
        value, shift = gain.value(), gain.bias
        for r in readers:
            if shift is not None and bool(shift.any()):
                if r.bias is None:
                    if not create or type(r.module).forward is not nn.Linear.forward:
                        raise PlanError(
                            f"rotate: {r.name} has no bias to fold that of {gain.name} into"
                            + ("; rotate with create_bias=True" if not create else "")
                        )
                    self.replaced.append((r.module, "bias", None))
                    zeros = torch.zeros(r.height, dtype=r.weight.dtype, device=r.weight.device)
                    r.module._parameters["bias"] = nn.Parameter(zeros, r.weight.requires_grad)
                    notes[r.name] = "bias added"
                bias = r.bias
                assert bias is not None
                bias.data.copy_(bias.data.double() + r.view.double() @ shift.data.double())
            for rows in r.view.split(ROWS):
                rows.copy_(rows.double() * value)
        gain.put(torch.ones_like(value))
        if shift is not None:
            shift.data.zero_()


def _rotate_rows(view: Tensor, q: Tensor) -> None:
    """view [.., K] -> view q in place."""
    for rows in view.split(ROWS) if view.ndim > 1 else [view]:
        rows.copy_(rows.double() @ q)


def _of(matrices: Any) -> list[Tensor]:
    return [t for m in matrices for t in (m.weight, m.bias) if t is not None]


def _write(w: Matrix, q: Tensor) -> None:
    """Rotate the outputs of a layer, or the rows of a table, by q."""
    if w.kind == "embedding":
        _rotate_rows(w.weight.data, q)
        return
    view = w.view  # convolutions: [out, in, ..]
    view.copy_(torch.tensordot(q.t(), view.double(), 1))
    if w.bias is not None:
        w.bias.data.copy_(w.bias.data.double() @ q)


def _rotate_heads(pair: EqualizationPair, seed: int) -> None:
    """v -> v R in each head of the writer, and the readers' columns with it. R is orthogonal, so R^-T is R."""
    assert isinstance(pair.writer, LinearRows)
    rows, head = pair.writer, pair.head
    q = rotation(head, seed).to(rows.matrix.weight.device)
    view = rows.matrix.view[rows.start : rows.start + rows.width]
    heads = view.double().unflatten(0, (-1, head))  # [heads, head, in]
    view.copy_(torch.einsum("hdi,de->hei", heads, q).flatten(0, 1))
    if rows.matrix.bias is not None:
        bias = rows.matrix.bias.data[rows.start : rows.start + rows.width]
        bias.copy_((bias.double().view(-1, head) @ q).flatten())
    for r in pair.readers:
        r.view.copy_((r.view.double().unflatten(1, (-1, head)) @ q).flatten(1))

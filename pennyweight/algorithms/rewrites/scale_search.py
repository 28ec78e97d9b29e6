"""Shared base of SmoothQuant and AWQ: searches scales of equalization pairs by the layers' output error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...core.numerics import fake_quantize
from ...distributed import all_reduce
from ...kernels.activation import quantize_activation
from ...planning.config_resolution import PlanError
from ...planning.run_batch import token_mask
from ...planning.scheme import Scheme
from ..base import Rewrite
from ..calibration.batches import Batches, held_out, read
from ..calibration.block_order import inference_mode
from ..calibration.disk_offload import empty
from ..calibration.float32_products import run_batch
from ..calibration.input_hooks import InputHooks, require_finite
from .equalization import EqualizationPair, find_pairs
from .graph import Matrix
from .verify_rewrite import HeldOutCheck, SavedTensors, float_outputs, probe_batch, relative_difference, tolerance

LEAST, MOST = 1e-4, 1e4  # of a scale, relative to the geometric mean of all
TRIALS = 24  # maximum number of runs over the held-out data


@dataclass
class ReaderInputs:
    """Input statistics of a pair's readers: largest and mean magnitude per channel, and some tokens [T, width]."""

    largest: Tensor
    mean: Tensor
    tokens: Tensor


Scales = tuple[str, Tensor]  # (text for the report, float64 [width of the writer])


@dataclass(frozen=True)
class ScaleSearch(Rewrite):
    """Divides the writer of each equalization pair by scales and multiplies its readers' columns, if that helps.

    samples     number of calibration tokens for the error of scales, spread evenly over the batches
    held_out    fraction of the batches (of the rows of a single one) that is held out. A pair is scaled if its readers'
                error and the divergence of the whole model, rounded to nearest, decrease on the held-out data. All
                pairs are tried together, then recursively in halves if they do not help; finally each is left out once.
                At most :data:`TRIALS` runs. 0: every chosen scale is kept
    """

    samples: int = 512
    held_out: float = 0.25

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"{self.name}: samples must be at least 1, got {self.samples}")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"{self.name}: held_out must be a fraction of the data in [0, 1), got {self.held_out}")

    def candidates(self, pair: EqualizationPair, seen: ReaderInputs, weights: Tensor) -> Iterator[Scales]:
        """Candidate scales. weights: largest magnitude of each column of the pair's readers, [width]."""
        raise NotImplementedError

    @torch.no_grad()
    def apply(self, model: nn.Module, target: Mapping[str, Scheme | None], batches: Any) -> dict[str, str]:
        """See :class:`Rewrite`. Raises PlanError, with the model restored, if its outputs change."""
        verb = f"not scaled by {self.name}"
        batches = read(batches)
        if not batches:
            raise PlanError(f"{self.name} needs calibration data; pass calibration=batches")
        chosen_on, guard = held_out(batches, self.held_out)
        if self.held_out and not all_reduce.all_true(bool(guard)):
            return dict.fromkeys(target, f"{verb}: only one row of data, none left to hold out")
        static = {n for n, s in target.items() if s is not None and s.act is not None and s.act.mode == "static"}
        batch = all_reduce.broadcast_batch(probe_batch(batches[0]))
        found = find_pairs(model, batch, target.keys())
        notes = {name: f"{verb}: {why}" for name, why in found.without.items()}
        pairs = []
        for pair in found.pairs:
            fixed = sorted(static.intersection(r.name for r in pair.readers))
            if fixed:
                why = f"the input of {fixed[0]} has a static scale, calibrated without scaling"
                notes |= {r.name: f"{verb}: {why}" for r in pair.readers if r.name in target}
            else:
                pairs.append(pair)
        seen = collect_inputs(model, pairs, chosen_on, self.samples)
        others = collect_inputs(model, pairs, guard, self.samples) if guard else {}
        found_scales: list[_Scaled] = []
        for i, pair in enumerate(pairs):
            why = "no calibration data"
            if i in seen:
                text, s = self._choose(pair, seen[i], target)
                why = self._why_not(pair, s, others.get(i), target) if text else "no scale reduces its error"
            if why:
                notes |= {r.name: f"{verb}: {why}" for r in pair.readers if r.name in target}
            else:
                found_scales.append(_Scaled(pair, text, s))
        reference = float_outputs(model, batch, before=True)
        kept = SavedTensors(t for one in found_scales for t in one.pair.tensors())
        try:
            helpful, note = self._helpful(model, target, guard, found_scales, kept)
            off = all_reduce.max_number(relative_difference(reference, float_outputs(model, batch)))
            if off > tolerance(model):
                raise PlanError(
                    f"{self.name}: the model's outputs changed by {off:.1e} (relative), more than "
                    f"{tolerance(model):.1e}; the model was restored. Convert it to float32, or omit this step"
                )
        except BaseException:
            kept.restore()
            raise
        for one in found_scales:
            text = f"{self.name} {one.text} with {one.pair.writer.name}" if one in helpful else (
                f"{self.name} {one.text} with {one.pair.writer.name} undone: the model's held-out divergence did not "
                "decrease"
            )  # fmt: skip
            notes |= {r.name: text for r in one.pair.readers if r.name in target}
        return notes | ({"": note} if note else {})

    def _why_not(
        self, pair: EqualizationPair, s: Tensor, inputs: ReaderInputs | None, target: Mapping[str, Scheme | None]
    ) -> str:
        """Why a chosen scale is not applied; "" if its readers' error on the held-out data decreases."""
        if not self.held_out:
            return ""
        if inputs is None:
            return "no held-out data"
        options = (pair.scale_of_readers(torch.ones_like(s)), pair.scale_of_readers(s))
        found = [group_error(pair.readers, inputs.tokens, one, target) for one in options]
        before, after = all_reduce.reduce_sum(torch.tensor(found, dtype=torch.float64, device="cpu")).tolist()
        return "" if after < before else f"no scale reduces its error on held-out data: {before:.3g} -> {after:.3g}"

    def _helpful(
        self,
        model: nn.Module,
        target: Mapping[str, Scheme | None],
        guard: Batches,
        found: list[_Scaled],
        kept: SavedTensors,
    ) -> tuple[list[_Scaled], str]:
        """(pairs whose scaling decreases the held-out divergence, note for the report). Applies these scales only."""
        if not guard or not found:
            _scale(found, kept)
            return found, ""
        trial = HeldOutCheck(model, target, guard)
        runs, start = 1, trial.divergence()

        def keep(some: list[_Scaled], before: list[_Scaled], best: float) -> tuple[list[_Scaled], float]:
            """(pairs of ``some`` that help in addition to ``before``, divergence); ``best`` is that of ``before``."""
            nonlocal runs
            if runs >= TRIALS:
                return [], best
            both = [one for one in found if one in before or one in some]
            _scale(both, kept)
            trial.forget(t for one in some for t in one.pair.tensors())
            runs, now = runs + 1, trial.divergence()
            if now < best:
                return some, now
            trial.forget(t for one in some for t in one.pair.tensors())
            if len(some) == 1:
                return [], best
            good: list[_Scaled] = []
            for half in (some[: len(some) // 2], some[len(some) // 2 :]):
                more, best = keep(half, [*before, *good], best)
                good += more
            return good, best

        good, best = keep(found, [], start)
        # A joint gain may include pairs that hurt: each is left out once, in groups if there are many
        count = min(len(good), TRIALS - runs) if len(good) > 1 else 0
        for group in [good[i::count] for i in range(count)]:
            rest = [one for one in good if one not in group]
            _scale(rest, kept)
            trial.forget(t for one in group for t in one.pair.tensors())
            without = trial.divergence()
            if without < best:
                good, best = rest, without
            trial.forget(t for one in group for t in one.pair.tensors())
        _scale(good, kept)
        note = f"{self.name} kept for {len(good)} of {len(found)} inputs"
        return good, f"{note}: held-out divergence with RTN {start:.3g} -> {best:.3g}"

    def _choose(self, pair: EqualizationPair, seen: ReaderInputs, target: Mapping[str, Scheme | None]) -> Scales:
        weights = torch.stack([r.view.double().abs().amax(0) for r in pair.readers]).amax(0)
        options = [(text, normalize_scales(s)) for text, s in self.candidates(pair, seen, weights)]
        if len(options) == 1:
            return options[0]
        found = [group_error(pair.readers, seen.tokens, pair.scale_of_readers(s), target) for _, s in options]
        errors = all_reduce.reduce_sum(torch.tensor(found, dtype=torch.float64, device="cpu")).tolist()
        return options[min(range(len(errors)), key=errors.__getitem__)]


@dataclass(eq=False)
class _Scaled:
    """A pair and its chosen scales."""

    pair: EqualizationPair
    text: str
    scales: Tensor


def _scale(some: Sequence[_Scaled], kept: SavedTensors) -> None:
    """Scale exactly these pairs, starting from the original weights, so that rounding does not accumulate."""
    kept.restore()
    for one in some:
        one.pair.apply(one.scales)


def normalize_scales(s: Tensor) -> Tensor:
    """Scales with a geometric mean of 1, within [LEAST, MOST]; 1 for dead channels."""
    good = s.isfinite() & (s > 0)
    if not good.any():
        return torch.ones_like(s)
    centre = s[good].log().mean().exp()
    return torch.where(good, (s / centre).clamp(LEAST, MOST), 1.0)


def group_error(readers: Sequence[Matrix], x: Tensor, s: Tensor, target: Mapping[str, Scheme | None]) -> float:
    """Sum over the readers that will be quantized of |Q(x / s) Q(W s)^T - x W^T|^2 / |x W^T|^2.

    x [T, K] float32, s [K] float64. Weights are rounded to nearest, inputs quantized as in the scheme.
    """
    total = 0.0
    for r in readers:
        scheme = target.get(r.name)
        if scheme is None:
            continue
        w = r.view.float()
        scaled = (w * s).float()
        wq = fake_quantize(scaled, scheme.weight.with_(layout="plain"), scheme.rule, scheme.eps)
        xq = quantize_activation((x / s).float(), scheme.act, None, None)
        exact = x @ w.t()
        size = float(exact.double().square().sum())
        error = float((xq @ wq.t() - exact).double().square().sum())
        total += error / size if size > 0 else error
    return total


@dataclass
class _Seen:
    """What :func:`collect_inputs` has seen of one input. tokens has room for all that will be picked."""

    largest: Tensor
    total: Tensor
    tokens: Tensor
    count: int = 0
    taken: int = 0
    of_batch: int = 0  # taken of this batch

    def add(self, x: Tensor, share: int) -> None:
        """Pick evenly spaced tokens of x, up to ``share`` of a batch."""
        count = min(x.shape[0], max(0, share - self.of_batch))
        at = torch.linspace(0, x.shape[0] - 1, count, dtype=torch.float32, device="cpu").round().long()
        self.tokens[self.taken : self.taken + count] = x[at]
        self.of_batch, self.taken, self.count = self.of_batch + count, self.taken + count, self.count + x.shape[0]


def collect_inputs(
    model: nn.Module, pairs: Sequence[EqualizationPair], batches: Sequence[Any], samples: int
) -> dict[int, ReaderInputs]:
    """Input statistics of each pair's readers, by index of the pair, in one run over the batches. Statistics cover all
    ranks; tokens are per rank. Raises ValueError for inputs that are not finite."""
    first = {id(c.readers[0].weight): str(i) for i, c in enumerate(pairs)}
    share = -(-samples // max(1, len(batches)))
    found: dict[int, _Seen] = {}

    def see(name: str, x: Tensor) -> None:
        i, x = int(name), x.flatten(0, 1)
        if not x.shape[0]:
            return
        require_finite(pairs[i].readers[0].name, x)
        largest, total = x.abs().amax(0), x.abs().double().sum(0)
        if i not in found:
            tokens = empty((share * len(batches), x.shape[1]), x.dtype, x.device)
            found[i] = _Seen(largest, total, tokens)
        else:
            found[i].largest, found[i].total = torch.maximum(found[i].largest, largest), found[i].total + total
        found[i].add(x, share)

    with inference_mode(model):
        for batch in batches:
            for one in found.values():
                one.of_batch = 0
            with InputHooks(first, see, token_mask(batch)):
                run_batch(model, batch)
    seen = {}
    for i, pair in enumerate(pairs):
        weight, width = pair.readers[0].weight, pair.readers[0].width
        nothing = torch.zeros(width, device=weight.device, dtype=torch.float32)
        one = found.get(i) or _Seen(nothing, nothing.double(), nothing.unsqueeze(0), taken=1)
        count = all_reduce.reduce_sum(torch.tensor(float(one.count), device=weight.device, dtype=torch.float32))
        peak, size = all_reduce.reduce_max(one.largest.double()), all_reduce.reduce_sum(one.total)
        if count > 0:
            seen[i] = ReaderInputs(peak, size / float(count), one.tokens[: one.taken])
    return seen

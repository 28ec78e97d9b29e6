"""What SmoothQuant and AWQ share: scales for couples, from calibration inputs, judged by the layers' own error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...core.numerics import fake_quantize
from ...kernels.activation import quantize_activation
from ...quantize.config_resolution import PlanError
from ...quantize.run_batch import run_batch, token_mask
from ...quantize.scheme import Scheme
from ..base import Rewrite
from ..calibration import all_reduce
from ..calibration.batches import Batches, held_out, read
from ..calibration.block_order import inference_mode
from ..calibration.input_hooks import InputHooks
from .equalization import EqualizationPair, find_pairs
from .graph import Matrix
from .held_out import HeldOutCheck
from .verify_rewrite import SavedTensors, float_outputs, probe_batch, relative_difference, tolerance

LEAST, MOST = 1e-4, 1e4  # of a scale, against the geometric mean of all
TRIALS = 24  # runs over what is held out that decide which couples are scaled


@dataclass
class ReaderInputs:
    """Of the readers of a couple: largest and mean magnitude of each channel, and some tokens [T, width]."""

    largest: Tensor
    mean: Tensor
    tokens: Tensor


Scales = tuple[str, Tensor]  # (what is said of it, float64 [width of the writer])


@dataclass(frozen=True)
class ScaleSearch(Rewrite):
    """Divides the writer of each couple by scales and multiplies its readers' columns, where that helps.

    samples     calibration tokens on which scales are judged, spread evenly over the batches
    held_out    share of the batches (of the rows of a single one) that scales are not chosen on but that decides. A
                couple is scaled where its readers' error falls there, and so does the divergence of the whole model,
                rounded to nearest: of all couples at once, in halves where they do not help together, and so on; then
                each is left out once. At most :data:`TRIALS` runs. 0: every chosen scale is kept
    """

    samples: int = 512
    held_out: float = 0.25

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"{self.name}: samples must be at least 1, got {self.samples}")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"{self.name}: held_out is a share of the data from 0 to below 1, got {self.held_out}")

    def candidates(self, couple: EqualizationPair, seen: ReaderInputs, weights: Tensor) -> Iterator[Scales]:
        """Scales to choose from. weights: largest magnitude of each column of the couple's readers, [width]."""
        raise NotImplementedError

    @torch.no_grad()
    def apply(self, model: nn.Module, target: Mapping[str, Scheme | None], batches: Any) -> dict[str, str]:
        """See :class:`Rewrite`. Raises PlanError, the model as it was, where its outputs change after all."""
        verb = f"not scaled by {self.name}"
        batches = read(batches)
        if not batches:
            raise PlanError(f"{self.name} needs calibration data; pass calibration=batches")
        chosen_on, guard = held_out(batches, self.held_out)
        if self.held_out and not all_reduce.all_true(bool(guard)):
            return dict.fromkeys(target, f"{verb}: one row of data, and none beside it to judge scales by")
        static = {n for n, s in target.items() if s is not None and s.act is not None and s.act.mode == "static"}
        batch = all_reduce.broadcast_batch(probe_batch(batches[0]))
        found = find_pairs(model, batch, target.keys())
        notes = {name: f"{verb}: {why}" for name, why in found.without.items()}
        couples = []
        for couple in found.couples:
            fixed = sorted(static.intersection(r.name for r in couple.readers))
            if fixed:
                why = f"the static scale of {fixed[0]}'s input belongs to the unscaled one"
                notes |= {r.name: f"{verb}: {why}" for r in couple.readers if r.name in target}
            else:
                couples.append(couple)
        seen = collect_inputs(model, couples, chosen_on, self.samples)
        others = collect_inputs(model, couples, guard, self.samples) if guard else {}
        found_scales: list[_Scaled] = []
        for i, couple in enumerate(couples):
            why = "no calibration data"
            if i in seen:
                text, s = self._choose(couple, seen[i], target)
                why = self._why_not(couple, s, others.get(i), target) if text else "no scale lowers its error"
            if why:
                notes |= {r.name: f"{verb}: {why}" for r in couple.readers if r.name in target}
            else:
                found_scales.append(_Scaled(couple, text, s))
        reference = float_outputs(model, batch)
        kept = SavedTensors(t for one in found_scales for t in one.couple.tensors())
        try:
            helpful, told = self._helpful(model, target, guard, found_scales, kept)
            off = all_reduce.max_number(relative_difference(reference, float_outputs(model, batch)))
            if off > tolerance(model):
                raise PlanError(
                    f"{self.name}: the model's outputs moved by {off:.1e} of their size, more than "
                    f"{tolerance(model):.1e}; it is as it was. Do it in float32, or leave this step out"
                )
        except BaseException:
            kept.restore()
            raise
        for one in found_scales:
            text = f"{self.name} {one.text} with {one.couple.writer.name}" if one in helpful else (
                f"{self.name} {one.text} with {one.couple.writer.name} undone: the model's held-out divergence did not "
                "fall"
            )  # fmt: skip
            notes |= {r.name: text for r in one.couple.readers if r.name in target}
        return notes | ({"": told} if told else {})

    def _why_not(
        self, couple: EqualizationPair, s: Tensor, held: ReaderInputs | None, target: Mapping[str, Scheme | None]
    ) -> str:
        """Why a chosen scale is not to be applied; "" where its readers' error on what was held out falls."""
        if not self.held_out:
            return ""
        if held is None:
            return "no held-out data"
        options = (couple.spread(torch.ones_like(s)), couple.spread(s))
        found = [group_error(couple.readers, held.tokens, one, target) for one in options]
        before, after = all_reduce.reduce_sum(torch.tensor(found, dtype=torch.float64, device="cpu")).tolist()
        return "" if after < before else f"no scale lowers its error on held-out data: {before:.3g} -> {after:.3g}"

    def _helpful(
        self,
        model: nn.Module,
        target: Mapping[str, Scheme | None],
        guard: Batches,
        found: list[_Scaled],
        kept: SavedTensors,
    ) -> tuple[list[_Scaled], str]:
        """(those under which the model stays nearer to itself on what was held out, what is to be told); they are
        applied, the others are not."""
        if not guard or not found:
            _scale(found, kept)
            return found, ""
        trial = HeldOutCheck(model, target, guard)
        runs, start = 1, trial.divergence()

        def keep(some: list[_Scaled], before: list[_Scaled], best: float) -> tuple[list[_Scaled], float]:
            """Those of ``some`` that help beside ``before``, under which the divergence is ``best``."""
            nonlocal runs
            if runs >= TRIALS:
                return [], best
            both = [one for one in found if one in before or one in some]
            _scale(both, kept)
            trial.forget(t for one in some for t in one.couple.tensors())
            runs, now = runs + 1, trial.divergence()
            if now < best:
                return some, now
            trial.forget(t for one in some for t in one.couple.tensors())
            if len(some) == 1:
                return [], best
            good: list[_Scaled] = []
            for half in (some[: len(some) // 2], some[len(some) // 2 :]):
                more, best = keep(half, [*before, *good], best)
                good += more
            return good, best

        good, best = keep(found, [], start)
        # What is gained together may be in spite of one of them: each is left out once, in groups where they are many
        count = min(len(good), TRIALS - runs) if len(good) > 1 else 0
        for group in [good[i::count] for i in range(count)]:
            rest = [one for one in good if one not in group]
            _scale(rest, kept)
            trial.forget(t for one in group for t in one.couple.tensors())
            without = trial.divergence()
            if without < best:
                good, best = rest, without
            trial.forget(t for one in group for t in one.couple.tensors())
        _scale(good, kept)
        told = f"{self.name} kept for {len(good)} of {len(found)} inputs"
        return good, f"{told}: held-out divergence of rounding to nearest {start:.3g} -> {best:.3g}"

    def _choose(self, couple: EqualizationPair, seen: ReaderInputs, target: Mapping[str, Scheme | None]) -> Scales:
        weights = torch.stack([r.view.double().abs().amax(0) for r in couple.readers]).amax(0)
        options = [(text, normalize_scales(s)) for text, s in self.candidates(couple, seen, weights)]
        if len(options) == 1:
            return options[0]
        found = [group_error(couple.readers, seen.tokens, couple.spread(s), target) for _, s in options]
        errors = all_reduce.reduce_sum(torch.tensor(found, dtype=torch.float64, device="cpu")).tolist()
        return options[min(range(len(errors)), key=errors.__getitem__)]


@dataclass(eq=False)
class _Scaled:
    """A couple and the scales chosen for it."""

    couple: EqualizationPair
    text: str
    scales: Tensor


def _scale(some: Sequence[_Scaled], kept: SavedTensors) -> None:
    """Those couples scaled, and no others: from the weights as they were, so that no rounding adds up."""
    kept.restore()
    for one in some:
        one.couple.apply(one.scales)


def normalize_scales(s: Tensor) -> Tensor:
    """Scales with a geometric mean of 1, 1 where nothing is known (dead channels), within [LEAST, MOST]."""
    good = s.isfinite() & (s > 0)
    if not good.any():
        return torch.ones_like(s)
    centre = s[good].log().mean().exp()
    return torch.where(good, (s / centre).clamp(LEAST, MOST), 1.0)


def group_error(readers: Sequence[Matrix], x: Tensor, s: Tensor, target: Mapping[str, Scheme | None]) -> float:
    """Sum over the readers that are going to be quantized of |Q(x / s) Q(W s)^T - x W^T|^2 / |x W^T|^2.

    x [T, K] float32, s [K] float64. Weights are rounded to nearest, inputs as the scheme says.
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


def collect_inputs(
    model: nn.Module, couples: Sequence[EqualizationPair], batches: Sequence[Any], samples: int
) -> dict[int, ReaderInputs]:
    """What the readers of each couple (by its number) see, in one run over the batches. Of all ranks, but for tokens,
    which are each rank's own. Raises ValueError for inputs that are not finite."""
    first = {id(c.readers[0].weight): str(i) for i, c in enumerate(couples)}
    share = -(-samples // max(1, len(batches)))
    found: dict[int, list[Tensor]] = {}
    counts: dict[int, int] = {}
    taken: dict[int, int] = {}

    def see(name: str, x: Tensor) -> None:
        i, x = int(name), x.flatten(0, 1)
        if not x.shape[0]:
            return
        if not bool(x.isfinite().all()):
            raise ValueError(f"{couples[i].readers[0].name}: its inputs on the calibration data are not all finite")
        largest, total = x.abs().amax(0), x.abs().double().sum(0)
        count = min(x.shape[0], max(0, share - taken.get(i, 0)))
        taken[i] = taken.get(i, 0) + count
        picked = x[torch.linspace(0, x.shape[0] - 1, count, dtype=torch.float32, device="cpu").round().long()].clone()
        counts[i] = counts.get(i, 0) + x.shape[0]
        if i in found:
            before = found[i]
            found[i] = [torch.maximum(before[0], largest), before[1] + total, *before[2:], picked]
        else:
            found[i] = [largest, total, picked]

    with inference_mode(model):
        for batch in batches:
            taken.clear()
            with InputHooks(first, see, token_mask(batch)):
                run_batch(model, batch)
    seen = {}
    for i, couple in enumerate(couples):
        weight, width = couple.readers[0].weight, couple.readers[0].width
        empty = torch.zeros(width, device=weight.device, dtype=torch.float32)
        peak, size, *tokens = found.get(i, [empty, empty.double()])
        count = all_reduce.reduce_sum(torch.tensor(float(counts.get(i, 0)), device=weight.device, dtype=torch.float32))
        peak, size = all_reduce.reduce_max(peak.double()), all_reduce.reduce_sum(size)
        if count > 0:
            seen[i] = ReaderInputs(peak, size / float(count), torch.cat(tokens) if tokens else empty.unsqueeze(0))
    return seen

"""Learned rounding block by block: trains codes and scales of one block at a time to match the float block's output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...core.tensor import AffineQuantizedTensor
from ...planning.config_resolution import PlanError
from ...planning.scheme import Scheme
from ..base import register
from ..calibration.activation_cache import ActivationCache, Rest, advance_block, capture_block_inputs, run_block
from ..calibration.batches import Batches, read
from ..calibration.block_order import CalibrationSegment, calibration_segments, inference_mode
from . import losses
from .distill import Learner, example_output, training_mode
from .trainable_qparams import Trainable, TrainableWeight, make_restore, trainable_parameters


@register("reconstruct")
@dataclass(frozen=True)
class Reconstruct(Learner):
    """Block reconstruction (BRECQ, Li et al. 2021; AutoRound, Cheng et al. 2023), from a solver's codes.

        minimise mean |B_q(x_q) - B(x)|^2 / |B(x)|^2 over codes, scales, offsets, norms and biases of block B

    x are the float model's hidden states before the block, x_q the quantized model's, so later blocks compensate for
    earlier ones. Codes are trained as in :class:`~.distill.Distill`; options are those of :class:`~.distill.Learner`.
    A block whose held-out error does not decrease is restored; all blocks are restored if the held-out divergence of
    the whole model does not decrease.

    Only for weights in a chain of blocks (see :mod:`pennyweight.algorithms.calibration.block_order`). Other weights,
    and weights shared by two blocks, are not changed. Cost: ``steps`` forward and backward passes of each block.
    Memory: five float32 copies of one block's weights, and two hidden states of every batch. Raises ValueError if the
    model is not a chain.
    """

    steps: int = 200
    rate: float = 2e-3
    codes: float = 1e-2

    def needs_memory(self) -> str:
        return ""

    def check(self, model: nn.Module, target: Mapping[str, Scheme | None], batches: Any) -> None:
        """Raises ValueError if the model is not a chain of blocks with weights that will be quantized."""
        super().check(model, target, batches)
        weights = {id(p): name for name, p in model.named_parameters() if name in target or _quantized(p)}
        with torch.inference_mode(False), inference_mode(model):
            self._chains(model, weights, read(batches))

    def _chains(self, model: nn.Module, weights: dict[int, str], batches: Batches) -> list[CalibrationSegment]:
        chains = [segment for segment in calibration_segments(model, weights, batches[0]) if segment.blocks]
        if not chains:
            raise PlanError(
                f"{self.name}: {type(model).__name__} is not a chain of blocks with quantized weights, so no block can "
                "run alone; use distill, which trains the whole model"
            )
        return chains

    def tune(self, model: nn.Module, teacher: nn.Module, batches: Any) -> dict[str, str]:
        batches = read(batches)
        quantized = {name for name, p in model.named_parameters() if _quantized(p)}
        weights = {id(p): name for name, p in teacher.named_parameters() if name in quantized}
        with torch.inference_mode(False), inference_mode(model), inference_mode(teacher):
            # of the float model: a quantized weight that is in a file is another object, packed, during each call
            chains = self._chains(teacher, weights, batches)
            guard = losses.split_batches(batches, self.held_out)[1]
            expected = losses.references(teacher, guard)
            measure = losses.divergence(None, example_output(teacher, guard[0]))
            before, restore = losses.mean_divergence(model, guard, expected, measure), make_restore(model)
            done = [helped for segment in chains for helped in self._chain(model, teacher, segment, batches)]
            after = losses.mean_divergence(model, guard, expected, measure)
            if not after < before:
                restore()
                return {"": f"reconstruction undone: held-out divergence {before:.3g} -> {after:.3g}"}
        outside = len(weights) - sum(len(names) for segment in chains for names in segment.sites)
        note = f"{sum(done)} of {len(done)} blocks reconstructed: held-out divergence {before:.3g} -> {after:.3g}"
        return {"": note + (f"; weights outside blocks, unchanged: {outside}" if outside else "")}

    def _chain(
        self, model: nn.Module, teacher: nn.Module, segment: CalibrationSegment, batches: Sequence[Any]
    ) -> Iterator[bool]:
        """For each block with trainable weights: whether training helped."""
        exact, hidden = ActivationCache(None, "float"), ActivationCache(None, "quantized")
        float_blocks = [block for _, block in segment.blocks]
        blocks = [model.get_submodule(name) for name, _ in segment.blocks]
        rest = capture_block_inputs(model, batches, blocks, hidden)
        exact_rest = capture_block_inputs(teacher, batches, float_blocks, exact)
        owners = Counter(id(p) for block in blocks for p in block.parameters())
        for b, (block, float_block) in enumerate(zip(blocks, float_blocks, strict=True)):
            advance_block(exact, range(len(batches)), b, float_block, exact_rest)
            trainables = [
                trainable
                for trainable in trainable_parameters(block, self.norms, float_block if self.codes else None)
                if owners[id(trainable.where[0].get())] == 1
            ]
            if any(isinstance(trainable, TrainableWeight) for trainable in trainables):
                yield self._block(block, b, trainables, batches, rest, hidden, exact)
            if b + 1 < len(float_blocks):
                advance_block(hidden, range(len(batches)), b, block, rest)

    def _block(
        self, block: nn.Module, b: int, trainables: list[Trainable], batches: Sequence[Any], rest: Rest,
        hidden: ActivationCache, exact: ActivationCache,
    ) -> bool:  # fmt: skip
        trained, guard = losses.split_batches(range(len(batches)), self.held_out)

        def error(i: int, state: dict[str, Tensor] | None = None) -> Tensor:
            return losses.squared_error(exact.get(i), run_block(block, hidden.get(i), rest(i, b), state), batches[i])

        def held_out() -> float:
            with torch.no_grad():
                return sum(float(error(i)) for i in guard) / len(guard)

        with training_mode(block):
            return self.fit(trainables, len(trained), lambda i, state: error(trained[i], state), held_out)[0]


def _quantized(p: Tensor) -> bool:
    return isinstance(p, AffineQuantizedTensor)

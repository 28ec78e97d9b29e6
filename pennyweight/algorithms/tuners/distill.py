"""Distillation: trains scales, offsets, norms, biases and codes of a quantized model to match the float outputs.
Neither the size nor the run-time work changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ...planning.scheme import Scheme
from ..base import Tuner, register
from ..calibration.batches import read
from ..calibration.block_order import inference_mode
from ..calibration.float32_products import products_in_float32, run_batch
from . import losses
from .trainable_qparams import Trainable, trainable_parameters


@dataclass(frozen=True)
class Learner(Tuner):
    """Adam over the trainable parameters of a quantized model; base class of "tune", "distill" and "reconstruct".

    steps, rate     of Adam for scales, offsets, norms and biases; cosine decay to zero
    batch           calibration batches per step
    codes           learning rate of the codes, in steps between values of the format; 0: fixed. See :class:`Distill`
    held_out        fraction of the batches that is held out; if their loss does not decrease, everything is restored
    norms           whether vectors (norm weights and biases) are trained
    """

    steps: int = 80
    rate: float = 2e-3
    batch: int = 1
    codes: float = 0.0
    held_out: float = 0.25
    norms: bool = True

    def fit(
        self, trainables: Sequence[Trainable], count: int, loss: Callable[[int, dict[str, Tensor]], Tensor],
        held_out: Callable[[], float],
    ) -> tuple[bool, float, float]:  # fmt: skip
        """(whether it helped, held-out loss before, after). Restores the parameters if it did not help.

        loss    (index of the batch, parameter values by name) -> loss
        """
        before = held_out()
        deltas = [d for trainable in trainables for d in trainable.deltas]
        rounding = [d for trainable in trainables for d in trainable.codes]
        groups = [{"params": d, "full": r} for d, r in ((deltas, self.rate), (rounding, self.codes)) if d]
        optimizer = torch.optim.Adam(groups, lr=0.0)
        deltas, order = deltas + rounding, shuffled_forever(count)
        for step in range(self.steps):
            for group in optimizer.param_groups:
                group["lr"] = group["full"] * (1 + math.cos(math.pi * step / self.steps)) / 2
            for i in islice(order, self.batch):
                state = {name: x for trainable in trainables for x in (trainable.value(),) for name in trainable.names}
                with products_in_float32(t.where[0].get() for t in trainables):
                    found = loss(i, state) / self.batch
                    grads = torch.autograd.grad(found, deltas, allow_unused=True)
                for delta, grad in zip(deltas, grads, strict=True):
                    if grad is not None:
                        delta.grad = grad if delta.grad is None else delta.grad + grad
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for trainable in trainables:
                trainable.store()
            after = held_out()
            if not after < before:
                for trainable in trainables:
                    trainable.restore()
        return after < before, before, after


@register("tune")
@dataclass(frozen=True)
class Tune(Learner):
    """Distillation into scales, offsets, norms and biases; codes are fixed (after Hinton et al. 2015).

        minimise mean KL(float || quantized) over s = s0 exp(a), offset o0 + b s0, gamma = g0 (1 + c), bias = b0 + d

    metric          see :mod:`pennyweight.algorithms.tuners.losses`; the other options are those of :class:`Learner`

    Scales that are quantized themselves are fixed. Activations are not quantized during training, also if the scheme
    quantizes them; the held-out loss is measured with them. Memory: the model in float32 with gradients, and up to 256
    MiB of the float model's outputs. Cost of a step: a forward and a backward pass of the quantized model, and a
    forward pass of the float model the first time a batch is used.
    """

    metric: str | None = None

    def check(self, model: nn.Module, target: Mapping[str, Scheme | None], batches: Any) -> None:
        """Raises ValueError for a metric that is unknown or does not fit the model's output."""
        super().check(model, target, batches)
        losses.divergence(self.metric, example_output(model, read(batches)[0]))

    def tune(self, model: nn.Module, teacher: nn.Module, batches: Any) -> dict[str, str]:
        return {"": self._run(model, teacher, batches)[1]}

    def _run(self, model: nn.Module, teacher: nn.Module, batches: Any) -> tuple[bool, str]:
        """(whether it helped, note for the report)."""
        batches = read(batches)
        trained, guard = losses.split_batches(batches, self.held_out)
        with torch.inference_mode(False), torch.enable_grad():
            expected = losses.references(teacher, guard)
            measure = losses.divergence(self.metric, example_output(teacher, guard[0]))
            trainables = list(trainable_parameters(model, self.norms, teacher if self.codes else None))
            if not any(trainable.deltas or trainable.codes for trainable in trainables):
                raise ValueError(
                    f"{self.name}: the model has no quantized weight with trainable scales (scales stored as plain "
                    "numbers)"
                )
            known = _TeacherOutputs(teacher, trained)

            def loss(i: int, state: dict[str, Tensor]) -> Tensor:
                output = torch.func.functional_call(model, state, *batch_arguments(trained[i]), tie_weights=False)
                return measure(known(i), losses.compared_tensor(output), trained[i])

            with training_mode(model):
                helped, before, after = self.fit(
                    trainables, len(trained), loss, lambda: losses.mean_divergence(model, guard, expected, measure)
                )
        if not helped:
            return False, f"tuning undone: held-out divergence {before:.3g} -> {after:.3g}"
        return True, f"tuned: held-out divergence {before:.3g} -> {after:.3g}"


KEPT = 2**28  # bytes of the float model's outputs


class _TeacherOutputs:
    """Outputs of the float model by batch, cached between epochs up to :data:`KEPT` bytes."""

    def __init__(self, teacher: nn.Module, batches: Sequence[Any]) -> None:
        self.teacher, self.batches, self.room = teacher, batches, KEPT
        self.outputs: dict[int, Tensor] = {}

    def __call__(self, i: int) -> Tensor:
        if i in self.outputs:
            return self.outputs[i]
        with inference_mode(self.teacher):
            output = losses.compared_tensor(run_batch(self.teacher, self.batches[i]))
        output = losses.finite(output, self.teacher, self.batches[i])
        if output.nbytes <= self.room:
            self.room -= output.nbytes
            self.outputs[i] = output
        return output


def shuffled_forever(n: int) -> Iterator[int]:
    """Indices 0 .. n-1, reshuffled for each epoch, endlessly."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield from torch.randperm(n, generator=generator, dtype=torch.int64, device="cpu").tolist()


def batch_arguments(batch: Any) -> tuple[Any, dict[str, Any]]:
    if isinstance(batch, dict) or hasattr(batch, "keys"):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def example_output(model: nn.Module, batch: Any) -> Any:
    """The complete output of a model; its type selects the default divergence."""
    with inference_mode(model):
        return run_batch(model, batch)


@contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode with gradients, without KV cache."""
    with inference_mode(model), torch.enable_grad():
        yield


@register("distill")
@dataclass(frozen=True)
class Distill(Tune):
    """Learned rounding: also trains the codes, to minimise the divergence of the whole model's outputs.

        code = nearest value to (v + c step),  dL/dc by the straight-through estimator

    v is the position of the float weight between the values (after GPTQ: at the border of its code's rounding cell); a
    code changes when c crosses the border. Rounding is learned by gradient as in AutoRound (Cheng et al. 2023), but
    starts from a solver's codes, uses Adam, and trains on the outputs of the model instead of a block. If this does not
    help (too little data to train codes) it is undone and only scales are tuned. Cost of a step: as :class:`Tune`;
    memory: five float32 copies of the weights.
    """

    steps: int = 300
    rate: float = 5e-4
    codes: float = 3e-3

    def tune(self, model: nn.Module, teacher: nn.Module, batches: Any) -> dict[str, str]:
        helped, note = self._run(model, teacher, batches)
        if helped:
            return {"": note}
        scales = Tune(rate=self.rate, batch=self.batch, held_out=self.held_out, norms=self.norms, metric=self.metric)
        return {"": f"codes: {note}; scales only: {scales._run(model, teacher, batches)[1]}"}

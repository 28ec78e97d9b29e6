"""Into low-precision training and back, and how weights that are quantized themselves are updated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from ...core.ops.inplace import stochastic_writes
from ...core.tensor import AffineQuantizedTensor
from ...quantize.pipeline import quantize_
from ...quantize.report import Report, Row
from .configs import Float8TrainingConfig, LowPrecisionTrainingConfig
from .layer import LowPrecisionLinear, restore_
from .recipes import Recipe


def convert_to_float8_training(
    model: nn.Module, *, module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    config: str | Recipe | LowPrecisionTrainingConfig | None = None,
) -> nn.Module:  # fmt: skip
    """Make linear layers train in float8, in place, and return the model.

    module_filter_fn(module, name) picks layers. config: the name of a recipe, a recipe, or a config; default
    "tensorwise". Raises PlanError where no layer can be converted; ``quantize_(model, Float8TrainingConfig(..))`` does
    the same and returns the report of what was converted and what not.
    """
    if not isinstance(config, LowPrecisionTrainingConfig):
        config = Float8TrainingConfig("tensorwise" if config is None else config)
    quantize_(model, config, module_filter_fn)
    return model


def to_high_precision_(model: nn.Module) -> Report:
    """The way back, in place: layers become nn.Linear again, trainable quantized weights the floats they stand for.

    Weights that are frozen and quantized are left alone. Parameters that were never quantized stay the same objects.
    """
    rows = []
    for name, module in model.named_modules():
        w = getattr(module, "weight", None)
        if isinstance(module, LowPrecisionLinear):
            was = module.recipe.name
            restore_(module)
        elif isinstance(module, nn.Linear) and isinstance(w, AffineQuantizedTensor) and w.requires_grad:
            was = str(w.spec)
            module.weight = nn.Parameter(w.dequantize().detach().contiguous())
        else:
            continue
        now: Tensor = module.weight
        before = int((now if w is None else w).nbytes)
        shape, dtype = tuple(now.shape), str(now.dtype).removeprefix("torch.")
        full = f"{name}.weight".lstrip(".")
        rows.append(Row(full, "Linear", shape, dtype, "", before, int(now.nbytes), None, f"was {was}"))
    return Report("to_high_precision_", rows, verb="back in high precision")


@contextmanager
def stochastic_rounding(step: int, seed: int = 0) -> Iterator[None]:
    """``with stochastic_rounding(step): optimizer.step()``: quantized parameters are rounded by chance when they are
    written, so that updates below half a step of their codes are not lost: the mean of many is right.

    Random numbers are a function of seed, of which write of the block it is, of the element, and of ``step``, the
    number of this training step: a resumed run that goes on counting repeats them, and there is no state to save.
    A forward and a backward pass may be inside: gradients are recorded as outside.
    """
    with stochastic_writes(step, seed):
        yield


__all__ = ["convert_to_float8_training", "stochastic_rounding", "to_high_precision_"]

"""Conversion to low-precision training and back, and stochastic rounding of quantized weight updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from ...core.model_arguments import check_arguments
from ...core.ops.inplace import stochastic_writes
from ...core.tensor import AffineQuantizedTensor
from ...planning.quantize_report import Report, Row
from ...quantize.pipeline import quantize_
from .configs import Float8TrainingConfig, LowPrecisionTrainingConfig
from .linear import LowPrecisionLinear, restore_
from .recipes import Recipe


@check_arguments()
def convert_to_float8_training(
    model: nn.Module, *, module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    config: str | Recipe | LowPrecisionTrainingConfig | None = None,
) -> nn.Module:  # fmt: skip
    """Convert linear layers in place to float8 training, and return the model.

    module_filter_fn(module, name) selects layers. config: name of a recipe, a recipe, or a config; default
    "tensorwise". Raises PlanError if no layer can be converted. ``quantize_(model, Float8TrainingConfig(..))`` does the
    same and returns a report of the converted and the other layers.
    """
    if not isinstance(config, LowPrecisionTrainingConfig):
        config = Float8TrainingConfig("tensorwise" if config is None else config)
    quantize_(model, config, module_filter_fn)
    return model


@check_arguments()
def to_high_precision_(model: nn.Module) -> Report:
    """Undo the conversion in place: layers become nn.Linear again, trainable quantized weights are dequantized.

    Frozen quantized weights are not changed. Parameters that were never quantized remain the same objects.
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
    return Report("to_high_precision_", rows, verb="restored to high precision")


@contextmanager
def stochastic_rounding(step: int, seed: int = 0) -> Iterator[None]:
    """``with stochastic_rounding(step): optimizer.step()``: writes to quantized parameters are rounded stochastically,
    which is unbiased, so that updates below half a code step are not lost.

    Random numbers are a function of ``seed``, ``step`` (the number of the training step), the index of the write within
    the with block, and the element. A resumed run with the same step count repeats them; there is no state to save.
    Forward and backward passes may be inside; autograd works as usual.
    """
    with stochastic_writes(step, seed):
        yield

"""torchao.prototype.quantized_training: the config of products in int8, which torchtune trains with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pennyweight import training
from pennyweight.planning.module_handlers import HANDLERS, PREVIEWS, register_quantize_module_handler
from pennyweight.training.low_precision.configs import LEAST

__all__ = ["Int8MixedPrecisionTrainingConfig", "int8_mixed_precision_training"]


@dataclass(frozen=True, init=False)
class Int8MixedPrecisionTrainingConfig(training.Int8MixedPrecisionTrainingConfig):
    """Each of the three products in int8, or in high precision if its flag is False; torchao's order of arguments.

    ``quantize_`` converts the layer whatever ``module_swap`` says. output: also a config, whose copy is made, as the
    first argument of torchao 0.9.
    """

    def __init__(
        self, output: Any = True, grad_input: bool = True, grad_weight: bool = True, module_swap: bool = True, *,
        recipe: Any = "int8", least: int = LEAST, config: Any = None,
    ) -> None:  # fmt: skip
        config = output if isinstance(output, training.Int8MixedPrecisionTrainingConfig) else config
        if config is not None:
            output, grad_input, grad_weight = config.output, config.grad_input, config.grad_weight
            recipe, least = config.recipe, config.least
        values = {
            "output": output, "grad_input": grad_input, "grad_weight": grad_weight, "module_swap": module_swap,
            "recipe": recipe, "least": least,
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)  # of a frozen dataclass, while it is made
        self.__post_init__()


_OURS = training.Int8MixedPrecisionTrainingConfig
register_quantize_module_handler(Int8MixedPrecisionTrainingConfig, tells=PREVIEWS[_OURS])(HANDLERS[_OURS])
int8_mixed_precision_training = Int8MixedPrecisionTrainingConfig

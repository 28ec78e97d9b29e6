"""torchao.float8.float8_linear: linear layers of float8 training, and the conversion of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from pennyweight.training import LowPrecisionLinear

from .config import Float8LinearConfig, Float8LinearRecipeName, ScalingType

__all__ = [
    "Float8Linear", "_auto_filter_for_recipe", "_auto_filter_for_rowwise", "_auto_filter_for_tensorwise",
    "convert_to_float8_training", "precompute_float8_dynamic_scale_for_fsdp", "swap_linear_layers",
]  # fmt: skip


class Float8Linear(LowPrecisionLinear):
    """nn.Linear whose three products are computed in float8; ``config`` has the casts."""

    config: Float8LinearConfig

    def __init__(self, *args: Any, config: Float8LinearConfig, **kwargs: Any) -> None:
        super().__init__(*args, recipe=config.recipe(), **kwargs)
        self.config = config

    @classmethod
    def from_float(cls, mod: nn.Linear, config: Float8LinearConfig | None = None) -> Float8Linear:
        """A layer with the parameters of ``mod``, which are shared."""
        made = cls(mod.in_features, mod.out_features, False, config=config or Float8LinearConfig(), device="meta")
        made.weight, made.bias = mod.weight, mod.bias
        return made.train(mod.training)

    @property
    def scaling_type_input(self) -> ScalingType:
        return self.config.cast_config_input.scaling_type

    @property
    def scaling_type_weight(self) -> ScalingType:
        return self.config.cast_config_weight.scaling_type

    @property
    def scaling_type_grad_output(self) -> ScalingType:
        return self.config.cast_config_grad_output.scaling_type

    def extra_repr(self) -> str:
        c = self.config
        casts = {"i": c.cast_config_input, "w": c.cast_config_weight, "go": c.cast_config_grad_output}
        for short, first, other in (
            ("i_gw", "i", c.cast_config_input_for_grad_weight), ("w_gi", "w", c.cast_config_weight_for_grad_input),
            ("go_gw", "go", c.cast_config_grad_output_for_grad_weight),
        ):  # fmt: skip
            if other is not None and other != casts[first]:
                casts[short] = other
        listed = ",".join(f"{short}:{cast.short_str()}" for short, cast in casts.items())
        return f'{nn.Linear.extra_repr(self)}, cast_configs={listed}"'  # with torchao's closing quote


def swap_linear_layers(
    module: nn.Module, from_float_func: Callable[[nn.Linear], nn.Linear], *,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> nn.Module:  # fmt: skip
    """Replace linear layers, which ``module_filter_fn(layer, name)`` may select, by ``from_float_func(layer)``; returns
    the model. The filter sees linear layers only. A model that is one linear layer is not changed: its replacement is
    returned. Raises AssertionError if that one has children."""

    def wanted(layer: nn.Module, name: str) -> bool:
        return isinstance(layer, nn.Linear) and (module_filter_fn is None or module_filter_fn(layer, name))

    if wanted(module, ""):
        if next(module.children(), None) is not None:
            raise AssertionError(f"Does not support a root nn.Linear with children: {module}")
        return from_float_func(module)  # type: ignore[arg-type]
    names = [name for name, _ in module.named_modules() if name]
    for name in reversed(names):  # children before their parents
        layer = module.get_submodule(name)
        if wanted(layer, name):
            parent, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(parent), attribute, from_float_func(layer))  # type: ignore[arg-type]
    return module


def convert_to_float8_training(
    module: nn.Module, *, module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    config: Float8LinearConfig | None = None,
) -> nn.Module:  # fmt: skip
    """As in torchao: every selected linear layer, of any size, becomes a Float8Linear; the model is returned.

    ``pennyweight.training.convert_to_float8_training`` leaves layers alone for which float8 does not pay, and raises if
    no layer remains.
    """
    how = config or Float8LinearConfig()
    return swap_linear_layers(
        module, lambda layer: Float8Linear.from_float(layer, how), module_filter_fn=module_filter_fn
    )


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """No-op: there is no float8 all-gather whose scales could be precomputed."""


# -- filters -----------------------------------------------------------------------------------------------------------


def _auto_filter_for_recipe(
    recipe: str | Float8LinearRecipeName, filter_fqns: Sequence[str]
) -> Callable[[nn.Module, str], bool]:
    """torchao's choice of layers that are large enough for float8 on an H100, without those whose name contains one of
    ``filter_fqns``. Raises ValueError for another recipe, NotImplementedError for rowwise_with_gw_hp."""
    name = Float8LinearRecipeName(recipe)
    if name is Float8LinearRecipeName.ROWWISE_WITH_GW_HP:
        raise NotImplementedError(f"Unsupported recipe: {name}")
    chosen = _auto_filter_for_tensorwise if name is Float8LinearRecipeName.TENSORWISE else _auto_filter_for_rowwise
    return partial(chosen, filter_fqns=filter_fqns)


def _eligible(mod: nn.Module, fqn: str, filter_fqns: Sequence[str]) -> bool:
    if not isinstance(mod, nn.Linear) or any(part in fqn for part in filter_fqns):
        return False
    return all(size % 16 == 0 for size in mod.weight.shape)  # what float8 matrix units of GPUs need


def _auto_filter_for_rowwise(mod: nn.Module, fqn: str, filter_fqns: Sequence[str]) -> bool:
    if not _eligible(mod, fqn, filter_fqns):
        return False
    n, k = mod.weight.shape  # type: ignore[union-attr]
    return n > 2048 and k > 1024 and (n > 4096 or k > 2048)


def _auto_filter_for_tensorwise(mod: nn.Module, fqn: str, filter_fqns: Sequence[str]) -> bool:
    if not _eligible(mod, fqn, filter_fqns):
        return False
    n, k = mod.weight.shape  # type: ignore[union-attr]
    return k > 4096 or n > 1024

"""SmoothQuant of torchao before 0.14: observers inserted into the model, recipes in files, int8 weights and inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ....core.formats import INT8
from ....core.spec import ActivationSpec, QuantSpec
from ....planning.configs.integer import INT8_EPS
from ..legacy_weights import WeightTensorWithLinearActivationScaleMetadata
from ..linear_modules import _replace_with_custom_fn_if_matches_filter
from ..v0_8_aqt import to_affine_quantized_intx_static
from .quantized_layers import quantized_linear
from .smooth_observers import SmoothQuantObservedLinear, SmoothQuantObserver

__all__ = ["insert_smooth_quant_observer_", "load_smooth_quant_recipe", "save_smooth_quant_recipe"]

PER_TOKEN = QuantSpec(INT8, (-1,))  # scale = absmax / 127: codes -127..127


def insert_smooth_quant_observer_(model: nn.Module, alpha: float | None = 0.5, quant_mode: str = "dynamic") -> None:
    """Replace each linear layer by one with an observer. ``alpha`` None: no smoothing."""

    def observe(layer: Any) -> nn.Module:
        eps = torch.finfo(torch.float32).eps
        observer: Any = SmoothQuantObserver
        return SmoothQuantObservedLinear.from_float(
            layer, observer(layer.weight, alpha, quant_mode, quant_min=-127, quant_max=127, eps=eps)
        )

    _replace_with_custom_fn_if_matches_filter(model, observe, lambda module, _: isinstance(module, nn.Linear))


def convert_recipe(layer: Any, factor: Tensor | None, act_scale: Tensor | None, scales: Tensor | None) -> nn.Module:
    """The int8 linear layer of an observed one; without a factor and scales of the weight, with the observer's.

    act_scale  None: inputs are quantized per token as they come
    """
    if factor is None or scales is None:
        if not hasattr(layer, "obs"):
            raise ValueError(
                "SmoothQuantConfig() quantizes layers that insert_smooth_quant_observer_ has replaced; pass lambda "
                "module, name: isinstance(module, SmoothQuantObservedLinear) as filter_fn"
            )
        factor, act_scale, scales = layer.obs.calculate_qparams()
    assert factor is not None
    assert scales is not None
    w = layer.weight.detach()
    w = (w * factor.to(w.device)).to(w.dtype)
    zeros = torch.zeros_like(scales, dtype=torch.int64)
    q = to_affine_quantized_intx_static(w, scales, zeros, (1, w.shape[1]), torch.int8)
    if act_scale is None:
        q = q.with_(act=ActivationSpec(PER_TOKEN, "dynamic", "absmax", INT8_EPS))
    else:
        act = ActivationSpec(QuantSpec(INT8, None), "static")
        q = q.with_(act=act, act_scale=act_scale.detach().float().reshape(1))
    return quantized_linear(layer, WeightTensorWithLinearActivationScaleMetadata(q, factor.to(w.dtype).to(w.device)))


def save_smooth_quant_recipe(model: nn.Module, save_path: Any) -> None:
    """Save ``NAME.smoothing_factor``, ``.act_scales`` and ``.wei_scales`` of each observed layer with torch.save."""
    recipe: dict[str, Tensor | None] = {}
    for name, layer in _observed(model):
        found = layer.obs.calculate_qparams()
        for key, value in zip(("smoothing_factor", "act_scales", "wei_scales"), found, strict=True):
            recipe[f"{name}.{key}"] = value
    torch.save(recipe, save_path)


def load_smooth_quant_recipe(model: nn.Module, recipe_path: Any, device: Any = None) -> None:
    """Quantize the observed layers that a recipe names, in place; the others stay. ``device``: move observed layers."""
    recipe = torch.load(recipe_path, weights_only=True)
    for name, layer in _observed(model):
        if device is not None:
            layer.to(device)
        factor, act_scale, scales = (
            recipe.get(f"{name}.{key}") for key in ("smoothing_factor", "act_scales", "wei_scales")
        )
        if factor is not None and scales is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, convert_recipe(layer, factor, act_scale, scales))


def _observed(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, m) for name, m in model.named_modules() if name and isinstance(m, SmoothQuantObservedLinear)]

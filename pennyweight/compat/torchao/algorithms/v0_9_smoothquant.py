"""SmoothQuant of torchao before 0.14: observers inserted into the model, recipes in files, int8 weights and inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ....core.formats import INT8
from ....core.spec import ActivationSpec, QuantSpec
from ....planning.configs.integer import INT8_EPS
from ....planning.granularity import MappingType, PerAxis
from ..legacy_weights import WeightTensorWithLinearActivationScaleMetadata
from ..linear_modules import _replace_with_custom_fn_if_matches_filter
from ..observers import AffineQuantizedMinMaxObserver
from ..v0_8_aqt import to_affine_quantized_intx_static
from .pre_scaled import quantized_linear

__all__ = ["insert_smooth_quant_observer_", "load_smooth_quant_recipe", "save_smooth_quant_recipe", "smooth_quant"]

PER_TOKEN = QuantSpec(INT8, (-1,))  # scale = absmax / 127: codes -127..127


class RecipeObserver(nn.Module):
    """Records the range of each channel of the inputs.

        s_j = (max|x_j| + eps)^alpha / (max|W_j| + eps)^(1 - alpha)

    quant_mode  "static": also the scale of the whole smoothed input, its largest magnitude / 127; "dynamic": none
    """

    def __init__(
        self, weight: Tensor, alpha: float | None = 0.5, quant_mode: str = "static", quant_min: int | None = None,
        quant_max: int | None = None, eps: float | None = None,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        assert weight.ndim == 2, f"the weight must have 2 axes, got {list(weight.shape)}"
        assert quant_mode in ("static", "dynamic"), f'quant_mode must be "static" or "dynamic", got {quant_mode!r}'
        self.weight, self.alpha, self.device, self.quant_mode = weight, alpha, weight.device, quant_mode
        self.quant_min, self.quant_max = quant_min, quant_max
        self.eps = torch.finfo(torch.float32).eps if eps is None else eps
        self.inputs: list[Tensor] = []

        def observer(axis: int, low: int | None = None, high: int | None = None) -> AffineQuantizedMinMaxObserver:
            return AffineQuantizedMinMaxObserver(
                MappingType.SYMMETRIC, torch.int8, PerAxis(axis), quant_min=low, quant_max=high, eps=self.eps
            )

        self.act_ic_obs, self.wei_ic_obs = observer(-1), observer(-1)
        self.wei_oc_obs = observer(0, quant_min, quant_max)
        self.wei_ic_obs(weight.detach())

    @torch.no_grad()
    def forward(self, input: Tensor) -> Tensor:
        self.act_ic_obs(input.detach().reshape(-1, input.shape[-1]).cpu())
        return input

    @torch.no_grad()
    def calculate_qparams(self, weight_quant_kwargs: Any = None) -> tuple[Tensor, Tensor | None, Tensor]:
        """(smoothing factor [K], scale of the activation or None, scales of the smoothed weight [N]).

        Raises AssertionError without inputs.
        """
        assert hasattr(self.act_ic_obs, "min_val"), "calibrate observer first by running model on exemplar data"
        low, high = self.act_ic_obs.min_val, self.act_ic_obs.max_val
        x_most = torch.maximum(low.abs(), high.abs()) + self.eps
        w_most = torch.maximum(self.wei_ic_obs.min_val.abs(), self.wei_ic_obs.max_val.abs()).cpu() + self.eps
        s = torch.ones_like(x_most) if self.alpha is None else x_most**self.alpha / w_most ** (1 - self.alpha)
        act_scale = None
        if self.quant_mode == "static":
            least, most = (-127, 127) if self.quant_min is None else (self.quant_min, self.quant_max)
            reach = torch.maximum(-(low / s).min(), (high / s).max()).clamp(min=0)
            act_scale = (reach / (float(most - least) / 2)).to(self.device)  # type: ignore[operator]
        s = s.to(self.device)
        self.wei_oc_obs(self.weight.detach() * s)
        scales, _ = self.wei_oc_obs.calculate_qparams()
        return s, act_scale, scales.to(self.device)


def insert_smooth_quant_observer_(model: nn.Module, alpha: float | None = 0.5, quant_mode: str = "dynamic") -> None:
    """Replace each linear layer by one with an observer. ``alpha`` None: no smoothing."""
    from .smoothquant import SmoothQuantObservedLinear, SmoothQuantObserver

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


def smooth_quant(
    smoothing_factor: Tensor | None = None, act_scales: Tensor | None = None, wei_scales: Tensor | None = None
) -> Any:
    """torchao 0.9's name of ``SmoothQuantConfig(smoothing_factor, act_scales, wei_scales)``."""
    from .smoothquant import SmoothQuantConfig

    return SmoothQuantConfig(smoothing_factor=smoothing_factor, act_scales=act_scales, wei_scales=wei_scales)


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
    from .smoothquant import SmoothQuantObservedLinear

    return [(name, m) for name, m in model.named_modules() if name and isinstance(m, SmoothQuantObservedLinear)]

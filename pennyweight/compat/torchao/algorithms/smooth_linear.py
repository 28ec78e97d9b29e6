"""torchao.quantization.smoothquant (0.1 to 0.15): SmoothQuant by module swap, int8 weights and inputs.

swap_linear_with_smooth_fq_linear(model);  model(batch) ...;  smooth_fq_linear_to_inference(model)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..int8_matmul import dynamically_quantize_per_channel, quant_int8_dynamic_per_token_linear

__all__ = [
    "SmoothFakeDynQuantMixin", "SmoothFakeDynamicallyQuantizedLinear", "get_scale", "set_smooth_fq_attribute",
    "smooth_fq_linear_to_inference", "source_cls_to_target_cls", "swap_linear_with_smooth_fq_linear",
]  # fmt: skip


def get_scale(X_absmax: Tensor, W_absmax: Tensor, alpha: float = 0.5) -> Tensor:
    """max|x_j|^alpha / max|W_j|^(1 - alpha) of each channel, [K]."""
    return (torch.pow(X_absmax, alpha) / torch.pow(W_absmax, 1.0 - alpha)).reshape(-1)


class SmoothFakeDynQuantMixin(nn.Module):
    """Records the largest magnitude of each input channel, and folds the smoothing factors into int8 weights.

    calibrating         whether inputs are recorded
    debug_skip_scaling  do not smooth: plain int8
    store_w_int_repr_t  keep the codes transposed; set it before ``to_inference``
    """

    calibrating: bool
    x_running_abs_max: Tensor | None
    smooth_scale: Tensor | None
    W_int_repr: Tensor
    W_scales: Tensor
    weight: Tensor

    def init_smoothquant_variables(self, alpha: float) -> None:
        self.calibrating, self.x_running_abs_max, self.alpha = True, None, alpha
        self.register_buffer("smooth_scale", None)
        self.debug_skip_scaling = self.store_w_int_repr_t = False

    def update_x_running_abs_max(self, X: Tensor) -> None:
        most = X.detach().abs().reshape(-1, X.shape[-1]).amax(0)
        seen = self.x_running_abs_max
        self.x_running_abs_max = most if seen is None else torch.maximum(most, seen)

    def get_scaled_quantized_w(self) -> tuple[Tensor, Tensor, Tensor]:
        """int8 codes [N, K], scales [N] and zero points [N] of the smoothed weight."""
        assert self.smooth_scale is not None, "self.smooth_scale is None, did you turn on inference?"
        w = self.weight.detach()
        w = w if self.debug_skip_scaling else w * self.smooth_scale
        codes, scales, zeros = dynamically_quantize_per_channel(w, -128, 127, torch.int8)
        return codes.contiguous(), scales, zeros

    def fold_weight(self) -> None:
        """Replace ``weight`` by the buffer ``W_int_repr`` and ``W_scales``."""
        codes, self.W_scales, _ = self.get_scaled_quantized_w()
        self.register_buffer("W_int_repr", codes.t().contiguous() if self.store_w_int_repr_t else codes)
        del self.weight

    def to_inference(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define to_inference()")

    def set_debug_x_absmax(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define set_debug_x_absmax()")


class SmoothFakeDynamicallyQuantizedLinear(SmoothFakeDynQuantMixin, nn.Linear):  # type: ignore[misc]
    """A float linear layer while it calibrates; then int8 weights per row times int8 inputs per token."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        alpha = kwargs.pop("alpha")
        super().__init__(*args, **kwargs)
        self.init_smoothquant_variables(alpha)

    def forward(self, X: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.calibrating:
            self.update_x_running_abs_max(X)
            return F.linear(X, self.weight, self.bias)
        x = X if self.debug_skip_scaling else X / self.smooth_scale
        w = self.W_int_repr if self.store_w_int_repr_t else self.W_int_repr.t()
        return quant_int8_dynamic_per_token_linear(x, w, self.W_scales, self.bias, x.dtype)

    @classmethod
    def from_float(cls, mod: nn.Linear, alpha: float = 0.5) -> SmoothFakeDynamicallyQuantizedLinear:
        """A layer with the parameters of ``mod``, calibrating."""
        new = cls(mod.in_features, mod.out_features, bias=False, alpha=alpha, device="meta", dtype=mod.weight.dtype)
        new.weight, new.bias = mod.weight, mod.bias
        return new.train(mod.training)

    def to_inference(self) -> None:
        """Stop calibrating and quantize the weight. Raises AssertionError without calibration data."""
        assert self.x_running_abs_max is not None, "no calibration data found"
        self.calibrating = False
        self.smooth_scale = get_scale(self.x_running_abs_max, self.weight.detach().abs().amax(0), self.alpha)
        self.fold_weight()

    def set_debug_x_absmax(self) -> None:
        """As if the inputs had the weight's range: the scale is one for alpha 0.5."""
        self.x_running_abs_max = self.weight.detach().abs().amax(0)


source_cls_to_target_cls: dict[type[nn.Module], Any] = {
    nn.Linear: SmoothFakeDynamicallyQuantizedLinear,
    nn.modules.linear.NonDynamicallyQuantizableLinear: SmoothFakeDynamicallyQuantizedLinear,
}


def swap_linear_with_smooth_fq_linear(
    model: nn.Module, skip_fqn_list: Collection[str] | None = None, cur_fqn: str = "", alpha: float = 0.5
) -> None:
    """Replace the linear layers in place, except those named in ``skip_fqn_list``; names start with ``cur_fqn``."""
    for name, child in list(model.named_children()):
        fqn = f"{cur_fqn}.{name}" if cur_fqn else name
        target = source_cls_to_target_cls.get(type(child))
        if target is not None and fqn not in (skip_fqn_list or ()):
            setattr(model, name, target.from_float(child, alpha=alpha))
        else:
            swap_linear_with_smooth_fq_linear(child, skip_fqn_list, fqn, alpha)


def _smooth_layers(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, tuple(source_cls_to_target_cls.values()))]


def smooth_fq_linear_to_inference(model: nn.Module, debug_skip_calibration: bool = False) -> None:
    """``to_inference()`` of each swapped layer; ``debug_skip_calibration``: without data, for measuring speed."""
    for layer in _smooth_layers(model):
        if debug_skip_calibration:
            layer.set_debug_x_absmax()
        layer.to_inference()


def set_smooth_fq_attribute(model: nn.Module, attribute_name: str, new_attribute_val: Any) -> None:
    """Set an attribute of all swapped layers that have it."""
    for layer in _smooth_layers(model):
        if hasattr(layer, attribute_name):
            setattr(layer, attribute_name, new_attribute_val)

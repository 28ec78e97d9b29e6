"""torchao.quantization.quant_api: ``quantize_`` and related functions, over ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.planning import config_resolution, module_handlers
from pennyweight.planning.configs import AOBaseConfig, FqnToConfig
from pennyweight.planning.parameters import is_linear
from pennyweight.planning.quantize_report import Report
from pennyweight.quantize.pipeline import quantize_ as _quantize_

from . import attributes
from .configs.assignment import snapshot
from .linear_modules import Filter, _is_linear, _replace_with_custom_fn_if_matches_filter

__all__ = [
    "_is_linear", "_replace_with_custom_fn_if_matches_filter", "fqn_matches_fqn_config",
    "quantize_", "register_quantize_module_handler", "swap_conv2d_1x1_to_linear",
]  # fmt: skip
assert attributes.ATTRIBUTES  # attaches torchao's attributes to quantized weights

register_quantize_module_handler = module_handlers.register_quantize_module_handler


def quantize_(
    model: nn.Module, config: AOBaseConfig | Callable[[nn.Module], nn.Module] | None = None,
    filter_fn: Filter | None = _is_linear, set_inductor_config: bool | None = None,
    device: torch.device | str | None = None, *, apply_tensor_subclass: Callable[[nn.Module], nn.Module] | None = None,
    **kwargs: Any,
) -> Report | None:  # fmt: skip
    """Like :func:`pennyweight.quantize_`, with torchao's arguments of every release. Returns our report.

    filter_fn              None, or its default, with FqnToConfig, which selects layers by name
    set_inductor_config    accepted and ignored: no process-wide setting is changed
    apply_tensor_subclass  0.8's name of ``config``

    A filter that matches nothing leaves the model unchanged and returns None, as in torchao; ours alone raises an
    error.
    """
    if isinstance(set_inductor_config, (str, torch.device)):  # the fourth argument is the device, since 0.10
        set_inductor_config, device = None, set_inductor_config
    config = apply_tensor_subclass if config is None else config
    if isinstance(config, type) and issubclass(config, AOBaseConfig):
        config = config()
    if config is None or not (isinstance(config, AOBaseConfig) or callable(config)):
        raise TypeError(f"quantize_ needs a config such as Int8WeightOnlyConfig(), got {config!r}")
    config = snapshot(config)
    if isinstance(config, FqnToConfig):
        if filter_fn not in (None, _is_linear, is_linear):
            raise ValueError("FqnToConfig selects layers by name; omit filter_fn")
        report = _quantize_(model, config, None, device, **kwargs)
        _show_weights(model)
        return report
    chosen = filter_fn if filter_fn is not None else _is_linear
    if not any(chosen(module, name) for name, module in model.named_modules()):
        return None
    report = _quantize_(model, config, chosen, device, **kwargs)
    _show_weights(model)
    return report


def _show_weights(model: nn.Module) -> None:
    """Let the repr of quantized linear layers include their weight's."""
    for module in model.modules():
        if type(module) is nn.Linear and isinstance(module.weight, AffineQuantizedTensor):
            module.extra_repr = _ExtraRepr(module)  # type: ignore[method-assign]


class _ExtraRepr:
    """extra_repr of a linear layer that includes its weight, as in torchao. A class, so that layers can be pickled."""

    def __init__(self, module: nn.Linear) -> None:
        self.module = module

    def __call__(self) -> str:
        m = self.module
        dequantized = type(m.weight) in (torch.Tensor, nn.Parameter)
        weight = "" if dequantized else f", weight={m.weight}"
        return f"in_features={m.in_features}, out_features={m.out_features}, bias={m.bias is not None}{weight}"


def fqn_matches_fqn_config(fqn: str, config: FqnToConfig) -> bool:
    """Whether a key of the config is this name, or a ``re:`` key matches all of it."""
    return any(key != "_default" and config_resolution._matches(key, fqn) for key in config.fqn_to_config)


class _Permuted(nn.Module):
    """A linear layer over the channels of [B, C, H, W]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.mod = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.mod(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def swap_conv2d_1x1_to_linear(model: nn.Module, filter_fn: Filter | None = None) -> None:
    """Replace by a linear layer each 1x1 convolution of stride one, without groups, padding or dilation."""

    def pick(m: nn.Module, fqn: str) -> bool:
        if not isinstance(m, nn.Conv2d) or (filter_fn is not None and not filter_fn(m, fqn)):
            return False
        one = (1, 1)
        return m.kernel_size == one and m.stride == one and m.groups == 1 and m.padding in ((0, 0), 0, "valid")

    def swap(conv: Any) -> nn.Module:
        linear = nn.Linear(conv.in_channels, conv.out_channels, conv.bias is not None, device="meta")
        linear.weight = nn.Parameter(conv.weight.squeeze(-1, -2).clone(), conv.weight.requires_grad)
        linear.bias = conv.bias
        return _Permuted(linear)

    _replace_with_custom_fn_if_matches_filter(model, swap, pick)

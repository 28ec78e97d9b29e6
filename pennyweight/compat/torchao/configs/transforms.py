"""torchao's functions for one layer or one tensor and a config, behind its ``quantize_``; the table of handlers.

``_QUANTIZE_CONFIG_HANDLER[type(config)](module, config)`` quantizes one module. torchao has a function per config for
that, ``_int8_weight_only_transform(module, config)``, and for one tensor,
``_int8_weight_only_quantize_tensor(weight, config)``. Here a config plans its own scheme, so all of them are one
function under many names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from ....core.tensor import AffineQuantizedTensor
from ....planning.configs import AOBaseConfig, FqnToConfig
from ....planning.granularity import MappingType
from ....planning.module_handlers import HANDLERS
from ....quantize.pipeline import quantize_
from ..enums import ZeroPointDomain
from ..linear_modules import Filter
from ..v0_8_aqt import _int8_symm_per_token_reduced_range_quant, _per_token, to_affine_quantized_intx
from ..v0_8_layouts import Int4CPULayout, Int4XPULayout, MarlinSparseLayout, TensorCoreTiledLayout

Handler = Callable[..., nn.Module]

_OF_MODULES = (
    "_float8_dynamic_activation_float8_weight_transform", "_float8_dynamic_activation_int4_weight_transform",
    "_float8_static_activation_float8_weight_transform", "_float8_weight_only_transform", "_fpx_weight_only_transform",
    "_gemlite_uintx_weight_only_transform", "_int4_dynamic_activation_int4_weight_transform",
    "_int4_weight_only_transform", "_int8_dynamic_activation_int4_weight_transform",
    "_int8_dynamic_activation_int8_weight_transform", "_int8_dynamic_activation_intx_weight_transform",
    "_int8_static_activation_int8_weight_transform", "_int8_weight_only_transform", "_intx_weight_only_transform",
    "_uintx_weight_only_transform",
)  # fmt: skip
_OF_TENSORS = (
    "_float8_dynamic_activation_float8_weight_quantize_tensor", "_float8_weight_only_quant_tensor",
    "_int4_weight_only_quantize_tensor", "_int8_dynamic_activation_int8_weight_quantize_tensor",
    "_int8_dynamic_activation_intx_weight_quantize_tensor", "_int8_weight_only_quantize_tensor",
    "_intx_weight_only_quantize_tensor",
)  # fmt: skip
__all__ = [
    "LAYOUT_TO_PRESERVE_ZEROS", "LAYOUT_TO_ZERO_POINT_DOMAIN", "_QUANTIZE_CONFIG_HANDLER", "_embedding_extra_repr",
    "_fp8_mm_compat", "_get_linear_subclass_inserter", "_get_subclass_inserter", "_in_features_greater_than_16",
    "_int8_symm_per_token_quant", "_int8_symm_per_token_reduced_range_quant_noop_decode", "_linear_extra_repr",
    "_module_extra_repr", "_quantization_type", "_replace_with_custom_fn_if_matches_filter_with_name",
    "_uint8_asymm_per_token_quant",
]  # fmt: skip
__all__.extend(_OF_MODULES + _OF_TENSORS)


# -- one module, one tensor --------------------------------------------------------------------------------------------


def _transform(module: nn.Module, config: AOBaseConfig, *, parameter_name: str = "weight") -> nn.Module:
    """Quantize one parameter of a module in place; returns the module. Raises AttributeError if it has none of that
    name, and what ``quantize_`` raises."""
    if not isinstance(getattr(module, parameter_name, None), Tensor):
        raise AttributeError(f"{type(module).__name__} has no parameter {parameter_name!r} to quantize")
    if parameter_name == "weight":
        quantize_(module, config, lambda m, name: m is module)
    else:
        quantize_(module, FqnToConfig({parameter_name: config}))
    return module


def _quantize_tensor(weight: Tensor, config: AOBaseConfig, **names: Any) -> Tensor:
    """A weight [out, in] quantized as a linear layer's would be; the weight given is left alone."""
    layer = nn.Linear(weight.shape[-1], weight.shape[-2], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return _transform(layer, config).weight.data


globals().update(dict.fromkeys(_OF_MODULES, _transform) | dict.fromkeys(_OF_TENSORS, _quantize_tensor))


class _Handlers(MutableMapping[type, Handler]):
    """Config class -> function over a module and a config: a registered one, or the one for configs of this library."""

    def __getitem__(self, key: type) -> Handler:
        if key in HANDLERS:
            return HANDLERS[key]
        if isinstance(key, type) and issubclass(key, AOBaseConfig) and key.scheme is not AOBaseConfig.scheme:
            return _transform
        raise KeyError(key)

    def __setitem__(self, key: type, handler: Handler) -> None:
        HANDLERS[key] = handler

    def __delitem__(self, key: type) -> None:
        del HANDLERS[key]

    def __iter__(self) -> Iterator[type]:
        """Registered classes, and those of this library that are imported."""
        found, waiting = dict.fromkeys(HANDLERS), [AOBaseConfig]
        while waiting:
            cls: type = waiting.pop()
            waiting += cls.__subclasses__()
            if cls is not AOBaseConfig and cls in self:
                found[cls] = None
        return iter(found)

    def __len__(self) -> int:
        return sum(1 for _ in self)


_QUANTIZE_CONFIG_HANDLER = _Handlers()


# -- weights by a constructor ------------------------------------------------------------------------------------------


def _get_linear_subclass_inserter(
    constructor: Callable[..., Tensor], *, allow_requires_grad: bool = False, propagate_bias: bool = False,
    **kwargs: Any,
) -> Callable[[nn.Linear], nn.Linear]:  # fmt: skip
    """A function that replaces a layer's weight by ``constructor(weight, **kwargs)``; with ``propagate_bias`` the
    constructor also gets ``bias``."""

    def insert(linear: nn.Linear) -> nn.Linear:
        more = {**kwargs, "bias": linear.bias} if propagate_bias else kwargs
        trains = allow_requires_grad and linear.weight.requires_grad
        linear.weight = nn.Parameter(constructor(linear.weight, **more), requires_grad=trains)
        return linear

    return insert


def _get_subclass_inserter(
    cls: Any, enable_parametrization: bool = False, *, method: str = "from_float", **kwargs: Any
) -> Callable[[nn.Linear], nn.Linear]:
    """A function that replaces a layer's weight by ``cls.from_float(weight, **kwargs)``, or by another ``method``.

    Raises NotImplementedError for ``enable_parametrization``: ``unwrap_tensor_subclass`` makes parametrizations.
    """
    if enable_parametrization:
        raise NotImplementedError("enable_parametrization: call torchao.utils.unwrap_tensor_subclass(model) afterwards")
    return _get_linear_subclass_inserter(getattr(cls, method), **kwargs)


def _replace_with_custom_fn_if_matches_filter_with_name(
    model: nn.Module, replacement_fn: Callable[..., nn.Module], filter_fn: Filter, cur_fqn: str = "",
    device: Any = None, extra_args: tuple[Any, ...] = (),
) -> nn.Module:  # fmt: skip
    """Replace each module that the filter selects by ``replacement_fn(module, name, *extra_args)``; not within a
    selected one. Returns the model, or its replacement. ``cur_fqn`` ends with a dot."""
    if device is not None:
        model.to(device)
    if filter_fn(model, cur_fqn[:-1]):
        return replacement_fn(model, cur_fqn[:-1], *extra_args)
    for name, child in list(model.named_children()):
        new = _replace_with_custom_fn_if_matches_filter_with_name(
            child, replacement_fn, filter_fn, f"{cur_fqn}{name}.", None, extra_args
        )
        if new is not child:
            setattr(model, name, new)
    return model


# -- text of layers ----------------------------------------------------------------------------------------------------


def _quantization_type(weight: Tensor) -> str:
    """What a layer's repr says of a weight."""
    return repr(weight) if isinstance(weight, AffineQuantizedTensor) else f"Tensor: {type(weight)}"


def _linear_extra_repr(self: Any) -> str:
    out_features, in_features = self.weight.shape
    return f"in_features={in_features}, out_features={out_features}, weight={_quantization_type(self.weight)}"


def _embedding_extra_repr(self: Any) -> str:
    rows, columns = self.weight.shape
    return f"num_embeddings={rows}, embedding_dim={columns}, weight={_quantization_type(self.weight)}"


def _module_extra_repr(self: Any, original_extra_repr: Callable[[], str], parameter_name: str) -> str:
    """A module's own text, and its parameter's."""
    text = f"{parameter_name}={_quantization_type(getattr(self, parameter_name))}"
    return ", ".join(filter(None, (original_extra_repr(), text)))


# -- inputs of the older era -------------------------------------------------------------------------------------------

LAYOUT_TO_ZERO_POINT_DOMAIN: dict[type, list[ZeroPointDomain]] = {
    TensorCoreTiledLayout: [ZeroPointDomain.FLOAT],
    MarlinSparseLayout: [ZeroPointDomain.INT],
    Int4CPULayout: [ZeroPointDomain.FLOAT],
    Int4XPULayout: [ZeroPointDomain.FLOAT, ZeroPointDomain.INT],
}
LAYOUT_TO_PRESERVE_ZEROS: dict[type, bool] = {
    TensorCoreTiledLayout: False, MarlinSparseLayout: True, Int4CPULayout: False, Int4XPULayout: False,
}  # fmt: skip


def _int8_symm_per_token_quant(x: Tensor) -> Tensor:
    """x in -127..127, one float32 scale a token."""
    return to_affine_quantized_intx(x, MappingType.SYMMETRIC, _per_token(x), torch.int8, -127, 127, 1e-5, torch.float32)


def _uint8_asymm_per_token_quant(x: Tensor) -> Tensor:
    """x in 0..255, one float32 scale and int32 zero point a token."""
    eps = torch.finfo(torch.float32).eps
    return to_affine_quantized_intx(
        x, MappingType.ASYMMETRIC, _per_token(x), torch.uint8, 0, 255, eps, torch.float32, torch.int32
    )


def _int8_symm_per_token_reduced_range_quant_noop_decode(x: Tensor) -> Tensor:
    """x in -127..127, one scale a token; x itself if its axis 1 has one element."""
    return x if x.shape[1] == 1 else _int8_symm_per_token_reduced_range_quant(x)


def _in_features_greater_than_16(mod: Any, *args: Any) -> bool:
    """A filter."""
    return hasattr(mod, "in_features") and mod.in_features > 16


def _fp8_mm_compat(weight: Tensor) -> bool:
    """Whether a GPU's float8 product takes this weight: both its last axes are multiples of 16. No limit on a CPU."""
    if weight.dim() not in (2, 3):
        raise AssertionError(f"float8 weights have 2 or 3 axes, got {weight.dim()}")
    return weight.shape[-1] % 16 == 0 and weight.shape[-2] % 16 == 0

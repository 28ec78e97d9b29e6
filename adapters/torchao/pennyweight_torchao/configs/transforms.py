"""torchao's table of handlers: ``_QUANTIZE_CONFIG_HANDLER[type(config)](module, config)`` quantizes one module.

torchao has a function per config for that. Here a config plans its own scheme, so all of them are one function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping

from torch import Tensor, nn

from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.planning.configs import AOBaseConfig, FqnToConfig
from pennyweight.planning.module_handlers import HANDLERS
from pennyweight.quantize.pipeline import quantize_

Handler = Callable[..., nn.Module]

__all__ = ["_QUANTIZE_CONFIG_HANDLER", "_quantization_type"]


# -- one module --------------------------------------------------------------------------------------------------------


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


def _quantization_type(weight: Tensor) -> str:
    """What a layer's repr says of a weight."""
    return repr(weight) if isinstance(weight, AffineQuantizedTensor) else f"Tensor: {type(weight)}"

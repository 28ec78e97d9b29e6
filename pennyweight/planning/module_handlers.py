"""Handlers: user functions that transform whole modules under a user's config class."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .config_resolution import Filter, PlanError
from .parameters import is_linear
from .quantize_report import Report, Row
from .run_batch import user_level

Handler = Callable[..., nn.Module]
HANDLERS: dict[type, Handler] = {}
Tells = Callable[[nn.Module, Any], tuple[bool, str]]
PREVIEWS: dict[type, Tells] = {}


def register_quantize_module_handler(config_type: type, tells: Tells | None = None) -> Callable[[Handler], Handler]:
    """Register the decorated ``handler(module, config) -> module`` for all modules selected with your config type.

    A handler that also takes ``parameter_name`` receives the name of the selected parameter. tells(module, config)
    returns in advance (True, note for the report) or (False, reason) if the handler does not accept a module. Raises
    ValueError for a type that already has a handler.
    """

    def add(handler: Handler) -> Handler:
        if config_type in HANDLERS:
            raise ValueError(f"{config_type.__name__} already has a handler: {_name(HANDLERS[config_type])}")
        HANDLERS[config_type] = handler
        if tells is not None:
            PREVIEWS[config_type] = tells
        return handler

    return add


def thaw_classes_(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Give each module whose class names its original in ``thawed`` that class back. Returns their names and modules.

    Higher layers replace classes of modules for inference (frozen layers, fused blocks); nothing else of a module
    changes, so this undoes it.
    """
    found = [(n, m) for n, m in model.named_modules() if getattr(type(m), "thawed", None) is not None]
    for _, module in found:
        module.__class__ = type(module).thawed
    return found


def takes_parameter_name(handler: Handler) -> bool:
    return "parameter_name" in inspect.signature(handler).parameters


def run_handler(
    model: nn.Module, handler: Handler, module_name: str, config: Any, parameter: str | None, device: Any
) -> nn.Module:
    """Transform one module and replace it by the handler's result. Returns the result."""
    more = {"parameter_name": parameter} if parameter is not None else {}
    return _apply(model, lambda m: handler(m, config, **more), module_name, device, f"handler {_name(handler)}")


def apply_callable(
    model: nn.Module, fn: Callable[..., Any], filter_fn: Filter | None, device: torch.device | str | None
) -> Report:
    """``quantize_(model, function over modules)``, torchao's API before 0.10."""
    warnings.warn(
        "quantize_(model, callable) is the API of torchao before 0.10; pass a config such as "
        "Int8WeightOnlyConfig(), or register a handler with register_quantize_module_handler",
        DeprecationWarning,
        stacklevel=user_level(),
    )
    pick = filter_fn if filter_fn not in (None, is_linear) else _is_plain_linear
    rows: list[Row] = []
    done = ""
    for name, module in list(model.named_modules()):
        inside = done and name.startswith(f"{done}.")
        if inside or pick is None or not pick(module, name):
            continue
        done = name
        before = module_nbytes(module)
        new = _apply(model, fn, name, device, _name(fn))
        rows.append(Row(name, type(new).__name__, (), _name(fn), "-", before, module_nbytes(new)))
    if not rows:
        raise PlanError("the filter matched no module, so nothing was quantized")
    return Report(_name(fn), rows)


def module_nbytes(module: nn.Module) -> int:
    """Bytes of all its parameters, each once."""
    return sum(int(p.nbytes) for p in module.parameters())


def _is_plain_linear(module: nn.Module, fqn: str) -> bool:
    return isinstance(module, nn.Linear)


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _apply(model: nn.Module, fn: Callable[[nn.Module], Any], name: str, device: Any, what: str) -> nn.Module:
    module = model.get_submodule(name)
    new = fn(module if device is None else module.to(device))
    if not isinstance(new, nn.Module):
        raise PlanError(f"{name or 'model'}: {what} must return a module, got {new!r}")
    if new is not module:
        if not name:
            raise PlanError(f"{what} returned another module for the root; wrap the model in nn.Sequential first")
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)
    return new

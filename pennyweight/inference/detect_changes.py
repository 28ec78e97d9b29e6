"""Detects whether a fused module still consists of what was fused: modules, parameters, attributes, modes and hooks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from operator import is_
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn
from torch.nn.modules import module as _modules

from ..core.tensor import AffineQuantizedTensor

_GLOBAL_HOOKS = (_modules._global_forward_hooks, _modules._global_forward_pre_hooks)
_CAPTURING = "transformers.utils.output_capturing"
_PLAIN = (bool, int, float, str, tuple, type(None), FunctionType, BuiltinFunctionType)
_WITHOUT_EFFECT = ("training", "gradient_checkpointing", "forward")  # in eval mode without gradients; else looked at


def own_class(module: Any) -> Any:
    """The class of a module before it was fused or frozen."""
    return getattr(type(module), "thawed", type(module))


def module_classes(root: nn.Module) -> tuple[tuple[str, str], ...]:
    """Paths and qualified names of the classes of all modules, as if nothing were frozen."""
    kinds = ((path, own_class(module)) for path, module in root.named_modules())
    return tuple((path, f"{kind.__module__}.{kind.__qualname__}") for path, kind in kinds)


def attributes(root: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """(path, name, value) of the numbers, strings and functions that forwards may read: eps of a norm, scale of
    attention, index of the layer in a cache, stride of a convolution. Linear layers have none that matter."""
    for path, module in root.named_modules():
        if isinstance(module, nn.Linear):
            continue
        for name, value in module.__dict__.items():
            if type(value) in _PLAIN and name[0] != "_" and name not in _WITHOUT_EFFECT:
                yield path, name, value


def refusal(root: nn.Module, trains: Callable[[nn.Module], bool]) -> str:
    """Why no module of these classes can be fused as it is now, or "". trains: whether a module may compute something
    else in training mode."""
    if any(module.training and trains(module) for module in root.modules()):
        return "it is in training mode"
    if any(_replaced_forward(module) for module in root.modules() if module is not root):
        return "a module in it has a forward of its own"
    return ""


def _replaced_forward(module: nn.Module) -> bool:
    """Whether the module has another forward than its class. accelerate leaves that of the class behind when it removes
    its hooks."""
    forward = module.__dict__.get("forward")
    return forward is not None and not (
        getattr(forward, "__func__", None) is type(module).forward and forward.__self__ is module
    )


class Watch:
    """The modules, parameters, attributes, modes and hooks of a module, and a fast comparison with what they are now.

    trains: whether a module may compute something else in training mode. others: (dictionary, key) of more values.
    """

    def __init__(
        self, root: nn.Module, trains: Callable[[nn.Module], bool], others: Iterable[tuple[dict[str, Any], str]] = ()
    ) -> None:
        watched: list[tuple[dict[str, Any], str, Any]] = [
            (watched_dict, key, watched_dict.get(key)) for watched_dict, key in others
        ]
        hooks: list[Any] = []
        for module in root.modules():
            watched_dict: Any = module.__dict__
            if trains(module):
                watched.append((watched_dict, "training", False))
            if module is not root:
                watched.append((watched_dict, "forward", watched_dict.get("forward")))
                hooks += [module._forward_hooks, module._forward_pre_hooks]
            children: Any = module._modules
            parameters: Any = module._parameters
            watched += [(children, key, child) for key, child in children.items()]
            watched += [(parameters, key, p) for key, p in parameters.items()]
            # an assignment to .data of a quantized parameter replaces all its parts
            parts = (p for p in parameters.values() if isinstance(p, AffineQuantizedTensor))
            watched += [(p.__dict__, "_codes", p._codes) for p in parts]
        watched += [(root.get_submodule(path).__dict__, name, value) for path, name, value in attributes(root)]
        self.dicts, self.keys, self.values = zip(*watched, strict=True)
        self.hooks = tuple(hooks)

    def unchanged(self) -> bool:
        """Whether all of them are the same objects as before."""
        return all(map(is_, map(dict.get, self.dicts, self.keys), self.values))

    def hooked(self) -> bool:
        """Whether a hook needs inputs or outputs of inner modules."""
        return has_hooks(self.hooks)


def has_hooks(hooks: Iterable[Any]) -> bool:
    """Whether one of these, or of all modules' hooks, acts in this call."""
    if not any(hooks) and not any(_GLOBAL_HOOKS):
        return False
    # transformers leaves hooks that are inactive in most calls
    library = sys.modules.get(_CAPTURING)
    if library is None or any(_GLOBAL_HOOKS):
        return True
    collector = library._active_collector.get()
    for one in hooks:
        for hook in one.values():
            if getattr(hook, "__module__", "") != _CAPTURING or getattr(hook, "__closure__", None) is None:
                return True
            cells = dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True))
            if collector is not None and cells["key"].cell_contents in collector:
                return True
    return False

"""What must stay the same in a block for its fused steps to be valid: modules, parameters, attributes, modes, hooks."""

from __future__ import annotations

import sys
from operator import is_
from typing import Any

from torch import nn
from torch.nn.modules import module as _modules

from ..core.tensor import AffineQuantizedTensor
from .recipe import Recipe, attributes

_GLOBAL_HOOKS = (_modules._global_forward_hooks, _modules._global_forward_pre_hooks)
_CAPTURING = "transformers.utils.output_capturing"
CHOICE = "_attn_implementation_internal"  # in a config of transformers: the attention function


class Watch:
    """The objects of a block, and a fast comparison with what they were."""

    def __init__(self, block: nn.Module, recipe: Recipe) -> None:
        watched: list[tuple[dict[str, Any], str, Any]] = []
        hooks: list[Any] = []
        quantized = recipe.quantized()
        for path, module in block.named_modules():
            parameters: Any = module._parameters
            for name, p in parameters.items():
                watched.append((parameters, name, p))
                if isinstance(p, AffineQuantizedTensor) and f"{path}.{name}" in quantized:
                    watched.append((p.__dict__, "_codes", p._codes))  # an assignment to .data replaces all parts
            if any(True for _ in module.children()) or "dropout" in type(module).__name__.lower():
                watched.append((module.__dict__, "training", False))
            if module is not block:
                watched.append((module.__dict__, "forward", None))
                hooks += [module._forward_hooks, module._forward_pre_hooks]
            children: Any = module._modules
            watched += [(children, key, child) for key, child in children.items()]
        watched += [(block.get_submodule(path).__dict__, name, value) for path, name, value in attributes(block)]
        path, choice = recipe.attention
        if choice:  # transformers' choice of the attention function
            config: Any = block.get_submodule(path).config  # a property would cost 1 µs
            watched.append((config.__dict__, CHOICE, config.__dict__.get(CHOICE)))
        self.dicts, self.keys, self.values = zip(*watched, strict=True)
        self.hooks = tuple(hooks)

    def unchanged(self) -> bool:
        return all(map(is_, map(dict.get, self.dicts, self.keys), self.values))

    def hooked(self) -> bool:
        """Whether a hook needs inputs or outputs of inner modules."""
        if not any(self.hooks) and not any(_GLOBAL_HOOKS):
            return False
        # transformers leaves hooks that are inactive in most calls
        library = sys.modules.get(_CAPTURING)
        if library is None or any(_GLOBAL_HOOKS):
            return True
        collector = library._active_collector.get()
        for hooks in self.hooks:
            for hook in hooks.values():
                if getattr(hook, "__module__", "") != _CAPTURING or getattr(hook, "__closure__", None) is None:
                    return True
                cells = dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True))
                if collector is not None and cells["key"].cell_contents in collector:
                    return True
        return False

"""Finds PEFT adapters in a model: quantize_ does not quantize them, because they are trained."""

from __future__ import annotations

from torch import nn

WHY = "part of a PEFT adapter, which is trained; merge it first, or name it in FqnToConfig"


def adapter_modules(model: nn.Module) -> set[int]:
    """Ids of the adapter modules: lora_A, lora_B and others, and the copies of ``modules_to_save``.

    PEFT layers list them in ``adapter_layer_names``.
    """
    found: set[int] = set()
    for layer in model.modules():
        if not type(layer).__module__.startswith("peft."):
            continue
        for name in getattr(layer, "adapter_layer_names", ()):
            part = getattr(layer, name, None)
            if isinstance(part, nn.Module):
                found |= {id(m) for m in part.modules()}
    return found

"""Adapters of PEFT inside a model: what is trained beside a quantized weight is no weight to quantize."""

from __future__ import annotations

from torch import nn

WHY = "belongs to an adapter of PEFT, which is trained; merge it first, or name it in FqnToConfig"


def adapter_modules(model: nn.Module) -> set[int]:
    """Ids of the modules that adapters are made of: lora_A, lora_B and the like, and the copies of ``modules_to_save``.

    A layer of PEFT's says in ``adapter_layer_names`` where they are.
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

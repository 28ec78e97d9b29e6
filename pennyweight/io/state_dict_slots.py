"""Tensor slots of a model by name: entries of its state dict, and weights that the state dict does not list."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..planning.parameters import kind_of, places


@dataclass(frozen=True)
class Slot:
    """A place in a model that stores a tensor."""

    module: nn.Module
    attr: str
    tensor: Tensor
    is_param: bool

    @property
    def op(self) -> str:
        """The op that uses the weight, which determines its layout."""
        kind = kind_of(self.module)
        if kind is not None and self.attr in kind.params:
            return kind.op
        return "bmm" if self.tensor.ndim == 3 else "linear"

    def put_back(self) -> None:
        """Undo an assignment, bypassing the module's ``__setattr__``."""
        m = self.module
        for table in (m._parameters, m._buffers, m.__dict__):
            if self.attr in table:
                table[self.attr] = self.tensor
                return


def slots_of(model: nn.Module) -> dict[str, Slot]:
    """Every parameter and persistent buffer under all of its names, and weights kept as plain tensors (by PEFT)."""
    out: dict[str, Slot] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        out |= {dot + n: Slot(module, n, p, True) for n, p in module._parameters.items() if p is not None}
        for n, b in module._buffers.items():
            if b is not None and n not in module._non_persistent_buffers_set:
                out[dot + n] = Slot(module, n, b, False)
    for where in places(model):
        for p in where:
            if p.name not in out:
                out[p.name] = Slot(p.module, p.param, p.get(), False)
    return out


def meta_buffers(model: nn.Module) -> list[str]:
    """Non-persistent buffers on the meta device, which no checkpoint contains."""
    return [
        f"{prefix}.{n}" if prefix else n
        for prefix, module in model.named_modules()
        for n in sorted(module._non_persistent_buffers_set)
        if (b := module._buffers.get(n)) is not None and b.device.type == "meta"
    ]

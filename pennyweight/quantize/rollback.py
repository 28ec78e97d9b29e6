"""Snapshot of a model before a recipe, to restore it if a step fails or is interrupted.

Modules, their attributes and tensors are kept by reference. This takes no memory until a tensor is replaced; from then
on the float weight stays in memory next to the quantized one until the recipe has finished. Tensors that steps write
into are copied. With a folder both are kept on disk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_Dict = dict[Any, Any]


@dataclass(eq=False)
class _Saved:
    """The value of a tensor that is no longer in the model: in memory or in a file."""

    value: Tensor | Path
    parameter: bool
    requires_grad: bool

    def load(self) -> Tensor:
        value = torch.load(self.value, weights_only=True) if isinstance(self.value, Path) else self.value
        return nn.Parameter(value, self.requires_grad) if self.parameter else value


class ModelSnapshot:
    """Snapshot of a model; :meth:`restore` restores it bit for bit.

    folder  keep tensors there instead of in memory
    """

    def __init__(self, model: nn.Module, folder: Path | None = None) -> None:
        self.folder, self.files = folder, 0
        self.modules: list[tuple[nn.Module, type[nn.Module], _Dict, list[tuple[_Dict, _Dict]]]] = []
        self.homes: dict[int, list[tuple[_Dict, Any]]] = {}  # id of a tensor -> dicts that hold it
        self.plain: dict[int, tuple[Tensor, Tensor, bool]] = {}  # id -> tensor, its memory, requires_grad
        self.copies: dict[int, Tensor | Path] = {}
        self.configs: dict[int, tuple[Any, dict[str, Any]]] = {}
        for module in model.modules():
            state = dict(module.__dict__)
            inner = [(value, dict(value)) for value in state.values() if isinstance(value, dict)]
            self.modules.append((module, type(module), state, inner))
            for copied in (state, *(copy for _, copy in inner)):
                for name, value in copied.items():
                    if isinstance(value, Tensor):
                        self.homes.setdefault(id(value), []).append((copied, name))
                        if type(value) in (Tensor, nn.Parameter):
                            self.plain[id(value)] = value, value.data, value.requires_grad
            config = state.get("config")
            if hasattr(config, "__dict__"):
                self.configs[id(config)] = config, dict(vars(config))

    @property
    def tensors(self) -> list[Tensor]:
        """The plain tensors of the model."""
        return [t for t, _, _ in self.plain.values()]

    def copy(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors that will be written into."""
        for t in tensors:
            if id(t) in self.plain and id(t) not in self.copies and not t.is_meta:
                self.copies[id(t)] = self._stored(t.detach().clone() if self.folder is None else t.detach())

    def release(self, t: Tensor | None) -> None:
        """A tensor has been replaced in the model: drop the reference if its value is saved elsewhere, or can be."""
        key = id(t)
        if t is None or key not in self.plain or t.is_meta or (key not in self.copies and self.folder is None):
            return
        value = self.copies.pop(key) if key in self.copies else self._stored(t.detach())
        kept = _Saved(value, isinstance(t, nn.Parameter), self.plain.pop(key)[2])
        for home, name in self.homes.pop(key):
            home[name] = kept

    def restore(self) -> None:
        """Restore the model. A released tensor is restored as a new object with the same value."""
        loaded: dict[int, Tensor] = {}

        def back(given: _Dict) -> _Dict:
            return {name: self._value(value, loaded) for name, value in given.items()}

        for module, kind, state, inner in self.modules:
            module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(back(state))
            for live, copy in inner:  # keep the dict object: hook handles refer to it
                live.clear()
                live.update(back(copy))
        with torch.no_grad():
            for key, (t, memory, grad) in self.plain.items():
                if t.device != memory.device or t.data_ptr() != memory.data_ptr() or t.shape != memory.shape:
                    t.data = memory
                if t.requires_grad != grad:
                    t.requires_grad_(grad)
                if key in self.copies:
                    was = self.copies[key]
                    memory.copy_(torch.load(was, weights_only=True) if isinstance(was, Path) else was)
        for config, values in self.configs.values():
            vars(config).clear()
            vars(config).update(values)

    def _value(self, value: Any, loaded: dict[int, Tensor]) -> Any:
        if not isinstance(value, _Saved):
            return value
        if id(value) not in loaded:  # load once, so that tied tensors stay tied
            loaded[id(value)] = value.load()
        return loaded[id(value)]

    def _stored(self, t: Tensor) -> Tensor | Path:
        if self.folder is None:
            return t
        path = self.folder / f"before-{self.files}.pt"
        self.files += 1
        torch.save(t.clone(), path)  # saving a view would save its whole storage
        return path

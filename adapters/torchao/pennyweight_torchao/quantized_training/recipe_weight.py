"""A float weight whose products are quantized: the base of torchao's classes of trainable weights.

torchao puts the choice of products into the weight, pennyweight into the layer (``LowPrecisionLinear``). These classes
are for code that assigns such a weight to a parameter of its own. The value, the gradient and the state are floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pennyweight.training import Recipe, grouped_mm, linear

__all__: list[str] = []

aten = torch.ops.aten
# Operators whose results are weights again: what parameters, optimizers, checkpoints and FSDP do with one.
_KEPT = {
    aten.t.default, aten.transpose.int, aten.detach.default, aten.alias.default, aten.empty_like.default,
    aten.new_zeros.default, aten.slice.Tensor, aten.view.default, aten.as_strided.default, aten._to_copy.default,
    aten._pin_memory.default, aten.split.Tensor, aten.clone.default,
}  # fmt: skip


class RecipeWeight(Tensor):
    """A wrapper of a float tensor ``_data``. Subclasses define :meth:`recipe`, and name their other attributes.

    F.linear(x, weight, bias) and torch._grouped_mm(x, weight, ends) compute their three products under the recipe;
    every other operator computes on ``_data``.
    """

    _data: Tensor
    ATTRIBUTES: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def __new__(cls: type[RecipeWeight], data: Tensor, *args: Any, **kwargs: Any) -> RecipeWeight:
        self: RecipeWeight = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype, device=data.device,
            requires_grad=data.requires_grad,
        )  # fmt: skip
        self._data = data.detach()
        return self

    def recipe(self) -> Recipe:
        """The recipe of its products."""
        raise NotImplementedError(f"{type(self).__name__} does not say how its products are quantized")

    def linear(self, x: Tensor, bias: Tensor | None) -> Any:
        """x [.., K] · weight [N, K]ᵀ + bias; NotImplemented: in high precision."""
        return linear(x, unwrapped(self), bias, self.recipe())

    def grouped(self, x: Tensor, ends: Tensor, bias: Tensor | None) -> Any:
        """Tokens x [T, K] times experts [E, K, N]; see :func:`pennyweight.training.grouped_mm`."""
        return grouped_mm(x, unwrapped(self), ends, self.recipe(), bias)

    def again(self, data: Tensor) -> RecipeWeight:
        """Another value with the same attributes."""
        return type(self)(data, **{name: getattr(self, name) for name in self.ATTRIBUTES})

    def to_original(self) -> Tensor:
        """A copy as a plain tensor. The gradient passes."""
        return unwrapped(self).clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        more = "".join(f", {name}={getattr(self, name)!r}" for name in self.ATTRIBUTES)
        return f"{type(self).__name__}(data={self._data}{more})"

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["_data"], {name: getattr(self, name) for name in self.ATTRIBUTES}

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], attributes: dict[str, Any], outer_size: Any, outer_stride: Any
    ) -> RecipeWeight:
        return cls(inner["_data"], **attributes)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _FUNCTIONS.get(func)
        if handler is not None:
            result = handler(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first: list[RecipeWeight] = []

        def unwrap(x: RecipeWeight) -> Tensor:
            first.append(x)
            return x._data

        plain = tree_map_only(RecipeWeight, unwrap, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        if func._schema.is_mutable and isinstance(args[0], RecipeWeight):
            return args[0]
        return tree_map_only(Tensor, first[0].again, out) if func in _KEPT else out


class _Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Any) -> Tensor:  # type: ignore[override]
        return weight._data.view_as(weight._data)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g


def unwrapped(weight: Any) -> Tensor:
    """The float tensor of a weight; the gradient passes. Other tensors unchanged."""
    return _Unwrap.apply(weight) if isinstance(weight, RecipeWeight) else weight


def _linear(input: Tensor, weight: Any, bias: Tensor | None = None) -> Any:
    return weight.linear(unwrapped(input), unwrapped(bias)) if isinstance(weight, RecipeWeight) else NotImplemented


def _grouped(input: Tensor, mat2: Any, offs: Tensor | None = None, bias: Tensor | None = None, **more: Any) -> Any:
    """Tokens times experts. Other forms have no recipe, and compute in high precision."""
    if not isinstance(mat2, RecipeWeight) or offs is None or input.ndim != 2 or mat2.ndim != 3:
        return NotImplemented
    return mat2.grouped(unwrapped(input), offs, unwrapped(bias))


def _product(input: Any, other: Any) -> Any:
    """x [.., K] times a weight [K, N]."""
    if not isinstance(other, RecipeWeight) or other.ndim != 2 or input.ndim < 1:
        return NotImplemented
    return other.t().linear(unwrapped(input), None)  # type: ignore[attr-defined]


_FUNCTIONS: dict[Any, Callable[..., Any]] = {F.linear: _linear, torch._grouped_mm: _grouped}
if hasattr(F, "grouped_mm"):
    _FUNCTIONS[F.grouped_mm] = _grouped
for _name in ("matmul", "mm", "__matmul__"):
    for _home in (torch, Tensor):
        if hasattr(_home, _name):
            _FUNCTIONS[getattr(_home, _name)] = _product

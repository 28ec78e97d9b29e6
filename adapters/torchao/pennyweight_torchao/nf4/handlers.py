"""torchao's handlers of NF4 operators, which compute the operator they are called with, and what they are made of.

The decorators ``expect_*`` restrict a handler ``(aten_op, args, kwargs)`` to some arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from torch import Tensor

from pennyweight.core.tensor import AffineQuantizedTensor as QT

from . import parts
from .parts import SubclassTensorArgs

_INNER_TENSOR_NAMES_FOR_SHARDING = ["quantized_scalers", "quantization_factor", "quantized_data"]


def same_metadata(a: Any, b: Any) -> bool:
    """Whether both are NF4 weights with blocks of the same sizes and number."""
    if not all(isinstance(w, QT) and w.spec.format.name.startswith("nf4") for w in (a, b)):
        return False
    names = ("block_size", "scaler_block_size", "n_blocks")
    return all(getattr(a, name) == getattr(b, name) for name in names)


def construct_nf4_args(nf4tensor: QT, kwargs: dict[str, Any] | None = None) -> tuple[Any, ...]:
    """The arguments of ``NF4Tensor(...)`` for a weight, some of them changed: ``kwargs`` has torchao's names, and those
    of the description: size, stride, storage_offset, dtype, device, requires_grad."""
    changed = kwargs or {}
    old = parts.describe(nf4tensor)
    names = ("size", "stride", "storage_offset", "dtype", "device", "requires_grad")
    was = (
        old.original_shape, old.original_strides, old.storage_offset, old.dtype, old.device, old.requires_grad,
    )  # fmt: skip
    meta = SubclassTensorArgs(*(changed.get(name, value) for name, value in zip(names, was, strict=True)))
    members = (
        "block_size", "n_blocks", "scaler_block_size", "quantized_scalers", "quantization_factor", "scaler_mean",
        "quantized_data", "nf4",
    )  # fmt: skip
    return (meta, *(changed[name] if name in changed else getattr(nf4tensor, name) for name in members))


def apply_to_inner_tensors(nf4tensor: QT, aten_op: Any, args: Any, kwargs: Any) -> dict[str, Tensor]:
    """aten_op(part, *args, **kwargs) of the three parts that are sharded, by name."""
    return {name: aten_op(getattr(nf4tensor, name), *args, **kwargs) for name in _INNER_TENSOR_NAMES_FOR_SHARDING}


def call_from_inner_tensors(nf4tensor: QT, method_name: str, args: Any, kwargs: Any) -> dict[str, Tensor]:
    """part.method_name(*args, **kwargs) of the three parts that are sharded, by name."""
    return {n: getattr(getattr(nf4tensor, n), method_name)(*args, **kwargs) for n in _INNER_TENSOR_NAMES_FOR_SHARDING}


# -- restrictions of arguments -----------------------------------------------------------------------------------------


class CompareOp(Enum):
    """How a restriction compares: equal, or less than."""

    EQ = auto()
    LT = auto()


_COMPARE: dict[CompareOp, Callable[[Any, Any], bool]] = {
    CompareOp.EQ: lambda found, value: found == value,
    CompareOp.LT: lambda found, value: found < value,
}


def _expect(find: Callable[[Any], Any], compare: Callable[[Any, Any], bool] | None, value: Any, message: Any) -> Any:
    """Decorator: NotImplementedError with the message unless what ``find`` finds in the arguments compares."""

    def decorate(func: Any) -> Any:
        @functools.wraps(func)
        def checked(aten_op: Any, args: Any, kwargs: Any = None) -> Any:
            if compare is not None and not compare(find(args), value):
                raise NotImplementedError(message(find(args)))
            return func(aten_op, args, kwargs)

        return checked

    return decorate


def expect_num_of_args(op: CompareOp, num: int, msg: str) -> Any:
    """With LT: fewer than ``num`` arguments. EQ does not restrict, as in torchao."""
    return _expect(len, _COMPARE[op] if op is CompareOp.LT else None, num, lambda found: msg)


def expect_arg_value_at_k(k: int, op: CompareOp, value: Any, msg: str) -> Any:
    """With EQ: argument k equals ``value``. LT does not restrict, as in torchao."""
    compare = _COMPARE[op] if op is CompareOp.EQ else None
    return _expect(lambda args: args[k], compare, value, lambda found: f"{msg}{found}")


def expect_args_len_at_k(k: int, op: CompareOp, value: Any, msg: str) -> Any:
    """The length of argument k is less than ``value``, or equal to it."""
    return _expect(lambda args: len(args[k]), _COMPARE[op], value, lambda found: f"{msg}{found}")


# -- handlers ----------------------------------------------------------------------------------------------------------


def _computes(aten_op: Any, args: Any, kwargs: Any = None) -> Any:
    """aten_op(*args, **kwargs)."""
    return aten_op(*args, **(kwargs or {}))


def _computes_packed(func: Any, *args: Any, **kwargs: Any) -> Any:
    """func of ``args[0]``, the arguments, and ``args[1]``, the keyword arguments."""
    return func(*args[0], **((args[1] if len(args) > 1 else kwargs) or {}))


def _method(name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(Tensor, name)(*args, **kwargs)

    call.__name__, call.__doc__ = f"function_{name}", f"Tensor.{name}(*args, **kwargs)."
    return call


nf4_as_strided = nf4_cat = nf4_detach = nf4_empty_like = nf4_is_pinned = nf4_new_zeros = nf4_pin_memory = _computes
nf4_slice = nf4_split = nf4_view = _computes
clone = copy_ = mm_default = nf4_all_gather_into_tensor = noop_detach = scatter_nf4tensor = _computes_packed
t_default = to_dtype = wait_tensor = wrap_tensor_autograd_nf4 = _computes_packed
function_to_dtype, function_cpu, function_cuda = _method("to"), _method("cpu"), _method("cuda")
function_narrow, function_view_as = _method("narrow"), _method("view_as")

__all__ = [
    "CompareOp", "apply_to_inner_tensors", "call_from_inner_tensors", "clone", "construct_nf4_args", "copy_",
    "expect_arg_value_at_k", "expect_args_len_at_k", "expect_num_of_args", "function_cpu", "function_cuda",
    "function_narrow", "function_to_dtype", "function_view_as", "mm_default", "nf4_all_gather_into_tensor",
    "nf4_as_strided", "nf4_cat", "nf4_detach", "nf4_empty_like", "nf4_is_pinned", "nf4_new_zeros", "nf4_pin_memory",
    "nf4_slice", "nf4_split", "nf4_view", "noop_detach", "same_metadata", "scatter_nf4tensor", "t_default", "to_dtype",
    "wait_tensor", "wrap_tensor_autograd_nf4",
]  # fmt: skip

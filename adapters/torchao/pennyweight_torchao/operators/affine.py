"""``torch.ops.torchao``: quantize_affine, dequantize_affine, choose_qparams_affine and the float8 ones.

With torchao's schemas; they compute what the functions of :mod:`..primitives` and :mod:`..format_primitives` do. torch
traces through them for compilers. They are defined by :func:`pennyweight_torchao.install`, and by what exports graphs
with them, and stay for the life of the process, because graphs hold them. While the alias is installed, the functions
are kept whole under ``torch.export``: the graph then has ``torchao.quantize_affine.default``, which ExecuTorch and
other readers of such graphs look for.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from pennyweight.planning.granularity import MappingType

from .. import format_primitives, primitives, qparams

NAMESPACE = "torchao"
_BOUNDS = "Scalar? quant_min=None, Scalar? quant_max=None"


def _choose(
    input: Tensor, mapping_type: str, block_size: list[int], target_dtype: torch.dtype, quant_min: Any = None,
    quant_max: Any = None, eps: float | None = None, scale_dtype: torch.dtype | None = None,
    zero_point_dtype: torch.dtype | None = None, keepdim: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The operator takes the name of a mapping type."""
    if mapping_type not in MappingType.__members__:
        raise ValueError(f"mapping_type must be one of {', '.join(MappingType.__members__)}, got {mapping_type!r}")
    return qparams.choose_qparams_affine.whole(  # type: ignore[attr-defined]
        input, MappingType[mapping_type], block_size, target_dtype, quant_min, quant_max, eps, scale_dtype,
        zero_point_dtype, keepdim=keepdim,
    )  # fmt: skip


def _quantize(*args: Any) -> Tensor:
    return primitives.quantize_affine.whole(*args)  # type: ignore[attr-defined]


def _dequantize(
    input: Tensor, block_size: list[int], scale: Tensor, zero_point: Tensor | None, input_dtype: torch.dtype,
    quant_min: Any = None, quant_max: Any = None, output_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    return primitives.dequantize_affine.whole(  # type: ignore[attr-defined]
        input, block_size, scale, zero_point, input_dtype, quant_min, quant_max, output_dtype=output_dtype
    )


_QUANTIZE_F8 = "(Tensor tensor, Tensor scale, ScalarType float8_dtype=24) -> Tensor"
_DEQUANTIZE_F8 = "(Tensor tensor, Tensor scale, ScalarType output_dtype=6) -> Tensor"
_CHOOSE_F8 = (
    "(Tensor tensor, SymInt[] block_size, ScalarType float8_dtype=24, ScalarType scale_dtype=6, "
    "float? hp_value_lb=None, float? hp_value_ub=None) -> Tensor"
)
# Name -> schema, implementation. The names without "non_decomposed", and choose_qparams_affine_float8, are 0.12's.
OPERATORS: dict[str, tuple[str, Callable[..., Any]]] = {
    "choose_qparams_affine": (
        f"(Tensor input, str mapping_type, SymInt[] block_size, ScalarType target_dtype, {_BOUNDS}, float? eps=None, "
        "ScalarType? scale_dtype=None, ScalarType? zero_point_dtype=None, bool keepdim=False) -> (Tensor, Tensor)",
        _choose,
    ),
    "quantize_affine": (
        "(Tensor input, SymInt[] block_size, Tensor scale, Tensor? zero_point, ScalarType output_dtype, "
        f"{_BOUNDS}) -> Tensor",
        _quantize,
    ),
    "dequantize_affine": (
        "(Tensor input, SymInt[] block_size, Tensor scale, Tensor? zero_point, ScalarType input_dtype, "
        f"{_BOUNDS}, ScalarType output_dtype=6) -> Tensor",
        _dequantize,
    ),
    "choose_scale_float8": (_CHOOSE_F8, format_primitives._choose_scale_float8),
    "choose_qparams_affine_float8": (_CHOOSE_F8, format_primitives._choose_scale_float8),
    "quantize_affine_float8": (_QUANTIZE_F8, format_primitives._quantize_affine_float8),
    "quantize_affine_float8_non_decomposed": (_QUANTIZE_F8, format_primitives._quantize_affine_float8),
    "dequantize_affine_float8": (_DEQUANTIZE_F8, format_primitives._dequantize_affine_float8),
    "dequantize_affine_float8_non_decomposed": (_DEQUANTIZE_F8, format_primitives._dequantize_affine_float8),
}

_LIBRARY: list[torch.library.Library] = []  # an operator lives as long as its library
_LOCK = Lock()


def define() -> None:
    """Define the operators that the namespace lacks. Repeated calls have no effect."""
    with _LOCK:
        if _LIBRARY:
            return
        library = torch.library.Library(NAMESPACE, "FRAGMENT")
        for name, (schema, function) in OPERATORS.items():
            if not hasattr(getattr(torch.ops, NAMESPACE), name):
                library.define(name + schema)
                library.impl(name, function, "CompositeImplicitAutograd")
        _LIBRARY.append(library)


def keep_in_exports() -> None:
    """Let the functions be one operator each in exported graphs."""
    define()
    qparams.EXPORTED.update(
        choose_qparams_affine=_choose_exported,
        quantize_affine=_quantize_exported,
        dequantize_affine=_dequantize_exported,
    )


def trace_in_exports() -> None:
    """Undo :func:`keep_in_exports`."""
    qparams.EXPORTED.clear()


# -- under torch.export ------------------------------------------------------------------------------------------------
# Arguments of the functions -> a call of the operator, or NotImplemented for arguments that it does not have.


def _choose_exported(
    input: Tensor, mapping_type: MappingType, *args: Any, keepdim: bool = False, preserve_zero: bool = True,
    zero_point_domain: Any = primitives.INT, **kwargs: Any,
) -> Any:  # fmt: skip
    if not preserve_zero or zero_point_domain is not primitives.INT or len(args) > 7:
        return NotImplemented
    return torch.ops.torchao.choose_qparams_affine(input, mapping_type.name, *args, keepdim=keepdim, **kwargs)


def _quantize_exported(*args: Any, zero_point_domain: Any = primitives.INT, **kwargs: Any) -> Any:
    if zero_point_domain is not primitives.INT or len(args) > 7:
        return NotImplemented
    return torch.ops.torchao.quantize_affine(*args, **kwargs)


def _dequantize_exported(*args: Any, zero_point_domain: Any = primitives.INT, **kwargs: Any) -> Any:
    if zero_point_domain is not primitives.INT or len(args) > 7:
        return NotImplemented
    return torch.ops.torchao.dequantize_affine(*args, **kwargs)

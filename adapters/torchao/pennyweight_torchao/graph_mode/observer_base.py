"""Base classes of observers: modules that see tensors, return them unchanged, and choose quantization parameters."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from .code_range import EPS, calculate_qmin_qmax, is_per_channel, range_qparams, validate_qmin_qmax

_DTYPES = (
    torch.qint8, torch.quint8, torch.quint4x2, torch.qint32, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.float8_e5m2, torch.float8_e4m3fn, torch.uint16,
)  # fmt: skip
_SCHEMES = (
    torch.per_tensor_affine, torch.per_tensor_symmetric, torch.per_channel_affine, torch.per_channel_symmetric,
    torch.per_channel_affine_float_qparams,
)  # fmt: skip


class PartialWrapper:
    """A class with some arguments bound: ``Observer.with_args(eps=..)``. Calling it makes an instance.

    callable_args: argument -> function without arguments, called for each instance.
    """

    def __init__(self, p: Any) -> None:
        self.p = p
        self.callable_args: dict[str, Callable[[], Any]] = {}

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        made = {name: make() for name, make in self.callable_args.items() if name not in keywords}
        return self.p(*args, **keywords, **made)

    def __repr__(self) -> str:
        return repr(self.p) + repr(self.callable_args)

    def with_args(self, *args: Any, **kwargs: Any) -> PartialWrapper:
        """Bind more arguments."""
        return bind(self, *args, **kwargs)

    def with_callable_args(self, **kwargs: Any) -> PartialWrapper:
        """Bind arguments that are computed for each instance."""
        result = PartialWrapper(self.p)
        result.callable_args = {**self.callable_args, **kwargs}
        return result


def bind(cls_or_self: Any, *args: Any, **kwargs: Any) -> PartialWrapper:
    """A factory with arguments bound."""
    return PartialWrapper(partial(cls_or_self, *args, **kwargs))


def bind_callable(cls_or_self: Any, **kwargs: Any) -> PartialWrapper:
    """A factory with arguments that are computed for each instance."""
    return PartialWrapper(partial(cls_or_self)).with_callable_args(**kwargs)


class ObserverBase(ABC, nn.Module):
    """An observer. dtype: of the codes. is_dynamic: parameters are computed from each input at run time."""

    def __init__(self, dtype: torch.dtype, is_dynamic: bool = False) -> None:
        super().__init__()
        self.dtype = dtype
        self.is_dynamic = is_dynamic

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Record ``x`` and return it."""

    @abstractmethod
    def calculate_qparams(self, **kwargs: Any) -> Any:
        """(scale, zero_point)."""

    with_args = classmethod(bind)
    with_callable_args = classmethod(bind_callable)


class SelfConverting(ABC, nn.Module):
    """An observer that replaces its own node in :func:`convert`, for operators other than those of per-tensor and
    per-channel codes."""

    @abstractmethod
    def forward(self, input: Tensor) -> Tensor:
        """Record the input and return it."""

    @abstractmethod
    def convert(self, model: GraphModule, observer_node: Node) -> None:
        """Replace ``observer_node``, which calls this module."""


class UniformQuantizationObserverBase(ObserverBase):
    """Base of observers with evenly spaced values; see :func:`pennyweight_torchao.graph_mode.code_range.range_qparams`.

    quant_min, quant_max: the codes used; None: all of the dtype. reduce_range: half of them. eps: the least scale,
    a buffer. Raises AssertionError for another dtype or qscheme, or a range of codes that does not fit.
    """

    _version = 3  # of the state dict: torch's observers count in the same way

    eps: Tensor

    def __init__(
        self, dtype: torch.dtype = torch.quint8, qscheme: torch.qscheme = torch.per_tensor_affine,
        reduce_range: bool = False, quant_min: int | None = None, quant_max: int | None = None,
        factory_kwargs: dict[str, Any] | None = None, eps: float = EPS, is_dynamic: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(dtype=dtype, is_dynamic=is_dynamic, **kwargs)
        if reduce_range:
            warnings.warn(
                "Please use quant_min and quant_max to specify the range for observers. reduce_range will be "
                "deprecated in a future release of PyTorch.",
                stacklevel=3,
            )
        assert qscheme in _SCHEMES, f"qscheme must be one of {_SCHEMES}, got {qscheme}"
        assert dtype in _DTYPES, f"Default Observer only works for {_DTYPES} data type, got {dtype}"
        self.qscheme, self.reduce_range = qscheme, reduce_range
        self.register_buffer("eps", torch.tensor([eps], **_factory(factory_kwargs)))
        self.has_customized_qrange = quant_min is not None and quant_max is not None
        if quant_min is not None and quant_max is not None:
            validate_qmin_qmax(quant_min, quant_max)
        self.quant_min, self.quant_max = calculate_qmin_qmax(
            quant_min, quant_max, self.has_customized_qrange, dtype, reduce_range
        )
        symmetric = qscheme in (torch.per_tensor_symmetric, torch.per_channel_symmetric)
        refuse(
            symmetric and reduce_range and dtype == torch.quint8,
            "Cannot reduce range for symmetric quantization for quint8: give quant_min and quant_max",
        )

    def _calculate_qparams(self, min_val: Tensor, max_val: Tensor) -> tuple[Tensor, Tensor]:
        return range_qparams(
            min_val, max_val, self.quant_min, self.quant_max, self.dtype, self.eps, self.has_customized_qrange,
            self.qscheme,
        )  # fmt: skip

    def _validate_qmin_qmax(self, quant_min: int, quant_max: int) -> None:
        validate_qmin_qmax(quant_min, quant_max)

    def reset_min_max_vals(self) -> None:
        """Forget what was recorded."""
        raise NotImplementedError(f"{type(self).__name__} records no minimum and maximum")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version") in (None, 1):  # before version 2, eps was not a buffer
            state_dict.setdefault(prefix + "eps", torch.tensor([EPS], dtype=torch.float32, device="cpu"))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def _factory(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """``factory_kwargs`` with torch's checks; float32 under any default dtype, so that statistics can be compared."""
    return {"dtype": torch.float32, **torch.nn.factory_kwargs(kwargs)}


def refuse(wrong: bool, message: str) -> None:
    """Raise NotImplementedError with the message if ``wrong``."""
    if wrong:
        raise NotImplementedError(message)


def channel_rows(x: Tensor, axis: int) -> Tensor:
    """x as [channels, everything else]."""
    return torch.flatten(x.transpose(0, axis), start_dim=1) if x.ndim > 1 else x.reshape(-1, 1)


def check_per_channel(name: str, qscheme: torch.qscheme, is_dynamic: bool) -> None:
    refuse(not is_per_channel(qscheme), f"{name} needs a per-channel qscheme, got {qscheme}")
    refuse(is_dynamic, f"{name} doesn't support dynamic quantization")

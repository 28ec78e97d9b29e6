"""Observers that compute nothing: fixed or derived parameters, placeholders, recordings."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .code_range import EPS, is_per_channel
from .observer_base import ObserverBase, refuse

__all__ = ["DerivedObserverOrFakeQuantize", "FixedQParamsObserver", "PlaceholderObserver"]


class _Silent(ObserverBase):
    """Returns the tensor; has no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def calculate_qparams(self, **kwargs: Any) -> Any:
        raise RuntimeError(f"calculate_qparams should not be called for {type(self).__name__}: it has no parameters")


class FixedQParamsObserver(ObserverBase):
    """Known parameters per tensor: buffers ``scale`` and ``zero_point``."""

    scale: Tensor
    zero_point: Tensor

    def __init__(
        self, scale: float, zero_point: int, dtype: torch.dtype = torch.quint8,
        qscheme: torch.qscheme = torch.per_tensor_affine, quant_min: int = 0, quant_max: int = 255,
        is_dynamic: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        refuse(is_dynamic, "FixedQParamsObserver doesn't support dynamic quantization")
        super().__init__(dtype=dtype, is_dynamic=is_dynamic, **kwargs)
        self.quant_min, self.quant_max, self.qscheme = quant_min, quant_max, qscheme
        self.register_buffer("scale", torch.tensor([scale], dtype=torch.float, device=torch.get_default_device()))
        self.register_buffer(
            "zero_point", torch.tensor([zero_point], dtype=torch.int, device=torch.get_default_device())
        )

    def forward(self, X: Tensor) -> Tensor:
        return X

    def calculate_qparams(self, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.scale, self.zero_point


class PlaceholderObserver(_Silent):
    """Says how a tensor is quantized without seeing it: dynamic quantization, or conversion to float16."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, custom_op_name: str = "", compute_dtype: torch.dtype | None = None,
        quant_min: int | None = None, quant_max: int | None = None, qscheme: torch.qscheme | None = None,
        eps: float | None = None, is_dynamic: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(dtype=dtype, is_dynamic=is_dynamic)
        self.qscheme = torch.per_tensor_affine if qscheme is None else qscheme
        self.quant_min, self.quant_max = quant_min, quant_max
        self.eps = EPS if eps is None else eps
        self.custom_op = custom_op_name
        if compute_dtype:
            warnings.warn(
                "Please use `is_dynamic` instead of `compute_dtype`. `compute_dtype` will be deprecated in a future "
                "release of PyTorch.",
                stacklevel=2,
            )

    def extra_repr(self) -> str:
        return f"dtype={self.dtype}, is_dynamic={self.is_dynamic}"


class DerivedObserverOrFakeQuantize(ObserverBase):
    """Parameters computed by ``derive_qparams_fn`` from other observers, ``obs_or_fqs``.

    Raises AssertionError if the qscheme is per channel and ``ch_axis`` is None.
    """

    def __init__(
        self, dtype: torch.dtype, obs_or_fqs: list[nn.Module],
        derive_qparams_fn: Callable[[list[nn.Module]], tuple[Tensor, Tensor]], quant_min: int | None = None,
        quant_max: int | None = None, qscheme: torch.qscheme | None = None, ch_axis: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(dtype)
        self.obs_or_fqs, self.derive_qparams_fn = obs_or_fqs, derive_qparams_fn
        self.quant_min, self.quant_max, self.qscheme, self.ch_axis = quant_min, quant_max, qscheme, ch_axis
        if is_per_channel(qscheme):
            assert ch_axis is not None, "Must provide a valid ch_axis if qscheme is per channel"

    def forward(self, x: Tensor) -> Tensor:
        return x

    def calculate_qparams(self, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.derive_qparams_fn(self.obs_or_fqs)

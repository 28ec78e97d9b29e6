"""A weight whose layer passes its input through a function of the user before the product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pennyweight.core.tensor import AffineQuantizedTensor as QT

from .base_tensor import TorchAOBaseTensor

__all__ = ["InputFunctionWeight"]


class InputFunctionWeight(TorchAOBaseTensor):
    """linear(x) = F.linear(input_quant_func(x, **quant_kwargs), original_weight_tensor).

    What ``to_linear_activation_quantized`` gives for a function that is not one of torchao's own, which become the
    activation of the weight.
    """

    tensor_data_names = ["original_weight_tensor"]  # noqa: RUF012
    tensor_attribute_names = ["input_quant_func", "quant_kwargs"]  # noqa: RUF012
    original_weight_tensor: Tensor

    def __new__(cls, original_weight_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        w = original_weight_tensor
        return torch.Tensor._make_wrapper_subclass(cls, w.shape, strides=w.stride(), dtype=w.dtype, device=w.device)

    def __init__(
        self, original_weight_tensor: Tensor, input_quant_func: Callable[..., Any], quant_kwargs: dict[str, Any]
    ) -> None:
        self.original_weight_tensor, self.input_quant_func = original_weight_tensor, input_quant_func
        self.quant_kwargs = quant_kwargs

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight as floats, without the input's function."""
        w: Any = self.original_weight_tensor
        return w.dequantize(dtype or self.dtype) if isinstance(w, QT) else w.to(dtype or self.dtype)


@InputFunctionWeight.implements_torch_function(F.linear)
def _linear(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    w = given["weight"]
    x = w.input_quant_func(given["input"], **w.quant_kwargs)
    return F.linear(x, w.original_weight_tensor, given.get("bias"))

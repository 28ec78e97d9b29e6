"""Linear layers with float8 scales per block: stored ones for inference, and dynamic ones for training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ....core.formats import E4M3
from ....core.spec import QuantSpec
from ....planning.configs import AOBaseConfig
from ....planning.module_handlers import register_quantize_module_handler
from ....training import Gemm, LowPrecisionLinear, Operand, Recipe, linear
from ..class_view import FLOAT8
from .functions import blockwise_fp8_gemm, fp8_blockwise_act_quant

__all__ = ["BlockwiseQuantLinear", "Float8BlockwiseLinear", "Float8BlockwiseLinearConfig", "fp8_blockwise_mm"]


def _recipe(block_size: int) -> Recipe:
    """Lines for inputs and gradients, squares for weights; float32 scales, where recipe "blockwise" has powers of 2."""
    line = Operand(QuantSpec(E4M3, (block_size,)))
    square = Operand(QuantSpec(E4M3, (block_size, block_size)))
    return Recipe("torchao.blockwise", Gemm(line, square), Gemm(line, square), Gemm(line, line))


class BlockwiseQuantLinear(nn.Module):
    """x · weightᵀ + bias with stored float8 codes and a scale for each square; inputs are quantized in lines.

    State dict: weight, float8 [N, K]; scale, float32 [N / block_size, K / block_size], rounded up; bias. A new layer is
    zero: load a state dict, or copy the results of :func:`fp8_blockwise_weight_quant`. The result is bfloat16.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, block_size: int = 128,
        dtype: torch.dtype = torch.float8_e4m3fn,
    ) -> None:  # fmt: skip
        super().__init__()
        assert dtype in FLOAT8, f"Unsupported dtype: {dtype}. Supported dtypes: {[*FLOAT8]}"
        self.in_features, self.out_features, self.block_size, self.dtype = in_features, out_features, block_size, dtype
        codes = torch.zeros(out_features, in_features, dtype=torch.uint8).view(dtype)
        self.weight = nn.Parameter(codes, requires_grad=False)
        sizes = (-(-n // block_size) for n in (out_features, in_features))
        self.scale = nn.Parameter(torch.ones(*sizes, dtype=torch.float32), requires_grad=False)
        self.weight.scale = self.scale  # type: ignore[attr-defined]
        self.bias = nn.Parameter(torch.zeros(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        codes, scale = fp8_blockwise_act_quant(x, self.block_size, self.dtype)
        y = blockwise_fp8_gemm(codes, scale, self.weight, self.scale, self.block_size)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"block_size={self.block_size}, dtype={self.dtype}"
        )


class fp8_blockwise_mm:
    """The products of :class:`Float8BlockwiseLinear` as a function."""

    @staticmethod
    def apply(
        x: Tensor, weight: Tensor, block_size: int = 128, out_dtype: torch.dtype = torch.bfloat16,
        use_triton: bool = False,
    ) -> Tensor:  # fmt: skip
        """x [.., K] · weight [N, K]ᵀ in ``out_dtype``, with its gradients. use_triton: accepted; the kernel is chosen
        from the table of products."""
        return linear(x, weight, None, _recipe(block_size)).to(out_dtype)


class Float8BlockwiseLinear(LowPrecisionLinear):
    """nn.Linear whose three products are computed in float8, with a scale for each ``block_size`` neighbours of inputs
    and gradients, and for each square of the weight. Of any size; the result has the dtype ``dtype``."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]

    def __init__(
        self, *args: Any, block_size: int = 128, dtype: torch.dtype = torch.bfloat16, use_triton: bool = False,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        assert dtype in self.supported_dtypes, f"Unsupported dtype: {dtype}. Supported dtypes: {self.supported_dtypes}"
        super().__init__(*args, recipe=_recipe(block_size), **kwargs)
        self.block_size, self.dtype, self.use_triton = block_size, dtype, use_triton

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).to(self.dtype)

    @classmethod
    def from_float(cls, mod: nn.Linear) -> Float8BlockwiseLinear:
        """A layer with the parameters of ``mod``, which are shared."""
        made = cls(mod.in_features, mod.out_features, False, device="meta")
        made.weight, made.bias = mod.weight, mod.bias
        return made.train(mod.training)


@dataclass(frozen=True)
class Float8BlockwiseLinearConfig(AOBaseConfig):
    """``quantize_`` makes a :class:`Float8BlockwiseLinear` of each linear layer."""


@register_quantize_module_handler(Float8BlockwiseLinearConfig)
def _to_blockwise(module: nn.Module, config: Float8BlockwiseLinearConfig) -> nn.Module:
    if not isinstance(module, nn.Linear):
        raise TypeError(f"Float8BlockwiseLinearConfig converts nn.Linear, got {type(module).__name__}; set filter_fn")
    return Float8BlockwiseLinear.from_float(module)

"""torchao's NF4Tensor (QLoRA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.formats import all_formats
from ...core.numerics import Parts
from ...core.spec import NF4_DOUBLE, QuantSpec
from ...core.tensor import AffineQuantizedTensor as QT
from .class_view import View

__all__ = ["NF4Tensor", "linear_nf4", "nf4_weight_only", "to_nf4"]


class NF4Tensor(View):
    """QLoRA's NF4: blocks of 64 codes of the flattened tensor; their scales, minus the mean, in int8."""

    tensor_data_names = ["quantized_scalers", "quantization_factor", "scaler_mean", "quantized_data", "nf4"]  # noqa: RUF012

    holds = staticmethod(lambda w: w.spec.format.name.startswith("nf4"))

    @classmethod
    def build(
        cls, tensor_meta: Any, block_size: int, n_blocks: int, scaler_block_size: int, quantized_scalers: Tensor,
        quantization_factor: Tensor, scaler_mean: Tensor, quantized_data: Tensor, nf4: Tensor,
    ) -> QT:  # fmt: skip
        """scaler = quantized_scalers / quantization_factor + scaler_mean; the first of two codes in a byte is high."""
        shape, dtype = tuple(tensor_meta.original_shape), tensor_meta.dtype
        if len(shape) != 2 or shape[-1] % block_size:
            raise NotImplementedError(
                f"NF4Tensor {list(shape)} in blocks of {block_size}: only 2-d, with whole blocks per row, is supported"
            )
        known = (fmt for fmt in all_formats() if fmt.kind == "table" and len(fmt.values) == 16)
        fmt = next((f for f in known if torch.equal(torch.tensor(f.values), nf4.float().cpu())), None)
        if fmt is None:
            raise ValueError(f"NF4Tensor with an unsupported table: {nf4.tolist()}")
        codes = torch.stack([quantized_data >> 4, quantized_data & 15], -1).reshape(shape)
        # Not stored as a nested quantized scale: its product with 1 / factor would differ in the last bits.
        ratio = quantized_scalers.view(-1, scaler_block_size) / quantization_factor.unsqueeze(-1)
        scale = (ratio.flatten().to(dtype) + scaler_mean).to(dtype).view(shape[0], -1)
        spec = QuantSpec(fmt, (block_size,), scale=dtype)
        return QT(Parts(codes, scale), spec, shape, dtype)

    @classmethod
    def restore(cls, state: dict[str, Any], shell: Tensor) -> QT:
        meta = _Meta(tuple(shell.shape), shell.dtype)
        names = ("block_size", "n_blocks", "scaler_block_size", *cls.tensor_data_names)
        return cls.build(meta, **{name: state[name] for name in names})

    @classmethod
    def from_tensor(cls, inpt_tensor: Tensor, block_size: int = 64, scaler_block_size: int = 256) -> QT:
        """Nearest normal float of each element over the absmax of its block; scales in 8 bits, in their own blocks."""
        scale = NF4_DOUBLE.scale
        assert isinstance(scale, QuantSpec)
        spec = NF4_DOUBLE.with_(block=(block_size,), scale=scale.with_(block=(scaler_block_size,)))
        return QT.from_float(inpt_tensor, spec)


@dataclass(frozen=True)
class _Meta:
    original_shape: tuple[int, ...]
    dtype: torch.dtype


def to_nf4(tensor: Tensor, block_size: int = 64, scaler_block_size: int = 256) -> QT:
    """``tensor`` in 4-bit normal floats (QLoRA, Dettmers et al. 2023), with scales of 8 bits."""
    return NF4Tensor.from_tensor(tensor, block_size, scaler_block_size)


def nf4_weight_only(block_size: int = 64, scaler_block_size: int = 256) -> Any:
    """A function that converts a module's weight to NF4, accepted by quantize_ as in torchao's releases of that
    time."""

    def apply(module: Any) -> Any:
        module.weight = torch.nn.Parameter(to_nf4(module.weight.detach(), block_size, scaler_block_size), False)
        return module

    return apply


def linear_nf4(input: Tensor, weight: Tensor) -> Tensor:
    """input [.., K] @ weight [N, K].T; the gradient goes to the input."""
    return F.linear(input, weight)

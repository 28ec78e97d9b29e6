"""DoRA: a frozen weight with a trainable low-rank update and a trainable norm for each output (Liu et al. 2024)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["BNBDoRALinear", "DoRALayer", "DoRALinear", "HQQDoRALinear"]


class DoRALayer(nn.Module):
    """The low-rank update: lora_A [rank, in] random, with deviation 1 / sqrt(rank), lora_B [out, rank] zero."""

    def __init__(
        self, in_features: int, out_features: int, lora_rank: int, device: Any, dtype: torch.dtype, *args: Any,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.lora_A = nn.Linear(in_features, lora_rank, bias=False, device=device, dtype=dtype)
        self.lora_B = nn.Linear(lora_rank, out_features, bias=False, device=device, dtype=dtype)
        nn.init.normal_(self.lora_A.weight, std=lora_rank**-0.5)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor, base_weight: Tensor) -> tuple[Tensor, Tensor]:
        """(B A x, norms of the rows of base_weight + B A, which have no gradient: DoRA, section 4.3)."""
        whole = base_weight + self.lora_B.weight @ self.lora_A.weight
        return self.lora_B(self.lora_A(x)), torch.linalg.vector_norm(whole, dim=1).detach()


class DoRALinear(nn.Module):
    """y = (x W^T + x A^T B^T) magnitude_vec / |W + B A|, with the norm of each row; no bias.

    base_layer: a linear layer, also with a quantized weight (NF4 of torchao or bitsandbytes, HQQ, int8, ..); freeze its
    parameters if they are floats. The gradient flows through the norm, as in torchao's layer. ``magnitude_vec`` begins
    as the norms of W, so that the layer computes what ``base_layer`` does without its bias.
    """

    def __init__(self, base_layer: Any, lora_rank: int, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.base_layer = base_layer
        weight = self.dequantize()
        dtype = getattr(base_layer, "compute_dtype", None) or weight.dtype
        self.magnitude_vec = nn.Parameter(torch.linalg.vector_norm(weight.detach(), dim=1))
        outputs, inputs = weight.shape
        self.dora_layer = DoRALayer(inputs, outputs, lora_rank, weight.device, dtype, *args, **kwargs)

    def dequantize(self) -> Tensor:
        """The weight of the base layer as floats [out, in]."""
        w = self.base_layer.weight
        if hasattr(w, "quant_state"):  # bitsandbytes
            return _bitsandbytes_weight(w)
        return w if type(w) in (Tensor, nn.Parameter) else w.dequantize()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x: [tokens, in] or [batch, tokens, in]."""
        if x.ndim not in (2, 3):
            raise AssertionError(f"Expected 2D or 3D input, got {list(x.shape)}")
        weight = self.dequantize()
        a, b = self.dora_layer.lora_A.weight, self.dora_layer.lora_B.weight
        scale = self.magnitude_vec / torch.linalg.vector_norm(weight + b @ a, dim=1)
        return (x @ weight.T + (x @ a.T) @ b.T) * scale

    def forward_fused(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The same as :meth:`forward`: torchao's fused kernels are for GPUs."""
        return self.forward(x)

    def forward_instrumented(self, x: Tensor, *args: Any, annotation_ctx: Any, **kwargs: Any) -> Tensor:
        """:meth:`forward`, without a gradient of the norm, with its parts in contexts of a profiler."""
        with annotation_ctx("##dora_forward"):
            with annotation_ctx("##base_layer"):
                result = x @ self.dequantize().T
            with annotation_ctx("##dora_layer"):
                output, norm = self.dora_layer(x, self.dequantize())
            with annotation_ctx("##dora_rescale"):
                return (result + output) / norm * self.magnitude_vec


class BNBDoRALinear(DoRALinear):
    """:class:`DoRALinear` over bitsandbytes' Linear4bit."""

    def dequantize(self) -> Tensor:
        return _bitsandbytes_weight(self.base_layer.weight)


class HQQDoRALinear(DoRALinear):
    """:class:`DoRALinear` over a layer with ``dequantize()``, such as the hqq package's HQQLinear."""

    def dequantize(self) -> Tensor:
        return self.base_layer.dequantize()


def _bitsandbytes_weight(w: Any) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(w.data, w.quant_state)

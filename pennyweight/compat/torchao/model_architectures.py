"""Small models for tests and benchmarks, with the names and parameters that torchao's have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "ConvWithSharedWeightInExportedModel", "LNLinearActivationModel", "LlamaModelsLlama4Experts", "RMSNorm",
    "ToyLinearModel", "ToySingleLinearModel", "ToyTwoLinearModel", "TransformerBlock", "create_model_and_input_data",
]  # fmt: skip

ACTIVATIONS = {
    "gelu": nn.GELU,
    "hardswish": nn.Hardswish,
    "leakyrelu": nn.LeakyReLU,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
}


class _Chain(nn.Module):
    """linear1, linear2, .. one after the other, and inputs that fit them."""

    def __init__(self, dims: tuple[int, ...], dtype: Any, device: Any, has_bias: bool) -> None:
        super().__init__()
        self.dtype, self.device = dtype, device
        self.input_dim, self.depth = dims[0], len(dims) - 1
        for i in range(self.depth):
            linear = nn.Linear(dims[i], dims[i + 1], bias=has_bias, dtype=dtype, device=device)
            self.add_module(f"linear{i + 1}", linear)

    def example_inputs(self, batch_size: int = 1) -> tuple[Tensor]:
        return (torch.randn(batch_size, self.input_dim, dtype=self.dtype, device=self.device),)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.depth):
            x = getattr(self, f"linear{i + 1}")(x)
        return x


class ToySingleLinearModel(_Chain):
    """``linear1``."""

    def __init__(
        self, input_dim: int, output_dim: int, dtype: Any = None, device: Any = None, has_bias: bool = False
    ) -> None:
        super().__init__((input_dim, output_dim), dtype, device, has_bias)


class ToyTwoLinearModel(_Chain):
    """``linear1`` and ``linear2``, with nothing between them."""

    def __init__(
        self, input_dim: int, hidden_dim: int, output_dim: int, dtype: Any = None, device: Any = None,
        has_bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__((input_dim, hidden_dim, output_dim), dtype, device, has_bias)


class ToyLinearModel(_Chain):
    """``linear1``, as torchao up to 0.13 had it."""

    def __init__(self, k: int = 64, n: int = 32, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__((k, n), dtype, None, False)


class ConvWithSharedWeightInExportedModel(nn.Module):
    """One convolution, batch norm and ReLU over each of ``n_chunks`` groups of channels."""

    def __init__(
        self, n_chunks: int, in_channels: int, out_channels: int, kernel_size: int = 3, stride: int = 1,
        padding: int = 1, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.n_chunks = n_chunks
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, bias=bias)
        self.bn = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.relu(self.bn(self.conv(part))) for part in x.chunk(self.n_chunks, dim=1)], dim=1)


class LNLinearActivationModel(nn.Module):
    """Layer norm without parameters, a linear layer without bias, and an activation from :data:`ACTIVATIONS`.

    Raises ValueError for the name of another one.
    """

    def __init__(
        self, fc_dim1: int, fc_dim2: int, dtype: torch.dtype = torch.bfloat16, activation: str = "sigmoid"
    ) -> None:
        super().__init__()
        if activation.lower() not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}; it is one of {', '.join(ACTIVATIONS)}")
        self.ln = nn.LayerNorm(fc_dim1, elementwise_affine=False)
        self.fc = nn.Linear(fc_dim1, fc_dim2, bias=False, dtype=dtype)
        self.activation = ACTIVATIONS[activation.lower()]()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.fc(self.ln(x)))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last axis, the quotient in float32."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class TransformerBlock(nn.Module):
    """Attention over the whole sequence and an MLP, each behind a norm and beside a residual. x [batch, seq, dim]."""

    def __init__(
        self, hidden_dim: int, num_heads: int = 8, mlp_ratio: float = 4, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        self.hidden_dim, self.num_heads, self.head_dim = hidden_dim, num_heads, hidden_dim // num_heads
        self.mlp_ratio, self.mlp_hidden_dim = mlp_ratio, int(hidden_dim * mlp_ratio)
        self.qkv = nn.Linear(hidden_dim, 3 * hidden_dim, bias=False, dtype=dtype)
        self.proj = nn.Linear(hidden_dim, hidden_dim, bias=False, dtype=dtype)
        self.mlp_fc1 = nn.Linear(hidden_dim, self.mlp_hidden_dim, bias=False, dtype=dtype)
        self.mlp_fc2 = nn.Linear(self.mlp_hidden_dim, hidden_dim, bias=False, dtype=dtype)
        self.norm1, self.norm2 = RMSNorm(hidden_dim).to(dtype), RMSNorm(hidden_dim).to(dtype)
        self.activation = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp_fc2(self.activation(self.mlp_fc1(self.norm2(x))))


def create_model_and_input_data(
    model_type: str, m: int, k: int, n: int, high_precision_dtype: torch.dtype = torch.bfloat16, device: Any = None,
    activation: str = "relu",
) -> tuple[nn.Module, Tensor]:  # fmt: skip
    """A model and an input for it: "linear" [m, k] → [m, n], "ln_linear" or "ln_linear_gelu" likewise, or
    "transformer_block" over [m, 16, k]. ``device``: CUDA where there is a GPU, else the CPU. Raises ValueError for
    another type."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model: nn.Module
    shape: tuple[int, ...] = (m, k)
    if model_type == "linear":
        model = ToySingleLinearModel(k, n, device=device, dtype=high_precision_dtype)
    elif model_type == "ln_linear" or model_type.startswith("ln_linear_"):
        name = model_type.removeprefix("ln_linear").removeprefix("_") or activation
        model = LNLinearActivationModel(k, n, high_precision_dtype, activation=name).to(device)
    elif model_type == "transformer_block":
        model = TransformerBlock(k, num_heads=8, mlp_ratio=4, dtype=high_precision_dtype).to(device)
        shape = (m, 16, k)
    else:
        raise ValueError(f"unknown model type {model_type!r}; it is linear, ln_linear, or transformer_block")
    return model, torch.randn(shape, device=device, dtype=high_precision_dtype)


class LlamaModelsLlama4Experts(nn.Module):
    """Gated experts, each for an equal part of the tokens: (silu(x·w1) ∘ (x·w3))·w2 with w1, w3 [E, dim, hidden]."""

    def __init__(self, num_local_experts: int, dim: int, hidden_dim: int, dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        self.num_local_experts, self.dim = num_local_experts, dim

        def random(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(num_local_experts, *shape, dtype=dtype, device=device))

        self.w1, self.w2, self.w3 = random(dim, hidden_dim), random(hidden_dim, dim), random(dim, hidden_dim)

    def forward(self, routed_in_egD: Tensor) -> Tensor:
        x = routed_in_egD.view(self.num_local_experts, -1, self.dim)
        hidden = F.silu(torch.bmm(x, self.w1)) * torch.bmm(x, self.w3)
        return torch.bmm(hidden, self.w2).view(-1, self.dim)

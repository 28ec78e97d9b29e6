"""torchao.prototype.spinquant: SpinQuant's rotations of a Llama in gpt-fast's form, without data.

The model has ``tok_embeddings``, ``layers`` with ``attention`` (``wqkv``, or ``wq``, ``wk``, ``wv``; ``wo``),
``feed_forward`` (``w1``, ``w2``, ``w3``), ``attention_norm``, ``ffn_norm``, then ``norm`` and ``output``. Its
``config`` has ``dim``, ``head_dim``, ``n_local_heads``, ``intermediate_size``. ``algorithm=["rotate", ..]`` of
pennyweight.quantize_ finds the structure of any model, and learns the rotation.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .hadamard import apply_exact_had_to_linear, get_hadK, matmul_hadU, random_hadamard_matrix

__all__ = [
    "HadamardMultiplier", "apply_spinquant", "apply_spinquant_r1", "apply_spinquant_r2", "apply_spinquant_r4",
    "fuse_layernorm_into_linear",
]  # fmt: skip


class HadamardMultiplier(nn.Module):
    """The Hadamard transform of its input; ``use_fp32``: computed in float32."""

    had_K: Tensor

    def __init__(self, had_K: Tensor, K: int, use_fp32: bool = False) -> None:
        super().__init__()
        assert had_K is not None, "had_K must be provided"
        self.register_buffer("had_K", had_K)
        self.K, self.use_fp32 = K, use_fp32

    def forward(self, x: Tensor) -> Tensor:
        return matmul_hadU(x.float() if self.use_fp32 else x, self.had_K, self.K).to(x.dtype)


def apply_spinquant(
    model: nn.Module, use_r1: bool = False, use_r2: bool = False, use_r4: bool = True,
    pretrained_rotation_path: Any = None, qkv_split: bool = False,
) -> None:  # fmt: skip
    """Rotate a model in place; its function stays the same.

    use_r1  the residual stream    use_r2  the values of attention, per head
    use_r4  the inputs of ``w2``, at run time: ``w2`` becomes ``Sequential(HadamardMultiplier, w2)``
    pretrained_rotation_path  a .bin file of SpinQuant with R1 and the R2 of each layer; default: random Hadamard
    qkv_split  whether ``attention`` has ``wq``, ``wk``, ``wv``
    """
    device = next(model.parameters()).device
    if pretrained_rotation_path is not None:
        path = Path(pretrained_rotation_path)
        assert path.is_file(), f"Pretrained rotation path does not exist: {path}"
        assert path.suffix == ".bin", f"Expected a .bin file, got {path}"
    if use_r1:
        fuse_layernorm_into_linear(model, qkv_split)
        apply_spinquant_r1(model, device, pretrained_rotation_path, qkv_split)
    if use_r2:
        apply_spinquant_r2(model, device, pretrained_rotation_path, qkv_split)
    if use_r4:
        apply_spinquant_r4(model, device)


def _pretrained(path: Any, key: str, size: int, device: Any) -> Tensor:
    rotation = torch.load(path, map_location=device, weights_only=True)[key].to(torch.float64)
    assert rotation.shape == (size, size), f"{path}: {key} is {list(rotation.shape)}, the model needs {[size, size]}"
    return rotation


@torch.no_grad()
def apply_spinquant_r1(model: Any, device: Any, pretrained_rotation_path: Any = None, qkv_split: bool = False) -> None:
    """Rotate the residual stream. The norms must not scale: call :func:`fuse_layernorm_into_linear` first."""
    size = model.config.dim
    r = random_hadamard_matrix(size, device)
    if pretrained_rotation_path is not None:
        r = _pretrained(pretrained_rotation_path, "R1", size, device)
    for module in (model.tok_embeddings, model.output):
        _reads(module, r)
    for layer in model.layers:
        for module in (*_qkv(layer.attention, qkv_split), layer.feed_forward.w1, layer.feed_forward.w3):
            _reads(module, r)
        _writes(layer.attention.wo, r)
        _writes(_down(layer), r)


def _qkv(attention: Any, qkv_split: bool) -> list[Any]:
    return [attention.wq, attention.wk, attention.wv] if qkv_split else [attention.wqkv]


def _down(layer: Any) -> Any:
    """``w2``, also behind a HadamardMultiplier."""
    w2 = layer.feed_forward.w2
    return w2[1] if isinstance(w2, nn.Sequential) else w2


def _reads(module: Any, r: Tensor) -> None:
    module.weight.data = (module.weight.data.double() @ r).to(module.weight.dtype)


def _writes(module: Any, r: Tensor) -> None:
    module.weight.data = (r.t() @ module.weight.data.double()).to(module.weight.dtype)
    if module.bias is not None:
        module.bias.data = (r.t() @ module.bias.data.double()).to(module.bias.dtype)


@torch.no_grad()
def apply_spinquant_r2(model: Any, device: Any, pretrained_rotation_path: Any = None, qkv_split: bool = False) -> None:
    """Rotate the values of each head, and the inputs of ``wo`` with them."""
    size = model.config.head_dim
    for i, layer in enumerate(model.layers):
        r = random_hadamard_matrix(size, device)
        if pretrained_rotation_path is not None:
            r = _pretrained(pretrained_rotation_path, f"model.layers.{i}.self_attn.R2", size, device)
        attention = layer.attention
        apply_exact_had_to_linear(attention.wo, size, False, r)
        if qkv_split:
            apply_exact_had_to_linear(attention.wv, size, True, r)
            continue
        fused = attention.wqkv
        rows = model.config.n_local_heads * size  # of the values, which come last
        values = nn.Linear(fused.in_features, rows, fused.bias is not None, device="meta")
        values.weight = nn.Parameter(fused.weight.data[-rows:].clone(), requires_grad=False)
        if fused.bias is not None:
            values.bias = nn.Parameter(fused.bias.data[-rows:].clone(), requires_grad=False)
            apply_exact_had_to_linear(values, size, True, r)
            fused.bias.data[-rows:] = values.bias.data
        else:
            apply_exact_had_to_linear(values, size, True, r)
        fused.weight.data[-rows:] = values.weight.data


@torch.no_grad()
def apply_spinquant_r4(model: Any, device: Any) -> None:
    """Rotate the inputs of ``w2`` at run time."""
    had_k, k = get_hadK(model.config.intermediate_size)
    for layer in model.layers:
        apply_exact_had_to_linear(layer.feed_forward.w2, -1, False)
        multiplier = HadamardMultiplier(had_k.to(device), k)
        layer.feed_forward.w2 = nn.Sequential(multiplier, layer.feed_forward.w2)


@torch.no_grad()
def fuse_layernorm_into_linear(model: Any, qkv_split: bool = False) -> None:
    """Move the norms' weights into the linear layers after them, so that the residual stream can be rotated.

    torchao also subtracts the mean of each embedding, which changes the outputs of a model with RMSNorm; not here.
    """
    for layer in model.layers:
        _fuse(layer.ffn_norm, [layer.feed_forward.w1, layer.feed_forward.w3])
        _fuse(layer.attention_norm, _qkv(layer.attention, qkv_split))
    _fuse(model.norm, [model.output])


def _fuse(norm: Any, readers: Iterable[Any]) -> None:
    for reader in readers:
        w = reader.weight.data.double()
        shift = getattr(norm, "bias", None)
        if shift is not None:
            more = w @ shift.double()
            if reader.bias is None:
                reader.bias = nn.Parameter(torch.zeros_like(more, dtype=reader.weight.dtype))
            reader.bias.data = (reader.bias.data.double() + more).to(reader.weight.dtype)
        reader.weight.data = (w * norm.weight.double()).to(reader.weight.dtype)
    norm.weight.data = torch.ones_like(norm.weight.data)
    if getattr(norm, "bias", None) is not None:
        norm.bias.data = torch.zeros_like(norm.bias.data)

"""torchao.prototype.spinquant: SpinQuant's rotations of a Llama in gpt-fast's form, without data.

The model has ``tok_embeddings``, ``layers`` with ``attention`` (``wqkv``, or ``wq``, ``wk``, ``wv``; ``wo``),
``feed_forward`` (``w1``, ``w2``, ``w3``), ``attention_norm``, ``ffn_norm``, then ``norm`` and ``output``. Its
``config`` has ``dim`` and ``head_dim``. ``algorithm="rotate"`` of pennyweight.quantize_ finds the structure of any
model, and learns the rotation or rotates at run time if asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pennyweight.algorithms.rewrites.hadamard import rotation

__all__ = ["apply_spinquant"]


@torch.no_grad()
def apply_spinquant(
    model: nn.Module, use_r1: bool = False, use_r2: bool = False, use_r4: bool = True,
    pretrained_rotation_path: Any = None, qkv_split: bool = False,
) -> None:  # fmt: skip
    """Rotate the weights of a model in place; its function stays the same.

    use_r1  the residual stream. Weights of norms move into the layers after them first. torchao also subtracts the mean
            of each embedding there, which changes the outputs of a model with RMSNorm; not here
    use_r2  the values of attention, per head
    use_r4  True raises NotImplementedError
    pretrained_rotation_path  a .bin file of SpinQuant with R1 and the R2 of each layer; default: random Hadamard
    qkv_split  whether ``attention`` has ``wq``, ``wk``, ``wv``
    """
    if use_r4:
        raise NotImplementedError(
            "apply_spinquant rotates weights only: pass use_r4=False, or use pennyweight.quantize_(model, config, "
            'algorithm=[{"rotate": {"online": True}}]), which rotates inputs at run time'
        )
    saved = None
    if pretrained_rotation_path is not None:
        path = Path(pretrained_rotation_path)
        assert path.is_file(), f"Pretrained rotation path does not exist: {path}"
        assert path.suffix == ".bin", f"Expected a .bin file, got {path}"
        saved = torch.load(path, map_location="cpu", weights_only=True)
    config: Any = model.config
    if use_r1:
        _fold_norms(model, qkv_split)
        _rotate_residual(model, _rotation(saved, "R1", config.dim), qkv_split)
    if use_r2:
        for i, layer in enumerate(model.layers):  # type: ignore[arg-type]
            r = _rotation(saved, f"model.layers.{i}.self_attn.R2", config.head_dim)
            _rotate_values(layer.attention, r, qkv_split)


def _rotation(saved: dict[str, Tensor] | None, key: str, size: int) -> Tensor:
    """A rotation of a file, or a random one: float64 [size, size]."""
    if saved is None:
        return rotation(size, 0)
    r = saved[key].to(torch.float64)
    assert r.shape == (size, size), f"{key} is {list(r.shape)}, the model needs {[size, size]}"
    return r


def _qkv(attention: Any, qkv_split: bool) -> list[Any]:
    return [attention.wq, attention.wk, attention.wv] if qkv_split else [attention.wqkv]


def _set(parameter: Any, value: Tensor) -> None:
    parameter.data = value.to(parameter.dtype)


def _fold_norms(model: Any, qkv_split: bool) -> None:
    """Move the norms' weights into the layers after them, so that the residual stream can be rotated."""
    for layer in model.layers:
        _fold(layer.ffn_norm, [layer.feed_forward.w1, layer.feed_forward.w3])
        _fold(layer.attention_norm, _qkv(layer.attention, qkv_split))
    _fold(model.norm, [model.output])


def _fold(norm: Any, readers: Iterable[Any]) -> None:
    for reader in readers:
        _set(reader.weight, reader.weight.double() * norm.weight.double())
    norm.weight.data = torch.ones_like(norm.weight)


def _rotate_residual(model: Any, r: Tensor, qkv_split: bool) -> None:
    """Rotate what writes to the residual stream, and what reads it."""
    reading, writing = [model.tok_embeddings, model.output], []
    for layer in model.layers:
        reading += [*_qkv(layer.attention, qkv_split), layer.feed_forward.w1, layer.feed_forward.w3]
        writing += [layer.attention.wo, layer.feed_forward.w2]
    for module in reading:
        _set(module.weight, module.weight.double() @ r.to(module.weight.device))
    for module in writing:
        for p in (module.weight, module.bias):
            if p is not None:
                _set(p, r.t().to(p.device) @ p.double())


def _rotate_values(attention: Any, r: Tensor, qkv_split: bool) -> None:
    """Rotate the values of each head, and the inputs of ``wo`` with them."""
    size = r.shape[0]
    wo, writer = attention.wo.weight, _qkv(attention, qkv_split)[-1]
    r = r.to(wo.device)
    _set(wo, (wo.double().unflatten(1, (-1, size)) @ r).flatten(1))
    outputs = writer.weight.shape[0]
    # the values are the last rows of a joint layer; the queries have as many as wo has inputs, keys as many as values
    rows = outputs if qkv_split else (outputs - wo.shape[1]) // 2
    for p in (writer.weight, writer.bias):
        if p is not None:
            values = p.data[-rows:].double().unflatten(0, (-1, size))
            p.data[-rows:] = torch.einsum("hd..., de->he...", values, r).flatten(0, 1).to(p.dtype)

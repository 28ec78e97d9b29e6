"""Float weights of a file in another library's format, by the formulas of the formats, with numpy alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of output i of a word


def decode(folder: Path) -> dict[str, Tensor]:
    """{parameter name: float32 values} of every tensor of a written folder."""
    method = json.loads((folder / "config.json").read_text())["quantization_config"]
    kind = method["quant_method"]
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stored.items():
        layer, _, part = name.rpartition(".")
        layers.setdefault(layer, {})[part] = tensor
    out: dict[str, Tensor] = {}
    for layer, parts in layers.items():
        if "qweight" in parts:
            weight = (awq if kind == "awq" else gptq)(parts, method)
        elif "weight_packed" in parts or "weight_scale" in parts:
            weight = compressed(parts)
        elif "weight_scale_inv" in parts:
            weight = blocks(parts)
        else:
            out |= {f"{layer}.{part}": tensor.float() for part, tensor in parts.items()}
            continue
        out[f"{layer}.weight"] = torch.from_numpy(np.ascontiguousarray(weight, np.float32))
        if "bias" in parts:
            out[f"{layer}.bias"] = parts["bias"].float()
    return out


def bits_of(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """int32 words [.., w] as a little-endian bit stream -> ``count`` codes [.., count]."""
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    some = stream[..., : count * bits].reshape(*words.shape[:-1], count, bits)
    return (some.astype(np.int64) << np.arange(bits)).sum(-1)


def gptq(parts: dict[str, Tensor], method: dict[str, object]) -> np.ndarray:
    """weight[o, i] = (code[i, o] - zero[g, o]) * scale[g, o], g = g_idx[i]; version 1 stores zero - 1."""
    g_idx, scales = parts["g_idx"].numpy(), parts["scales"].float().numpy()
    inputs, outputs = len(g_idx), scales.shape[1]
    bits = parts["qweight"].shape[0] * 32 // inputs
    codes = bits_of(parts["qweight"].t().contiguous().numpy(), bits, inputs)
    zeros = bits_of(parts["qzeros"].numpy(), bits, outputs)
    if method.get("checkpoint_format") != "gptq_v2":
        zeros = (zeros + 1) % (1 << bits)
    return (codes.T - zeros[g_idx]).T * scales[g_idx].T


def awq(parts: dict[str, Tensor], method: dict[str, object]) -> np.ndarray:
    """weight[o, i] = (code[i, o] - zero[g, o]) * scale[g, o], eight outputs per word in AWQ's order."""
    scales = parts["scales"].float().numpy()

    def nibbles(words: Tensor) -> np.ndarray:
        w = words.numpy().astype(np.int64) & 0xFFFFFFFF
        return np.stack([(w >> 4 * i) & 15 for i in AWQ_ORDER], -1).reshape(len(w), -1)

    codes, zeros = nibbles(parts["qweight"]), nibbles(parts["qzeros"])
    group = len(codes) // len(scales)
    return ((codes - zeros.repeat(group, 0)) * scales.repeat(group, 0)).T


def compressed(parts: dict[str, Tensor]) -> np.ndarray:
    """weight = (code - zero) * scale, codes signed, scales per tensor, row, group or block."""
    scale = parts["weight_scale"]
    if "weight_global_scale" in parts or (scale.dtype is torch.uint8 and "weight_packed" in parts):
        packed = parts["weight_packed"].numpy()
        values = E2M1[np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)]
        if "weight_global_scale" in parts:
            each = scale.float().numpy() / parts["weight_global_scale"].numpy()
        else:
            each = np.exp2(scale.numpy().astype(np.float32) - 127)
        return values * spread(each, values.shape)
    if "weight_packed" in parts:
        rows, columns = parts["weight_shape"].tolist()
        bits = parts["weight_packed"].shape[1] * 32 // columns
        codes = bits_of(parts["weight_packed"].numpy(), bits, columns) - (1 << (bits - 1))
        zero = parts.get("weight_zero_point")
        if zero is not None:
            zeros = bits_of(zero.t().contiguous().numpy(), bits, rows).T - (1 << (bits - 1))
            codes = codes - spread(zeros, codes.shape)
    else:
        codes = parts["weight"].float().numpy()
    each = np.exp2(scale.numpy().astype(np.float32) - 127) if scale.dtype is torch.uint8 else scale.float().numpy()
    return codes * spread(each, codes.shape)


def blocks(parts: dict[str, Tensor]) -> np.ndarray:
    """weight = code * scale of its block of 128 x 128."""
    codes, scale = parts["weight"].float().numpy(), parts["weight_scale_inv"].float().numpy()
    rows, columns = codes.shape
    return codes * scale.repeat(128, 0)[:rows].repeat(128, 1)[:, :columns]


def spread(part: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A part per tensor, row or group in the shape of the weight."""
    if part.size == 1:
        return np.broadcast_to(part.reshape(1, 1), shape)
    part = part.reshape(len(part), -1)
    return part.repeat(shape[0] // len(part), 0).repeat(shape[1] // part.shape[1], 1)

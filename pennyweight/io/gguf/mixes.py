"""The named mixes of llama.cpp ("Q4_K_M"): which type each tensor of a model gets.

The rules are those of llama.cpp's quantizer (src/llama-quant.cpp, 2026): tensors that are small for their influence, or
in the first and last layers, get more bits. They depend on names, sizes and a few numbers of the config, never on
values. The tests compare every tensor with llama.cpp's choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .blocks import TYPES
from .config import experts_of

PURE = "-PURE"  # after the name of a type: every matrix of that type


@dataclass(frozen=True)
class Mix:
    """A mix: its name, the type of most tensors, and its number in ``general.file_type`` (enum llama_ftype)."""

    name: str
    base: str
    file_type: int


_MIXES = (
    Mix("Q4_0", "Q4_0", 2),
    Mix("Q4_1", "Q4_1", 3),
    Mix("Q8_0", "Q8_0", 7),
    Mix("Q5_0", "Q5_0", 8),
    Mix("Q5_1", "Q5_1", 9),
    Mix("Q2_K", "Q2_K", 10),
    Mix("Q3_K_S", "Q3_K", 11),
    Mix("Q3_K_M", "Q3_K", 12),
    Mix("Q3_K_L", "Q3_K", 13),
    Mix("Q4_K_S", "Q4_K", 14),
    Mix("Q4_K_M", "Q4_K", 15),
    Mix("Q5_K_S", "Q5_K", 16),
    Mix("Q5_K_M", "Q5_K", 17),
    Mix("Q6_K", "Q6_K", 18),
    Mix("Q2_K_S", "Q2_K", 21),
    Mix("IQ4_NL", "IQ4_NL", 25),
    Mix("IQ4_XS", "IQ4_XS", 30),
    Mix("TQ1_0", "TQ1_0", 36),
    Mix("TQ2_0", "TQ2_0", 37),
    Mix("MXFP4_MOE", "MXFP4", 38),
)
MIXES = {mix.name: mix for mix in _MIXES}
# The type for rows that are not whole blocks of 256; where rows are not whole blocks of 32 either, F16
_FALLBACK = {
    "Q2_K": "Q4_0", "Q3_K": "Q4_0", "TQ1_0": "Q4_0", "TQ2_0": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
    "IQ4_XS": "IQ4_NL",
}  # fmt: skip
# The role of a tensor: the first of these that its name contains
_ROLES = (
    ("attn_qkv.weight", "attn_v"), ("attn_v.weight", "attn_v"), ("attn_k.weight", "attn_k"),
    ("attn_output.weight", "attn_output"), ("ffn_down", "ffn_down"),
)  # fmt: skip
_EIGHT_EXPERTS_OUTPUT = ("Q2_K", "Q3_K_S", "Q3_K_M", "IQ4_NL", "IQ4_XS", "Q4_K_S", "Q4_K_M")


@dataclass(frozen=True)
class _Model:
    """What the rules depend on. sharing: query heads per key head; imatrix: whether there is an importance matrix."""

    layers: int
    sharing: int
    experts: int
    large: bool
    imatrix: bool


def mix_types(
    mix: Mix, shapes: Mapping[str, tuple[int, ...]], arch: str, config: Mapping[str, Any], imatrix: bool
) -> dict[str, str]:
    """The type of each tensor, by its name in the file.

    shapes: of the tensors that are quantized (no norms, biases or routers), contracted axis last. arch:
    ``general.architecture``; config: of Hugging Face. Raises ValueError if the mix requires an importance matrix.
    """
    heads = config.get("num_attention_heads") or 1
    layers = int(config.get("num_hidden_layers") or 0)
    sharing = heads // (config.get("num_key_value_heads") or heads)
    # llama.cpp recognizes the models of 70 B by their layers
    large = layers == 80 and (arch == "qwen2" or (arch == "llama" and sharing > 1))
    model = _Model(layers, sharing, experts_of(config) or 0, large, imatrix)
    tied = "output.weight" not in shapes
    values = [name for name in shapes if _role(name) == "attn_v"]
    values.sort(key=_layer)
    downs = sorted((name for name in shapes if _role(name) == "ffn_down"), key=lambda name: (_layer(name), name))
    out = {}
    for name, shape in shapes.items():
        role = _role(name)
        if role == "output" or (role == "token_embd" and tied):
            kind = _output(mix, shape)
        elif mix.name == "MXFP4_MOE":
            kind = "MXFP4" if len(shape) > 2 else "Q8_0"
        elif role == "token_embd":
            kind = "Q4_K" if mix.base in ("TQ1_0", "TQ2_0") else mix.base
        elif role == "attn_v":
            kind = _attn_v(mix, model, values.index(name), len(values))
        elif role == "attn_k":
            kind = "Q8_0" if model.experts == 8 else mix.base
        elif role == "ffn_down":
            kind = _ffn_down(mix, model, _layer(name) if model.experts > 1 else downs.index(name))
        elif role == "attn_output":
            kind = _attn_output(mix, model)
        else:
            kind = mix.base
        if mix.name == "Q2_K_S" and kind == "Q2_K" and role not in ("output", "token_embd") and not imatrix:
            raise ValueError("Q2_K_S requires an importance matrix, like in llama.cpp; pass one, or choose Q2_K")
        out[name] = _whole_blocks(kind, shape)
    return out


def _role(name: str) -> str:
    if name in ("output.weight", "token_embd.weight"):
        return name.removesuffix(".weight")
    return next((role for part, role in _ROLES if part in name), "")


def _layer(name: str) -> int:
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" and len(parts) > 1 and parts[1].isdigit() else -1


def _more(i: int, n: int) -> bool:
    """Whether layer i of n gets more bits: the first and last eighth, and every third of the others."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _output(mix: Mix, shape: tuple[int, ...]) -> str:
    if mix.name in ("MXFP4_MOE", "Q8_0") or shape[-1] % TYPES[mix.base].elements:
        return "Q8_0"
    return "Q6_K"


def _attn_v(mix: Mix, model: _Model, i: int, n: int) -> str:
    kind, shared = mix.base, model.sharing >= 4
    if mix.name == "Q2_K":
        kind = "Q4_K" if shared else "Q3_K"
    elif mix.name == "Q2_K_S" and shared:
        kind = "Q4_K"
    elif mix.name == "Q3_K_M":
        kind = "Q5_K" if i < 2 else "Q4_K"
    elif mix.name == "Q3_K_L" or (mix.base in ("IQ4_NL", "IQ4_XS") and shared) or (mix.name == "Q4_K_S" and i < 4):
        kind = "Q5_K"
    elif mix.name in ("Q4_K_M", "Q5_K_M") and _more(i, n):
        kind = "Q6_K"
    if model.large and kind in ("Q3_K", "Q4_K"):
        kind = "Q5_K"
    return "Q8_0" if model.experts == 8 else kind


def _ffn_down(mix: Mix, model: _Model, i: int) -> str:
    n = model.layers
    early = i < n // 8
    if mix.name == "Q2_K":
        return "Q3_K"
    if mix.name == "Q2_K_S":
        return "Q4_K" if early else mix.base
    if mix.name == "Q3_K_M":
        return "Q5_K" if i < n // 16 else "Q4_K"
    if mix.name == "Q3_K_L":
        return "Q5_K"
    if mix.name in ("Q4_K_M", "Q5_K_M"):
        return "Q6_K" if _more(i, n) else mix.base
    if early and (mix.name == "Q4_K_S" or (mix.base in ("IQ4_NL", "IQ4_XS") and not model.imatrix)):
        return "Q5_K"
    if early and mix.name in ("Q4_0", "Q5_0") and model.imatrix:
        return "Q4_1" if mix.name == "Q4_0" else "Q5_1"
    return mix.base


def _attn_output(mix: Mix, model: _Model) -> str:
    if model.experts == 8:
        return "Q5_K" if mix.name in _EIGHT_EXPERTS_OUTPUT else mix.base
    return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(mix.name, mix.base)


def _whole_blocks(kind: str, shape: tuple[int, ...]) -> str:
    """The type, or the one that llama.cpp takes where rows are not whole blocks."""
    if shape[-1] % TYPES[kind].elements == 0:
        return kind
    other = _FALLBACK.get(kind, "F16")
    return other if shape[-1] % TYPES[other].elements == 0 else "F16"

"""Rotary embeddings: ``rope_parameters`` of config.json <-> GGUF keys and the small tensors of factors.

Sources: llama.cpp's converter (conversion/base.py, llama.py, phi.py, 2026) and transformers 5.23,
modeling_rope_utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .metadata import KV, integer, real, short, text

FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (FREQS, LONG, SHORT)
DEFAULT_THETA = {"gemma3_text": 1e6}  # the others: 10000
LOCAL_THETA = 10000.0
PARTIAL = {"phi": 0.5}  # rotated part of a head, if missing in a config
# rope.scaling.* of YaRN: (key, name in rope_parameters)
YARN = (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow"))
LLAMA3_KNOWN = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192))  # Llama 3.1 and 3.2


def parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_parameters of the full-attention layers, from a config of transformers 4 or 5.

    Always includes rope_type, rope_theta and partial_rotary_factor.
    """
    new, old = _object(config, "rope_parameters"), _object(config, "rope_scaling")
    new = _object(new, "full_attention") or new
    out = {**old, **new}
    kind = str(config.get("model_type"))
    first = out.pop("type", "default")
    out.setdefault("rope_type", first)
    out.setdefault("rope_theta", config.get("rope_theta") or DEFAULT_THETA.get(kind, 10000.0))
    out.setdefault("partial_rotary_factor", config.get("partial_rotary_factor") or PARTIAL.get(kind, 1.0))
    return out


def rotated(config: Mapping[str, Any], head_dim: int) -> int:
    """Number of rotated elements of a head."""
    return int(real(parameters(config), "partial_rotary_factor") * head_dim)


def rope_kv(config: Mapping[str, Any], arch: str, head_dim: int) -> KV:
    """The keys ``<arch>.rope.*``. Raises ValueError if llama.cpp cannot compute the same."""
    p = parameters(config)
    pre = f"{arch}.rope."
    kv: KV = {
        pre + "dimension_count": ("UINT32", rotated(config, head_dim)),
        pre + "freq_base": ("FLOAT32", real(p, "rope_theta")),
    }
    if arch == "gemma3":
        local = _object(_object(config, "rope_parameters"), "sliding_attention")
        theta = real(local, "rope_theta", real(config, "rope_local_base_freq", LOCAL_THETA))
        kv[pre + "freq_base_swa"] = ("FLOAT32", theta)
    kind = p["rope_type"]
    where = pre + "scaling."
    if arch == "phi3":
        original = _original(config, p)
        kv[where + "original_context_length"] = ("UINT32", original)
        if kind in ("longrope", "su", "yarn"):  # transformers treats the three the same
            kv[where + "attn_factor"] = ("FLOAT32", _attention_factor(config, p, original))
            return kv
    elif kind in ("linear", "yarn"):
        kv |= {where + "type": ("STRING", kind), where + "factor": ("FLOAT32", real(p, "factor"))}
        if kind == "yarn":
            odd = next((k for k in ("mscale", "mscale_all_dim") if p.get(k)), None)
            odd = "truncate" if p.get("truncate") is False else odd
            if odd:
                raise ValueError(f"{odd} in rope_parameters of type yarn cannot be stored in GGUF for {arch!r}")
            kv[where + "original_context_length"] = ("UINT32", _original(config, p))
            kv |= {where + k: ("FLOAT32", real(p, name)) for k, name in YARN if p.get(name) is not None}
            if p.get("attention_factor") is not None:  # llama.cpp multiplies its own factor by the stored one
                kv[where + "attn_factor"] = ("FLOAT32", real(p, "attention_factor") / _yarn_attention(p["factor"]))
        return kv
    elif kind == "llama3" and arch == "llama":
        return kv  # stored in the tensor rope_freqs
    if kind not in ("default", None):
        raise ValueError(f"rope_type {kind!r} cannot be stored in GGUF for architecture {arch!r}")
    return kv


def rope_tensors(config: Mapping[str, Any], head_dim: int) -> dict[str, Tensor]:
    """Additional tensors that a GGUF file needs: float32, one factor per rotated pair of a head."""
    p = parameters(config)
    if p["rope_type"] == "llama3":
        factor, low, high = (real(p, k) for k in ("factor", "low_freq_factor", "high_freq_factor"))
        return {FREQS: llama3_factors(head_dim, real(p, "rope_theta"), factor, low, high, _original(config, p))}
    if p["rope_type"] in ("longrope", "su", "yarn") and p.get("long_factor"):
        pairs = rotated(config, head_dim) // 2
        return {LONG: _factors(p, "long_factor", pairs), SHORT: _factors(p, "short_factor", pairs)}
    return {}


def llama3_factors(head_dim: int, theta: float, factor: float, low: float, high: float, original: int) -> Tensor:
    """Divisor of each frequency, float32 [head_dim / 2]: 1 for short wavelengths, ``factor`` for long ones.

    In between 1 / ((1 - s) / factor + s), s = (original / wavelength - low) / (high - low).
    """
    if not high > low > 0 or factor < 1 or original <= 0:
        raise ValueError(f"rope_type llama3 needs 0 < low < high and factor >= 1, got {low}, {high}, {factor}")
    waves = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    s = ((original / waves - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - s) / factor + s)).float()


def llama3_from_factors(factors: Tensor, theta: float) -> dict[str, Any]:
    """rope_parameters that give these factors: those of a known model, or fitted ones.

    Only low / original and high / original matter, so any values with the same quotients are equivalent. Raises
    ValueError if none match to 1e-4.
    """
    f = factors.double()
    if not bool((torch.isfinite(f) & (f > 0)).all()) or f.ndim != 1 or not f.numel():
        raise ValueError(f"{FREQS}: must be a vector of positive numbers, got shape {list(factors.shape)}")
    head_dim = 2 * f.numel()
    for numbers in (*LLAMA3_KNOWN, *_fitted(f, theta, head_dim)):
        if torch.allclose(llama3_factors(head_dim, theta, *numbers).double(), f, rtol=1e-4, atol=0):
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            return {"rope_type": "llama3", **dict(zip(names, numbers, strict=True))}
    raise ValueError(f"{FREQS}: no rope_parameters of type llama3 give these factors; use the original config.json")


def _fitted(f: Tensor, theta: float, head_dim: int) -> list[tuple[float, float, float, int]]:
    factor = float(f.max())
    between = (f > 1 + 1e-6) & (f < factor * (1 - 1e-6))
    if factor <= 1 or int(between.sum()) < 2:
        return []
    waves = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    s = (1 / f - 1 / factor) / (1 - 1 / factor)  # = a / wavelength - b
    x, y = 1 / waves[between], s[between]
    a = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    b = a * float(x.mean()) - float(y.mean())
    if a <= 0 or b <= 0 or a / b < 1:
        return []
    return [(short(factor), 1.0, round(1 + 1 / b, 4), round(a / b))]  # low = 1


def rope_parameters(
    kv: Mapping[str, Any], arch: str, model_type: str, head_dim: int, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(rope_parameters, other keys of config.json) of a GGUF file. tensors: the small ones of :func:`rope_tensors`."""
    pre = f"{arch}.rope."
    theta = real(kv, pre + "freq_base", DEFAULT_THETA.get(model_type, 10000.0))
    p: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    more: dict[str, Any] = {}
    kind = text(kv, pre + "scaling.type", "none")
    if arch == "phi3":
        more["original_max_position_embeddings"] = integer(
            kv, pre + "scaling.original_context_length", integer(kv, "phi3.context_length")
        )
        if LONG in tensors and SHORT in tensors:
            p |= {
                "rope_type": "longrope",
                "long_factor": [short(v) for v in tensors[LONG].tolist()],
                "short_factor": [short(v) for v in tensors[SHORT].tolist()],
            }
    elif kind in ("linear", "yarn"):
        p |= {"rope_type": kind, "factor": real(kv, pre + "scaling.factor")}
        if kind == "yarn":
            p["original_max_position_embeddings"] = integer(kv, pre + "scaling.original_context_length")
            p |= {name: real(kv, pre + "scaling." + k) for k, name in YARN if pre + "scaling." + k in kv}
            if pre + "scaling.attn_factor" in kv:
                own = _yarn_attention(p["factor"])
                p["attention_factor"] = short(real(kv, pre + "scaling.attn_factor") * own)
            elif pre + "scaling.yarn_attn_factor" in kv:  # written by llama.cpp's converter; llama.cpp ignores it
                p["attention_factor"] = real(kv, pre + "scaling.yarn_attn_factor")
    elif kind != "none":
        raise ValueError(f"{pre}scaling.type {kind[:50]!r} is not supported for architecture {arch!r}")
    if FREQS in tensors and arch == "llama" and bool((tensors[FREQS] != 1).any()):
        p |= llama3_from_factors(tensors[FREQS], theta)
    if model_type in ("phi", "phi3"):
        p["partial_rotary_factor"] = integer(kv, pre + "dimension_count", head_dim) / head_dim
    if arch == "gemma3":
        local = real(kv, pre + "freq_base_swa", LOCAL_THETA)
        p = {"full_attention": p, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
    return p, more


def _object(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key} must be an object, got {str(value)[:50]!r}")
    return value or {}


def _factors(p: Mapping[str, Any], key: str, pairs: int) -> Tensor:
    values = p.get(key)
    if not isinstance(values, list) or not all(type(v) in (int, float) and math.isfinite(v) for v in values):
        raise ValueError(f"rope_parameters: {key} must be a list of numbers")
    if len(values) != pairs:
        raise ValueError(f"rope_parameters: {key} has {len(values)} factors for {pairs} rotated pairs")
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def _original(config: Mapping[str, Any], p: Mapping[str, Any]) -> int:
    key = "original_max_position_embeddings"
    return integer(p if p.get(key) is not None else config, key, config.get("max_position_embeddings"))


def _yarn_attention(factor: float) -> float:
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0  # as transformers and llama.cpp compute it


def _attention_factor(config: Mapping[str, Any], p: Mapping[str, Any], original: int) -> float:
    if p.get("attention_factor") is not None:
        return real(p, "attention_factor")
    scale = integer(config, "max_position_embeddings") / original
    return math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 and original > 1 else 1.0

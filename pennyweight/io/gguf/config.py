"""GGUF metadata <-> config.json, by tables; and the pooling of embedding models <-> sentence-transformers' files.

Sources: gguf.constants.Keys of gguf 0.19, llama.cpp's converter (conversion/*.py, 2026), and the config classes of
transformers 5.23. If llama.cpp has a built-in value and no key for it, only configs with that value are accepted: a
file that would compute something else is an error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..file import CheckpointError
from ..strict_json import read_json, resolve_inside
from .architectures import for_config, for_gguf
from .metadata import KV, integer, real
from .rope import ROPE_TENSORS, rope_kv, rope_parameters
from .rope import rope_tensors as _rope_tensors

QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION of ggml.h
POOLING = {"none": 0, "mean": 1, "cls": 2, "last": 3}  # enum llama_pooling_type
ALL_F32, MOSTLY_BF16 = 0, 32  # enum llama_ftype
# A file of quantized tensors does not store their original dtype; bfloat16 has sufficient range
TORCH_DTYPES = {ALL_F32: "float32", 1: "float16", MOSTLY_BF16: "bfloat16"}


@dataclass(frozen=True)
class Key:
    """A numeric key, without the architecture prefix, and its name in config.json."""

    key: str
    name: str
    kind: str = "UINT32"
    needed: bool = True


@dataclass(frozen=True)
class ConfigRow:
    """How an architecture's config is converted.

    keys      the numeric keys that both sides have
    fixed     config values built into llama.cpp: accepted values; the first is used when reading a GGUF file
    flags     config values that depend on which tensors exist: the GGUF tensor whose presence sets them
    head_dim  whether the head size is a separate value
    sliding   every n-th layer has full attention, the others a sliding window; 0: no such pattern
    write     other keys: (config, architecture, head size) -> keys
    read      other values: (metadata, config so far) -> config values
    """

    keys: tuple[Key, ...]
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    head_dim: bool = True
    sliding: int = 0
    write: Callable[[Mapping[str, Any], str, int], KV] = lambda config, arch, head_dim: {}
    read: Callable[[Mapping[str, Any], dict[str, Any]], dict[str, Any]] = lambda kv, config: {}


def _attention_scale(config: Mapping[str, Any], arch: str, head_dim: int) -> KV:
    """No keys: llama.cpp scales by the head size, except for Gemma's 27B models, and has no key for it."""
    built_in = _scalar(
        arch, config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"], head_dim
    )
    scalar = config.get("query_pre_attn_scalar", built_in)
    if scalar != built_in:
        raise ValueError(
            f"query_pre_attn_scalar is {scalar}, but llama.cpp computes {arch} with {built_in} and has no key for it"
        )
    return {}


def _read_attention_scale(kv: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    arch = config["model_type"].removesuffix("_text")
    sizes = (config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"])
    return {"query_pre_attn_scalar": _scalar(arch, *sizes, config["head_dim"])}


def _scalar(arch: str, layers: int, hidden: int, heads: int, head_dim: int) -> int:
    # llama.cpp detects Gemma 27B by its number of layers: src/models/gemma2.cpp, gemma3.cpp
    return hidden // heads if layers == {"gemma2": 46, "gemma3": 62}[arch] else head_dim


def _mistral_window(config: Mapping[str, Any], arch: str, head_dim: int) -> KV:
    """llama.cpp's llama has no sliding window and ignores the key; on reading, the key identifies a Mistral model."""
    window = config.get("sliding_window") if config.get("model_type") == "mistral" else None
    return {} if window is None else {f"{arch}.attention.sliding_window": ("UINT32", integer(config, "sliding_window"))}


def _read_mistral_window(kv: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    if "llama.attention.sliding_window" not in kv or config["attention_bias"] or config["mlp_bias"]:
        return {}  # Mistral has no biases
    window = integer(kv, "llama.attention.sliding_window")
    return {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}


def _experts(config: Mapping[str, Any], arch: str, head_dim: int) -> KV:
    """Numbers and sizes of experts; none for a dense model."""
    count = experts_of(config)
    if count is None or config.get("model_type") not in ("mixtral", "qwen2_moe", "qwen3_moe"):
        return {}
    kv: KV = {
        f"{arch}.expert_count": ("UINT32", count),
        f"{arch}.expert_used_count": ("UINT32", integer(config, "num_experts_per_tok")),
    }
    for key, name in _EXPERT_SIZES.items():
        if config.get(name) is not None:
            kv[f"{arch}.{key}"] = ("UINT32", integer(config, name))
    return kv


def _read_experts(kv: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    arch = next(key for key in kv if key.endswith(".expert_count")).removesuffix(".expert_count")
    found = {
        "num_experts": integer(kv, f"{arch}.expert_count"),
        "num_experts_per_tok": integer(kv, f"{arch}.expert_used_count"),
    }
    return found | {name: integer(kv, f"{arch}.{key}") for key, name in _EXPERT_SIZES.items() if f"{arch}.{key}" in kv}


def _write_llama(config: Mapping[str, Any], arch: str, head_dim: int) -> KV:
    return _mistral_window(config, arch, head_dim) | _experts(config, arch, head_dim)


def _read_llama(kv: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    if not kv.get("llama.expert_count"):
        return _read_mistral_window(kv, config)
    if config["attention_bias"] or config["mlp_bias"]:
        raise ValueError("llama.expert_count: Mixtral has no biases, but the file has")
    found = _read_experts(kv, config)
    found["num_local_experts"] = found.pop("num_experts")
    return found | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}


def _phi3_window(config: Mapping[str, Any], arch: str, head_dim: int) -> KV:
    window = integer(config, "sliding_window") if config.get("sliding_window") else 0  # 0: none
    return {"phi3.attention.sliding_window": ("UINT32", window)}


def _read_phi3_window(kv: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    window = kv.get("phi3.attention.sliding_window") or None
    return {"sliding_window": window if window is None else integer(kv, "phi3.attention.sliding_window")}


def _bert(config: Mapping[str, Any], arch: str, head_dim: int) -> KV:
    return {
        "bert.attention.causal": ("BOOL", False),
        "tokenizer.ggml.token_type_count": ("UINT32", integer(config, "type_vocab_size", 2)),
    }


def _read_bert(kv: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    return {"type_vocab_size": integer(kv, "tokenizer.ggml.token_type_count", 2)}


_SIZES = (
    Key("context_length", "max_position_embeddings"),
    Key("embedding_length", "hidden_size"),
    Key("block_count", "num_hidden_layers"),
    Key("feed_forward_length", "intermediate_size"),
    Key("attention.head_count", "num_attention_heads"),
)
_RMS = Key("attention.layer_norm_rms_epsilon", "rms_norm_eps", "FLOAT32")
_LAYER_NORM = Key("attention.layer_norm_epsilon", "layer_norm_eps", "FLOAT32")
_WINDOW = Key("attention.sliding_window", "sliding_window")
_EXPERT_SIZES = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# every layer has experts
_ALL_LAYERS: dict[str, tuple[Any, ...]] = {"mlp_only_layers": ([], None), "decoder_sparse_step": (1, None)}
_SILU = {"hidden_act": ("silu",)}
_NO_WINDOW = {"use_sliding_window": (False, None)}
_TANH = ("gelu_pytorch_tanh", "gelu", "gelu_new", "gelu_fast")  # the first Gemma configs say "gelu" and mean tanh
_GEMMA_BIAS = {"attention_bias": (False, None)}
ROWS: dict[str, ConfigRow] = {
    "llama": ConfigRow(
        (*_SIZES, _RMS),
        _SILU,
        {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"},
        write=_write_llama,
        read=_read_llama,
    ),
    "qwen2": ConfigRow((*_SIZES, _RMS), _SILU | _NO_WINDOW, head_dim=False),
    "qwen3": ConfigRow((*_SIZES, _RMS), _SILU | _NO_WINDOW, {"attention_bias": "blk.0.attn_q.bias"}),
    "qwen2moe": ConfigRow(
        (*_SIZES, _RMS),
        _SILU | _NO_WINDOW | _ALL_LAYERS | {"qkv_bias": (True, None), "norm_topk_prob": (False, None)},
        head_dim=False,
        write=_experts,
        read=_read_experts,
    ),
    "qwen3moe": ConfigRow(
        (*_SIZES, _RMS),
        _SILU | _NO_WINDOW | _ALL_LAYERS | {"norm_topk_prob": (True,)},
        {"attention_bias": "blk.0.attn_q.bias"},
        write=_experts,
        read=_read_experts,
    ),
    "gemma": ConfigRow((*_SIZES, _RMS), {"hidden_act": _TANH} | _GEMMA_BIAS),
    "gemma2": ConfigRow(
        (
            *_SIZES,
            _RMS,
            _WINDOW,
            Key("attn_logit_softcapping", "attn_logit_softcapping", "FLOAT32"),
            Key("final_logit_softcapping", "final_logit_softcapping", "FLOAT32"),
        ),
        {"hidden_activation": _TANH} | _GEMMA_BIAS,
        sliding=2,
        write=_attention_scale,
        read=_read_attention_scale,
    ),
    "gemma3": ConfigRow(
        (*_SIZES, _RMS, _WINDOW, Key("final_logit_softcapping", "final_logit_softcapping", "FLOAT32", needed=False)),
        {"hidden_activation": _TANH, "attn_logit_softcapping": (None,), "use_bidirectional_attention": (False, None)}
        | _GEMMA_BIAS,
        sliding=6,
        write=_attention_scale,
        read=_read_attention_scale,
    ),
    "phi2": ConfigRow(
        (*_SIZES, _LAYER_NORM),
        {"hidden_act": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "qk_layernorm": (False, None)},
        head_dim=False,
    ),
    "phi3": ConfigRow((*_SIZES, _RMS), _SILU, head_dim=False, write=_phi3_window, read=_read_phi3_window),
    "bert": ConfigRow(
        (*_SIZES, _LAYER_NORM),
        {"hidden_act": ("gelu",), "position_embedding_type": ("absolute", None)},
        head_dim=False,
        write=_bert,
        read=_read_bert,
    ),
}


def kv_from_config(
    config: Mapping[str, Any], file_type: int, *, name: str | None = None, pooling: str | None = None
) -> KV:
    """GGUF metadata for the model of a config.json: key -> (value type, value), without the tokenizer.

    file_type: enum llama_ftype, the type of most tensors. pooling: a key of ``POOLING``, for an embedding model.
    Raises ValueError if a value is missing, or if llama.cpp would compute something else.
    """
    arch = for_config(config).gguf
    row = ROWS[arch]
    for key, allowed in row.fixed.items():
        if key in config and config[key] not in allowed:
            raise ValueError(f"{key} is {config[key]!r}, but llama.cpp computes {arch!r} with {allowed[0]!r} only")
    kv: KV = {
        "general.architecture": ("STRING", arch),
        "general.type": ("STRING", "model"),
        # never a local path or the model type: readers interpret names such as "mistral" or "phi3"
        "general.name": ("STRING", name or os.path.basename(str(config.get("_name_or_path") or "")) or "model"),
        "general.file_type": ("UINT32", int(file_type)),
        "general.quantization_version": ("UINT32", QUANTIZATION_VERSION),
    }
    for k in (*row.keys, Key("vocab_size", "vocab_size")):
        if config.get(k.name) is not None:
            kv[f"{arch}.{k.key}"] = (k.kind, (integer if k.kind == "UINT32" else real)(config, k.name))
        elif k.needed:
            raise ValueError(f"config.json has no {k.name}; save the config with all values (config.to_dict())")
    heads = kv[f"{arch}.attention.head_count"][1]
    if arch != "bert":
        kv[f"{arch}.attention.head_count_kv"] = ("UINT32", integer(config, "num_key_value_heads", heads))
    size = head_dim(config)
    if row.head_dim:
        kv |= {f"{arch}.attention.{n}_length": ("UINT32", size) for n in ("key", "value")}
    _check_layers(config, row, arch)
    if arch != "bert":
        kv |= rope_kv(config, arch, size)
    if pooling is not None:
        if pooling not in POOLING:
            raise ValueError(f"pooling {pooling!r} is not supported; supported: {', '.join(POOLING)}")
        kv[f"{arch}.pooling_type"] = ("UINT32", POOLING[pooling])
    return kv | row.write(config, arch, size)


def head_dim(config: Mapping[str, Any]) -> int:
    """Attention head size."""
    if config.get("head_dim") is not None:
        return integer(config, "head_dim")
    return integer(config, "hidden_size") // integer(config, "num_attention_heads")


def experts_of(config: Mapping[str, Any]) -> int | None:
    """Number of experts of a mixture of experts; None for a dense model."""
    for key in ("num_local_experts", "num_experts"):
        if config.get(key) is not None:
            return integer(config, key)
    return None


def rope_tensors(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Additional tensors that a GGUF file needs: float32 factors of rotary frequencies, or none."""
    return {} if for_config(config).gguf == "bert" else _rope_tensors(config, head_dim(config))


def _check_layers(config: Mapping[str, Any], row: ConfigRow, arch: str) -> None:
    """Raise ValueError if the sliding-window layers differ from those built into llama.cpp."""
    kinds = config.get("layer_types")
    if kinds is None:
        every = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", row.sliding))
        if row.sliding and every != row.sliding:
            raise ValueError(f"sliding_window_pattern is {every}, but llama.cpp computes {arch!r} with {row.sliding}")
        return
    if not isinstance(kinds, list):
        raise ValueError(f"layer_types must be a list, is {str(kinds)[:50]!r}")
    want = [
        "sliding_attention" if row.sliding and (i + 1) % row.sliding else "full_attention" for i in range(len(kinds))
    ]
    if kinds != want:
        i = next(i for i, (a, b) in enumerate(zip(kinds, want, strict=True)) if a != b)
        raise ValueError(f"layer_types[{i}] is {kinds[i]!r}, but llama.cpp computes {arch!r} with {want[i]!r} there")


def config_from_kv(
    kv: Mapping[str, Any], names: Collection[str] = (), tensors: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """config.json for a GGUF file, accepted by transformers.

    names: the file's tensors, which show whether there are biases and a separate output matrix. tensors: those of
    ``ROPE_TENSORS`` that the file has; they contain the long-context factors of Llama 3.1 and Phi 3 128k. Raises
    ValueError naming the key.
    """
    arch = for_gguf(kv.get("general.architecture"))
    row = ROWS[arch.gguf]
    missing = [n for n in ROPE_TENSORS if n in names and n not in (tensors or {})]
    if missing:
        raise ValueError(f"{missing[0]}: the config depends on this tensor; pass it in ``tensors``")
    config: dict[str, Any] = {"architectures": [arch.architectures[0]], "model_type": arch.model_types[0]}
    for key in row.keys:
        full = f"{arch.gguf}.{key.key}"
        if key.needed or full in kv:
            config[key.name] = (integer if key.kind == "UINT32" else real)(kv, full)
    config["vocab_size"] = _vocab_size(kv, arch.gguf)
    heads = config["num_attention_heads"]
    size = integer(kv, f"{arch.gguf}.attention.key_length", max(1, config["hidden_size"] // heads))
    if integer(kv, f"{arch.gguf}.attention.value_length", size) != size:
        raise ValueError(f"{arch.gguf}.attention.value_length differs from key_length; the config cannot represent it")
    if row.head_dim:
        config["head_dim"] = size
    elif size * heads != config["hidden_size"]:
        raise ValueError(f"{arch.gguf}: {heads} heads of {size} are not embedding_length {config['hidden_size']}")
    if arch.gguf != "bert":
        config["num_key_value_heads"] = integer(kv, f"{arch.gguf}.attention.head_count_kv", heads)
        rope, more = rope_parameters(kv, arch.gguf, config["model_type"], size, tensors or {})
        config |= {"rope_parameters": rope, **more}
    config |= {key: allowed[0] for key, allowed in row.fixed.items() if allowed[0] is not None}
    config |= {flag: tensor in names for flag, tensor in row.flags.items()}
    if arch.head:
        config["tie_word_embeddings"] = "output.weight" not in names if names else arch.tied
    file_type = kv.get("general.file_type", ALL_F32)
    config["torch_dtype"] = TORCH_DTYPES.get(file_type, "bfloat16") if type(file_type) is int else "bfloat16"
    for name, ggml in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        i = kv.get(f"tokenizer.ggml.{ggml}_token_id")
        # None is written explicitly: the config classes default to ids of one vocabulary
        config[f"{name}_token_id"] = i if type(i) is int and 0 <= i < config["vocab_size"] else None
    return config | row.read(kv, config)


def _vocab_size(kv: Mapping[str, Any], arch: str) -> int:
    key, name = f"{arch}.vocab_size", "tokenizer.ggml.tokens"
    if key in kv:  # the tokens are decoded on access
        return integer(kv, key)
    tokens = kv.get(name)
    if not isinstance(tokens, list):
        raise ValueError(f"the metadata has neither {key} nor {name}")
    return integer({name: len(tokens)}, name)


def generation_files(kv: Mapping[str, Any]) -> dict[str, bytes]:
    """generation_config.json with all ids that end an answer, if the metadata have more than config.json's: the ends
    of a turn (eot) and of a message (eom)."""
    keys = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(kv[key] for key in keys if type(kv.get(key)) is int and kv[key] >= 0))
    if ends == [kv.get(keys[0])] or not ends:
        return {}
    settings: dict[str, Any] = {"eos_token_id": ends}
    for name, ggml in (("bos", "bos"), ("pad", "padding")):
        i = kv.get(f"tokenizer.ggml.{ggml}_token_id")
        if type(i) is int:
            settings[f"{name}_token_id"] = i
    return {"generation_config.json": (json.dumps(settings, indent=2) + "\n").encode()}


MAX_BYTES = 1 << 20
_TYPE = "sentence_transformers.models."
# flags of a Pooling module's config.json, which GGUF supports
_FLAGS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}


def pooling_of(folder: str) -> str | None:
    """The pooling that a folder's modules.json declares, a key of ``POOLING``; None if there is no such file.

    Raises CheckpointError for an invalid file, and for a pooling that GGUF does not support.
    """
    real = os.path.realpath(folder)
    if not os.path.lexists(os.path.join(real, "modules.json")):
        return None
    path = resolve_inside(real, "modules.json")
    modules = read_json(path, max_bytes=MAX_BYTES)
    if not isinstance(modules, list) or not all(isinstance(m, dict) for m in modules):
        raise CheckpointError(path, None, "must hold a list of objects")
    paths = [m.get("path") for m in modules if str(m.get("type")).rpartition(".")[2] == "Pooling"]
    if not paths:
        return None
    if len(paths) > 1 or not isinstance(paths[0], str) or not paths[0]:
        raise CheckpointError(path, None, "must name one folder of a Pooling module")
    path = resolve_inside(real, os.path.join(paths[0], "config.json"))
    config = read_json(path, max_bytes=MAX_BYTES)
    if not isinstance(config, dict):
        raise CheckpointError(path, None, "must hold an object")
    modes = [k for k, v in config.items() if k.startswith("pooling_mode") and v is True]
    if len(modes) == 1 and modes[0] in _FLAGS:
        return _FLAGS[modes[0]]
    named = config.get("pooling_mode")  # newer files name it
    if not modes and isinstance(named, str) and named.removesuffix("token") in POOLING:
        return named.removesuffix("token")
    raise CheckpointError(path, None, f"pooling {', '.join(modes) or named!r} is not supported by GGUF")


def pooling_files(kv: Mapping[str, Any]) -> dict[str, bytes]:
    """{path in the folder: bytes} for sentence-transformers; empty if the file has no or an unsupported pooling.

    Embeddings are normalized, as in llama.cpp's tools.
    """
    arch = kv.get("general.architecture")
    names = {v: k for k, v in POOLING.items() if k != "none"}
    kind, size = kv.get(f"{arch}.pooling_type"), kv.get(f"{arch}.embedding_length")
    if type(kind) is not int or kind not in names or type(size) is not int:
        return {}
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    files: dict[str, Any] = {
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": _TYPE + name} for i, (path, name) in enumerate(modules)
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": size,
            **{flag: name == names[kind] for flag, name in _FLAGS.items()},
        },
    }
    return {name: (json.dumps(data, indent=2) + "\n").encode() for name, data in files.items()}

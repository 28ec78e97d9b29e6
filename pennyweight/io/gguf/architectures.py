"""Tables of model architectures known to both GGUF and Hugging Face, with the tensor names on each side.

Names: gguf.constants.MODEL_TENSORS and gguf.tensor_mapping of gguf 0.19, which the tests compare these tables with, and
the parameters of the models in transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """A tensor's two names, without the suffix ".weight" or ".bias", which is the same on both sides.

    ``{i}`` stands for an integer. transform: "same", "rotary_q", "rotary_k" (rotary with the heads of the queries, of
    the keys) or "plus_one".
    """

    gguf: str
    hf: str
    transform: str = "same"


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    gguf           ``general.architecture``
    model_types    ``model_type`` of config.json; the first is used when reading a GGUF file
    architectures  the class of each model type, for ``architectures`` of config.json
    rows           the tensors
    prefixes       possible prefixes of all Hugging Face names (a model saved as part of a larger one)
    base           the prefix that is missing if a base model was saved alone
    tied           ``tie_word_embeddings`` if missing in a config: the default of its class
    head           the Hugging Face tensor that equals token_embd if the embeddings are tied
    left_out_gguf  GGUF tensors without a parameter in the model, and how they are used instead
    left_out_hf    Hugging Face tensors that GGUF does not store, and why
    """

    gguf: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    rows: tuple[Row, ...]
    prefixes: tuple[str, ...] = ()
    base: str = ""
    tied: bool = False
    head: str | None = "lm_head.weight"
    left_out_gguf: Mapping[str, str] = field(default_factory=dict)
    left_out_hf: Mapping[str, str] = field(default_factory=dict)


def _rows(gguf: str, hf: str, names: Mapping[str, str], transforms: Mapping[str, str] = {}) -> tuple[Row, ...]:
    return tuple(Row(gguf + g, hf + h, transforms.get(g, "same")) for g, h in names.items())


_ENDS = _rows("", "", {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"})
_ATTENTION = {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"} | {"attn_output": "self_attn.o_proj"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
# the names of experts.py; of shared experts those of the model
_EXPERTS = {"ffn_gate_inp": "mlp.gate"} | {
    f"{name}_exps": hf.replace("mlp.", "mlp.experts.") for name, hf in _MLP.items()
}
_SHARED = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"} | {
    f"{name}_shexp": hf.replace("mlp.", "mlp.shared_expert.") for name, hf in _MLP.items()
}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_GEMMA2_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_ENDS = (Row("token_embd", "model.embed_tokens"), Row("output_norm", "model.norm", "plus_one"))
_ROPE = "contains factors of rotary frequencies; they become rope_parameters of the config"
_COMPUTED = "is computed from the config"
_DECODER_GGUF = {
    "rope_freqs.weight": _ROPE,
    "blk.{i}.rope_freqs.weight": _ROPE,
    "blk.{i}.attn_rot_embd.weight": _COMPUTED,
}
_DECODER_HF = {"model.rotary_emb.inv_freq": _COMPUTED, "model.layers.{i}.self_attn.rotary_emb.inv_freq": _COMPUTED}
_GEMMA_HF = {"model.embed_tokens.embed_scale": _COMPUTED}


def _decoder(
    gguf: str, model_types: Mapping[str, str], ends: tuple[Row, ...], layers: Mapping[str, str], *, tied: bool = False,
    gguf_only: Mapping[str, str] = {}, hf_only: Mapping[str, str] = {}, transforms: Mapping[str, str] = {},
) -> Architecture:  # fmt: skip
    """A decoder whose Hugging Face names are ``model.layers.{i}.``; model_types: with the class of each."""
    rows = ends + _rows("blk.{i}.", "model.layers.{i}.", layers, transforms)
    return Architecture(
        gguf, tuple(model_types), tuple(model_types.values()), rows, base="model.", tied=tied,
        left_out_gguf={**_DECODER_GGUF, **gguf_only}, left_out_hf={**_DECODER_HF, **hf_only},
    )  # fmt: skip


LLAMA = _decoder(
    "llama", {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM"}, _ENDS,
    _ATTENTION | _MLP | _EXPERTS | _NORMS,
    transforms={"attn_q": "rotary_q", "attn_k": "rotary_k"},
)  # fmt: skip
QWEN2 = _decoder("qwen2", {"qwen2": "Qwen2ForCausalLM"}, _ENDS, _ATTENTION | _MLP | _NORMS)
QWEN3 = _decoder("qwen3", {"qwen3": "Qwen3ForCausalLM"}, _ENDS, _ATTENTION | _QK_NORMS | _MLP | _NORMS)
QWEN2MOE = _decoder(
    "qwen2moe", {"qwen2_moe": "Qwen2MoeForCausalLM"}, _ENDS, _ATTENTION | _EXPERTS | _SHARED | _NORMS
)  # fmt: skip
QWEN3MOE = _decoder(
    "qwen3moe", {"qwen3_moe": "Qwen3MoeForCausalLM"}, _ENDS, _ATTENTION | _QK_NORMS | _EXPERTS | _NORMS
)  # fmt: skip
GEMMA = _decoder(
    "gemma", {"gemma": "GemmaForCausalLM"}, _GEMMA_ENDS, _ATTENTION | _MLP | _NORMS,
    tied=True, hf_only=_GEMMA_HF, transforms=dict.fromkeys(_NORMS, "plus_one"),
)  # fmt: skip
GEMMA2 = _decoder(
    "gemma2", {"gemma2": "Gemma2ForCausalLM"}, _GEMMA_ENDS, _ATTENTION | _MLP | _GEMMA2_NORMS,
    tied=True, hf_only=_GEMMA_HF, transforms=dict.fromkeys(_GEMMA2_NORMS, "plus_one"),
)  # fmt: skip
GEMMA3 = _decoder(
    "gemma3", {"gemma3_text": "Gemma3ForCausalLM"}, (*_GEMMA_ENDS, Row("output", "lm_head")),
    _ATTENTION | _QK_NORMS | _MLP | _GEMMA2_NORMS,
    tied=True, hf_only=_GEMMA_HF, transforms=dict.fromkeys(_QK_NORMS | _GEMMA2_NORMS, "plus_one"),
)  # fmt: skip
PHI2 = _decoder(
    "phi2", {"phi": "PhiForCausalLM"},
    _rows("", "", {"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"}),
    _ATTENTION | {"attn_output": "self_attn.dense", "attn_norm": "input_layernorm"}
    | {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
)  # fmt: skip
PHI3 = _decoder(
    "phi3", {"phi3": "Phi3ForCausalLM"}, _ENDS,
    {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"} | _NORMS
    | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},  # gate and up are one matrix on both sides
    gguf_only={"rope_factors_long.weight": _ROPE, "rope_factors_short.weight": _ROPE},
)  # fmt: skip
_EMBEDDING = "llama.cpp pools embeddings itself and does not store it"
_BERT_HEADS = (
    "cls.predictions.bias",
    "cls.predictions.decoder.weight",
    "cls.predictions.decoder.bias",
    "cls.predictions.transform.dense.weight",
    "cls.predictions.transform.dense.bias",
    "cls.predictions.transform.LayerNorm.weight",
    "cls.predictions.transform.LayerNorm.bias",
    "cls.seq_relationship.weight",
    "cls.seq_relationship.bias",
)
BERT = Architecture(
    "bert",
    ("bert",),
    ("BertModel",),
    _rows(
        "",
        "embeddings.",
        {
            "token_embd": "word_embeddings",
            "position_embd": "position_embeddings",
            "token_types": "token_type_embeddings",
            "token_embd_norm": "LayerNorm",
        },
    )
    + _rows(
        "blk.{i}.",
        "encoder.layer.{i}.",
        {
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
    ),
    prefixes=("bert.",),
    head=None,
    left_out_hf={
        "embeddings.position_ids": _COMPUTED,
        "embeddings.token_type_ids": _COMPUTED,
        "pooler.dense.weight": _EMBEDDING,
        "pooler.dense.bias": _EMBEDDING,
        **dict.fromkeys(_BERT_HEADS, "belongs to a training head, not to embeddings"),
    },
)
ARCHITECTURES = (LLAMA, QWEN2, QWEN3, QWEN2MOE, QWEN3MOE, GEMMA, GEMMA2, GEMMA3, PHI2, PHI3, BERT)
BY_GGUF = {a.gguf: a for a in ARCHITECTURES}
BY_MODEL_TYPE = {t: a for a in ARCHITECTURES for t in a.model_types}
OWN_FILE = (
    'or give a pattern file: TOML with a table [tensors] and lines such as "blk.{i}.foo.weight" = '
    '"model.layers.{i}.foo.weight"'
)


def for_gguf(arch: Any) -> Architecture:
    """The architecture of a GGUF file. Raises ValueError if it is not supported."""
    return _known("GGUF architecture", arch, BY_GGUF)


def for_config(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a config.json. Raises ValueError if it is not supported."""
    return _known("model_type", config.get("model_type"), BY_MODEL_TYPE)


def _known(what: str, name: Any, known: Mapping[str, Architecture]) -> Architecture:
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{what} {str(name)[:100]!r} is not supported; known: {', '.join(known)}; {OWN_FILE}")
    return known[name]

"""The files whose loading each engine is tested with: how each is written, and an independent decode of its weights.

A case is a small decided Llama (its next token does not depend on rounding), quantized with a config and converted to a
file format. ``write_case(folder, name)`` writes it; :func:`decode` computes the float weights that the file stands for
from its stored tensors with numpy alone, by the formulas of the formats' own documentation.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import pennyweight as pw
from pennyweight.core.spec import FP8_BLOCK
from pennyweight.planning.configs.aliases import by_name

CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
EMBEDDINGS = ("model.embed_tokens", "lm_head")


@dataclass(frozen=True)
class Case:
    """One file.

    config  of the layers that are quantized; a short name, or a config
    to      the file format
    row     the row of the engine table (``planning/engines.py``) that it stands for; "" for one that has none
    change  changes the written folder, for files that Pennyweight does not write itself
    expect  by engine: "" where it loads and computes the weights of :func:`decode`; else a part of its error message
    """

    config: Any
    to: str
    row: str = ""
    change: Callable[[Path], None] | None = None
    expect: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def decided() -> LlamaForCausalLM:
    """Random weights whose next token is decided: the output matrix holds the embeddings, each in the row of the token
    that follows it in a random cycle, and they are large beside what the layers add."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(8)
        cycle = torch.randperm(CONFIG.vocab_size, generator=torch.Generator().manual_seed(1))
        model.lm_head.weight[cycle.roll(-1)] = model.model.embed_tokens.weight[cycle]
    return model.to(torch.bfloat16)


def act_order(folder: Path) -> None:
    """Give a GPTQ file with groups an activation order: columns assigned to groups at random."""
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(3)
    for name, g_idx in list(tensors.items()):
        if name.endswith("g_idx"):
            tensors[name] = g_idx[torch.randperm(len(g_idx))]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (folder / "config.json").write_text(json.dumps(config))


def mixed(q: str, rest: str) -> pw.FqnToConfig:
    """One part of a fused layer (q_proj) with another config than the others (k_proj, v_proj)."""
    return pw.FqnToConfig({"lm_head": None, "*.q_proj": q, "_default": rest})


CASES: dict[str, Case] = {
    "ct-w4a16": Case("w4a16", "compressed-tensors"),
    "ct-w4a16-g32": Case(by_name("w4a16", 32), "compressed-tensors"),
    "ct-w4a16-row": Case(pw.IntxWeightOnlyConfig("int4"), "compressed-tensors"),
    "ct-uint4": Case(by_name("uint4", 128), "compressed-tensors"),
    "ct-int2": Case("int2", "compressed-tensors"),
    "ct-int3": Case("int3", "compressed-tensors"),
    "ct-int6": Case("int6", "compressed-tensors"),
    "ct-int8": Case("int8", "compressed-tensors"),
    "ct-int8-g128": Case(by_name("int8", 128), "compressed-tensors"),
    "ct-w8a8": Case("w8a8", "compressed-tensors"),
    "ct-w8a8-asym": Case(
        pw.Int8DynamicActivationInt8WeightConfig(act_mapping_type=pw.MappingType.ASYMMETRIC), "compressed-tensors"
    ),
    "ct-w8a8-grouped": Case("int8-dynamic-grouped", "compressed-tensors"),
    "ct-w8a8-static": Case(pw.Int8StaticActivationInt8WeightConfig(act_quant_scale=0.05), "compressed-tensors"),
    "ct-8da4w": Case("8da4w", "compressed-tensors"),
    "ct-fp8": Case("fp8", "compressed-tensors"),
    "ct-float8": Case("float8", "compressed-tensors"),
    "ct-float8-dynamic": Case("float8-dynamic", "compressed-tensors"),
    "ct-float8-int4": Case("float8-int4", "compressed-tensors"),
    "ct-nvfp4": Case("nvfp4", "compressed-tensors"),
    "ct-mxfp4": Case("mxfp4", "compressed-tensors"),
    "ct-mxfp8": Case("mxfp8", "compressed-tensors"),
    "ct-mxfp8-dynamic": Case("mxfp8-dynamic", "compressed-tensors"),
    "ct-embeddings": Case(pw.FqnToConfig({"_embeddings": "int8", "_default": "w8a8"}), "compressed-tensors"),
    "ct-mixed": Case(mixed("int8", "w4a16"), "compressed-tensors"),
    "gptq-4": Case("w4a16", "gptq"),
    "gptq-4-row": Case(pw.IntxWeightOnlyConfig("int4"), "gptq"),
    "gptq-8": Case(by_name("int8", 128), "gptq"),
    "gptq-2": Case("int2", "gptq"),
    "gptq-3": Case("int3", "gptq"),
    "gptq-4-act-order": Case("w4a16", "gptq", change=act_order),
    "gptq-4-v2-sym": Case("w4a16", "gptq_v2"),
    "gptq-4-asym": Case(by_name("uint4", 128), "gptq_v2"),
    "gptq-mixed": Case(mixed("int8:128", "w4a16"), "gptq"),
    "awq": Case(by_name("w4a16-awq"), "awq"),
    "awq-sym": Case(pw.IntxWeightOnlyConfig("int4", pw.PerGroup(128), scale_dtype=torch.float16), "awq"),
    "ct-head-w4a16": Case(pw.FqnToConfig({"_default": "w4a16"}), "compressed-tensors"),
    "ct-head-w8a8": Case(pw.FqnToConfig({"_default": "w8a8"}), "compressed-tensors"),
    "gptq-head": Case(pw.FqnToConfig({"_default": "w4a16"}), "gptq"),
    "awq-head": Case(pw.FqnToConfig({"_default": by_name("w4a16-awq")}), "awq"),
    "ct-part-float": Case(pw.FqnToConfig({"lm_head": None, "*.k_proj": None, "_default": "w4a16"}), "compressed-tensors"),
    "gptq-part-float": Case(pw.FqnToConfig({"lm_head": None, "*.k_proj": None, "_default": "w4a16"}), "gptq"),
    "ct-two-schemes": Case(pw.FqnToConfig({"lm_head": None, "*.mlp.*": "w4a16", "_default": "w8a8"}), "compressed-tensors"),
    "ct-attention-float": Case(pw.FqnToConfig({"lm_head": None, "*.self_attn.*": None, "_default": "w8a8"}), "compressed-tensors"),
    "gptq-attention-float": Case(pw.FqnToConfig({"lm_head": None, "*.self_attn.*": None, "_default": "w4a16"}), "gptq"),
    "gptq-two-groups": Case(pw.FqnToConfig({"lm_head": None, "*.self_attn.*": "w4a16:32", "_default": "w4a16"}), "gptq"),
    "ct-first-layer": Case(pw.FqnToConfig({"lm_head": None, "model.layers.0.*": "w8a8", "_default": "w4a16"}), "compressed-tensors"),
    "ct-first-float": Case(pw.FqnToConfig({"lm_head": None, "model.layers.0.*": None, "_default": "w4a16"}), "compressed-tensors"),
    "awq-first-float": Case(pw.FqnToConfig({"lm_head": None, "model.layers.0.*": None, "_default": by_name("w4a16-awq")}), "awq"),
    "fp8-block": Case(pw.SpecConfig(FP8_BLOCK), "fp8"),
}


def write_case(folder: str | Path, name: str) -> Path:
    """Write the file of a case into a new folder, and return it."""
    case, folder = CASES[name], Path(folder)
    source, small, out = folder / "float", folder / "small", folder / "out"
    decided().save_pretrained(source)
    config = case.config
    rules = config if isinstance(config, pw.FqnToConfig) else pw.FqnToConfig({"lm_head": None, "_default": config})
    pw.quantize_checkpoint(source, small, rules)
    pw.convert(small, out, to=case.to, **case.options)
    if case.change is not None:
        case.change(out)
    return out



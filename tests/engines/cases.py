"""The files whose loading each engine is tested with: how each is written, and an independent decode of its weights.

A case is a small Llama whose next token does not depend on rounding, quantized with a config and converted to a file
format: ``write_case(folder, name)`` writes it. ``decode`` of decode.py computes the float weights that a file stands
for from its stored tensors with numpy alone. What each engine does with a case is in ``refused``: the data of a table
in docs/serving.md, tested by test_transformers.py, and with vLLM by scripts/test-engines.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import pennyweight as pw
from pennyweight.core.spec import FP8_BLOCK
from pennyweight.planning.configs.by_name import by_name
from tests.engines.decode import decode

CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One file.

    text     the file in words, as in docs/serving.md
    config   of the layers that are quantized: a short name, or a config; FqnToConfig decides about all layers
    to       the file format
    refused  {engine: a part of its error message}; an engine that is not listed loads the file, and computes with the
             weights of :func:`~tests.engines.decode.decode`
    change   changes the written folder, for files that Pennyweight does not write itself
    """

    text: str
    config: Any
    to: str
    refused: dict[str, str] = field(default_factory=dict)
    change: Callable[[Path], None] | None = None


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


CT, GPTQ = "compressed-tensors", "gptq"
VLLM, LOW, HIGH = "vllm", "transformers 5.10.4", "transformers 5.23.0"
# GPTQ and AWQ files in transformers need a package that has no build for this Python
_NO_GPTQ = dict.fromkeys((LOW, HIGH), "requires optimum")
_NO_AWQ = dict.fromkeys((LOW, HIGH), "requires gptqmodel")
_EMBEDDING = dict.fromkeys((LOW, HIGH), "object has no attribute 'weight'")
_WNA16 = {VLLM: "Failed to find a kernel that can implement the WNA16 linear layer"}
_SCALED = {VLLM: "Failed to find a kernel that can implement the ScaledMM linear layer"}
_NO_SCHEME = {VLLM: "No compressed-tensors compatible scheme was found"}
_SHARDS = "All shards of fused layers to have the same precision"
_ASYMMETRIC = pw.Int8DynamicActivationInt8WeightConfig(act_mapping_type=pw.MappingType.ASYMMETRIC)
AWQ_CONFIG = by_name("w4a16-awq")


def rules(**table: Any) -> pw.FqnToConfig:
    """Rules for layers whose names end so; the output layer stays float unless it is named."""
    named = {f"*.{name}" if name != "lm_head" else name: config for name, config in table.items() if name != "default"}
    return pw.FqnToConfig({"lm_head": None, **named, "_default": table["default"]})


CASES: dict[str, Case] = {
    "ct-w4a16": Case("int4, groups of 128, symmetric", "w4a16", CT),
    "ct-w4a16-g32": Case("int4, groups of 32, symmetric", by_name("w4a16", 32), CT),
    "ct-w4a16-row": Case("int4 per row, symmetric", pw.IntxWeightOnlyConfig("int4"), CT),
    "ct-uint4": Case("int4, groups of 128, zero points", "uint4:128", CT, {HIGH: "ignore_mismatched_sizes"}),
    "ct-int2": Case("int2, groups of 64, symmetric", "int2", CT, _WNA16),
    "ct-int3": Case("int3, groups of 64, symmetric", "int3", CT, _WNA16),
    "ct-int6": Case("int6, groups of 64, symmetric", "int6", CT, _WNA16),
    "ct-int8": Case("int8 per row, float inputs", "int8", CT, _WNA16),
    "ct-int8-g128": Case("int8, groups of 128, float inputs", "int8:128", CT, _WNA16),
    "ct-w8a8": Case("W8A8, inputs per token", "w8a8", CT),
    "ct-w8a8-asym": Case("W8A8, inputs per token with zero points", _ASYMMETRIC, CT),
    "ct-w8a8-static": Case(
        "W8A8, inputs with one fixed scale", pw.Int8StaticActivationInt8WeightConfig(act_quant_scale=0.05), CT
    ),
    "ct-w8a8-tensor": Case(
        "W8A8, weights per tensor",
        pw.Int8DynamicActivationInt8WeightConfig(granularity=(pw.PerToken(), pw.PerTensor())), CT,
    ),
    "ct-w8a8-grouped": Case("W8A8 in groups of 128", "int8-dynamic-grouped", CT, _NO_SCHEME),
    "ct-8da4w": Case("int4, groups of 32, inputs int8 per token", "8da4w", CT),
    "ct-fp8": Case("FP8 per row, inputs per token", "fp8", CT),
    "ct-float8": Case("FP8 per row, float inputs", "float8", CT, _SCALED),
    "ct-float8-dynamic": Case(
        "FP8 per tensor, inputs per tensor", "float8-dynamic", CT, {VLLM: "static_scaled_fp8_quant"}
    ),
    "ct-float8-int4": Case("int4, groups of 128, inputs FP8 per token", "float8-int4", CT, _NO_SCHEME),
    "ct-nvfp4": Case("NVFP4", "nvfp4", CT, {VLLM: "Marlin FP4 not available"}),
    "ct-mxfp4": Case("MXFP4", "mxfp4", CT, {VLLM: "Failed to find a kernel that can implement the MXFP4 linear layer"}),
    "ct-mxfp8": Case("MXFP8", "mxfp8", CT, {VLLM: "Failed to find a kernel that can implement the MXFP8 linear layer"}),
    "ct-head": Case("int4, groups of 128, output layer included", rules(default="w4a16", lm_head="w4a16"), CT),
    "ct-embeddings": Case(
        "W8A8, int8 embeddings", pw.FqnToConfig({"_embeddings": "int8", "_default": "w8a8"}), CT,
        {VLLM: "no module or parameter named 'embed_tokens.weight_packed'", **_EMBEDDING},
    ),
    "ct-two-schemes": Case("W8A8 attention, int4 MLP", rules(default="w8a8", **{"mlp.*": "w4a16"}), CT),
    "ct-first-layer": Case(
        "W8A8 in the first layer, int4 in others", rules(default="w4a16", **{"layers.0.*": "w8a8"}), CT
    ),
    "ct-float-attention": Case("W8A8, float attention", rules(default="w8a8", **{"self_attn.*": None}), CT),
    "ct-float-part": Case(
        "int4, float k_proj", rules(default="w4a16", k_proj=None), CT, {VLLM: "requires all to use the same scheme"}
    ),
    "gptq-4": Case("GPTQ, 4 bits, groups of 128, symmetric", "w4a16", GPTQ, _NO_GPTQ),
    "gptq-4-row": Case("GPTQ, 4 bits per row, symmetric", pw.IntxWeightOnlyConfig("int4"), GPTQ, _NO_GPTQ),
    "gptq-4-v2": Case("GPTQ v2, 4 bits, groups of 128, symmetric", "w4a16", "gptq_v2", _NO_GPTQ),
    "gptq-4-zeros": Case(
        "GPTQ v2, 4 bits, groups of 128, zero points", "uint4:128", "gptq_v2", {VLLM: "bits=4, sym=False", **_NO_GPTQ}
    ),
    "gptq-2": Case("GPTQ, 2 bits", "int2", GPTQ, {VLLM: "bits=2, sym=True", **_NO_GPTQ}),
    "gptq-3": Case("GPTQ, 3 bits", "int3", GPTQ, {VLLM: "bits=3, sym=True", **_NO_GPTQ}),
    "gptq-8": Case(
        "GPTQ, 8 bits, groups of 128", "int8:128", GPTQ,
        {VLLM: "Marlin does not support weight_bits = uint8b128", **_NO_GPTQ},
    ),
    "gptq-4-act-order": Case(
        "GPTQ, 4 bits, desc_act with groups", "w4a16", GPTQ, {VLLM: "(desc_act=True) is no longer", **_NO_GPTQ},
        act_order,
    ),
    "gptq-head": Case("GPTQ, 4 bits, output layer included", rules(default="w4a16", lm_head="w4a16"), GPTQ, _NO_GPTQ),
    "gptq-two-groups": Case(
        "GPTQ, 4 bits, groups of 32 in attention, of 128 in others",
        rules(default="w4a16", **{"self_attn.*": "w4a16:32"}), GPTQ, _NO_GPTQ,
    ),
    "gptq-float-attention": Case(
        "GPTQ, 4 bits, float attention", rules(default="w4a16", **{"self_attn.*": None}), GPTQ, _NO_GPTQ
    ),
    "gptq-float-part": Case(
        "GPTQ, 4 bits, float k_proj", rules(default="w4a16", k_proj=None), GPTQ, {VLLM: _SHARDS, **_NO_GPTQ}
    ),
    "awq": Case("AWQ, groups of 128, zero points", AWQ_CONFIG, "awq", _NO_AWQ),
    "awq-first-float": Case(
        "AWQ, float first layer", rules(default=AWQ_CONFIG, **{"layers.0.*": None}), "awq", _NO_AWQ
    ),
    "awq-head": Case(
        "AWQ, output layer included", rules(default=AWQ_CONFIG, lm_head=AWQ_CONFIG), "awq",
        {VLLM: "no module or parameter named 'lm_head.qweight'", **_NO_AWQ},
    ),
    "fp8-block": Case(
        "FP8 in blocks of 128×128 (DeepSeek)", pw.SpecConfig(FP8_BLOCK), "fp8",
        {VLLM: "Failed to find a kernel that can implement the ScaledMM linear layer"},
    ),
}  # fmt: skip
BFLOAT16 = ("ct-nvfp4", "ct-mxfp4", "ct-mxfp8")  # transformers reads them only in bfloat16 models


def write_case(folder: str | Path, name: str) -> Path:
    """Write the file of a case into a folder, and return the folder that an engine loads."""
    case, folder = CASES[name], Path(folder)
    config = case.config
    if not isinstance(config, pw.FqnToConfig):
        config = rules(default=config)
    source, small, out = folder / "float", folder / "small", folder / "out"
    decided().save_pretrained(source)
    pw.quantize_checkpoint(source, small, config)
    pw.convert(small, out, to=case.to)
    if case.change is not None:
        case.change(out)
    return out


def reference(folder: Path) -> LlamaForCausalLM:
    """The float32 model whose weights are those that a written file stands for; its inputs are not quantized."""
    model = LlamaForCausalLM(CONFIG).eval().float()
    missing = model.load_state_dict(decode(folder), strict=False).missing_keys
    assert not missing, missing
    return model


def log_probabilities(folder: Path, tokens: list[int]) -> Tensor:
    """log-probabilities [len(tokens), vocabulary] of the next token after each of ``tokens``, by :func:`reference`.

    vLLM computes in bfloat16: those that it reports differ by up to 0.2 where inputs are float or rounded per token,
    and by up to 0.6 with one fixed scale ("ct-w8a8-static").
    """
    with torch.no_grad():
        return reference(folder)(torch.tensor([tokens])).logits[0].float().log_softmax(-1)

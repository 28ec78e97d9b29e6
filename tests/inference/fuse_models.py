"""Tiny random models of the families whose blocks are fused, and how to run them."""

from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn

import pennyweight as pw

try:
    import transformers

    NEWEST = Version(transformers.__version__) >= Version("5.23")
except ImportError:  # the tests that need it are skipped
    NEWEST = False

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
TEXT = {**SIZES, "vocab_size": 101, "max_position_embeddings": 64}
DECODER = {**TEXT, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
IMAGE = {"image_size": 16, "patch_size": 4}


def _transformers(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return make


def _encoder(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(64, 4, 96, **options), 2, enable_nested_tensor=False
    )


GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 101, "n_positions": 64, "eos_token_id": None}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 101}
T5 |= {"decoder_start_token_id": 0, "eos_token_id": None}
WHISPER = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 101,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_source_positions": 20,
    "max_target_positions": 40, "num_mel_bins": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    "decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
BART = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 101,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 3,
    "forced_eos_token_id": None,
}  # fmt: skip
HEADS = {"head_dim": 16}
GEMMA2 = {**DECODER, **HEADS, "sliding_window": 8, "query_pre_attn_scalar": 24}

# name -> (model, number of fused blocks)
FAMILIES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "bert": (_transformers("BertModel", "BertConfig", **TEXT), 2),
    "llama": (_transformers("LlamaForCausalLM", "LlamaConfig", **DECODER), 2),
    "qwen2": (_transformers("Qwen2ForCausalLM", "Qwen2Config", **DECODER), 2),
    "qwen3": (_transformers("Qwen3ForCausalLM", "Qwen3Config", **DECODER, **HEADS), 2),
    "mistral": (_transformers("MistralForCausalLM", "MistralConfig", **DECODER, sliding_window=8), 2),
    "gpt2": (_transformers("GPT2LMHeadModel", "GPT2Config", **GPT2), 2),
    "gemma": (_transformers("GemmaForCausalLM", "GemmaConfig", **DECODER, **HEADS), 2),
    "gemma2": (_transformers("Gemma2ForCausalLM", "Gemma2Config", **GEMMA2), 2),
    "gemma3": (_transformers("Gemma3ForCausalLM", "Gemma3TextConfig", **DECODER, **HEADS, sliding_window=8), 2),
    "phi": (_transformers("PhiForCausalLM", "PhiConfig", **DECODER), 2),
    "phi3": (_transformers("Phi3ForCausalLM", "Phi3Config", **DECODER), 2),
    "vit": (_transformers("ViTModel", "ViTConfig", **SIZES, **IMAGE), 2),
    "clip": (_transformers("CLIPModel", "CLIPConfig", text_config=TEXT, vision_config={**SIZES, **IMAGE}), 4),
    "whisper": (_transformers("WhisperForConditionalGeneration", "WhisperConfig", **WHISPER), 4),
    "bart": (_transformers("BartForConditionalGeneration", "BartConfig", **BART), 4),
    # up to transformers 5.10 the self-attention layers of T5 make their own mask
    "t5": (_transformers("T5ForConditionalGeneration", "T5Config", **T5), 6 if NEWEST else 4),
    "encoder": (_encoder(batch_first=True), 2),
    "encoder norm first": (_encoder(batch_first=True, norm_first=True, activation="gelu"), 2),
    "encoder tokens first": (_encoder(), 2),
}
DECODERS = ["llama", "qwen2", "qwen3", "mistral", "gpt2", "gemma", "gemma2", "gemma3", "phi", "phi3"]
GENERATING = [*DECODERS, "whisper", "bart", "t5"]
SCHEMES: dict[str, Any] = {
    "int8": pw.Int8WeightOnlyConfig(),
    "int4": pw.Int4WeightOnlyConfig(group_size=32),
    "int8-dynamic": pw.Int8DynamicActivationInt8WeightConfig(),
}


def model_of(family: str, scheme: str = "int8", dtype: torch.dtype = torch.float32) -> nn.Module:
    """A quantized model whose norms and biases are random, too."""
    torch.manual_seed(0)
    model = FAMILIES[family][0]().eval().to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p += 0.1 * torch.randn_like(p)
            elif p.ndim == 2:  # larger than at initialization, so that blocks change their input visibly
                p *= 3
    pw.quantize_(model, SCHEMES[scheme])
    return model


def inputs(family: str, dtype: torch.dtype = torch.float32, *, batch: int = 3, tokens: int = 9) -> dict[str, Any]:
    """A batch with padded sequences."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    ids = torch.randint(4, 100, (batch, tokens), generator=generator)
    mask = torch.ones_like(ids)
    if tokens > 1:
        mask[0, :4] = mask[-1, :1] = 0
    text = {"input_ids": ids * mask, "attention_mask": mask}
    if family == "vit":
        return {"pixel_values": normal(batch, 3, 16, 16)}
    if family == "clip":
        return {**text, "pixel_values": normal(batch, 3, 16, 16)}
    if family == "whisper":
        return {"input_features": normal(batch, 8, 40), "decoder_input_ids": ids}
    if family in ("t5", "bart"):
        return {**text, "decoder_input_ids": ids}
    if family.startswith("encoder"):
        first = "tokens first" not in family
        x = normal(batch, tokens, 64) if first else normal(tokens, batch, 64)
        return {"src": x, "src_key_padding_mask": mask == 0}
    return text


def conv_net() -> nn.Sequential:
    """Two quantized convolutions with static scales of their inputs, which become one chain."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    pw.quantize_(net, conv_config(net))
    return net


def conv_config(net: nn.Module) -> pw.FqnToConfig:
    """int8 convolutions with static inputs, for images of 3 channels."""
    images = [torch.randn(2, 3, 12, 11)]
    config = pw.Int8StaticActivationInt8WeightConfig
    return pw.calibrate(net, images, config, filter_fn=lambda module, name: isinstance(module, nn.Conv2d))


def states(output: Any) -> Tensor:
    """The tensor that is compared."""
    if isinstance(output, Tensor):
        return output
    if hasattr(output, "text_embeds"):
        return torch.cat([output.text_embeds, output.image_embeds])
    for name in ("logits", "last_hidden_state"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    raise AssertionError(type(output))


def blocks_of(report: pw.Report) -> dict[str, str]:
    """Name of each block -> "" if it is fused, else the reason."""
    return {row.name: row.note for row in report.rows if not row.shape}

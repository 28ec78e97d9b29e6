"""A Llama of a few thousand weights, written in each scheme, is loaded by transformers to the weights that ours has."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from pennyweight.core.formats import E4M3, INT3, INT4, INT8, UINT4
from pennyweight.core.spec import MXFP4, MXFP8, NVFP4, ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io.codecs.compressed_tensors import CODEC, NVFP4_SCALE
from pennyweight.io.manifest import Meta

SIZES = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "tie_word_embeddings": False,
}  # fmt: skip
TOKEN = ActivationSpec(QuantSpec(INT8, (-1,)))
SCHEMES: dict[str, tuple[QuantSpec, ActivationSpec | None]] = {
    "W4A16": (QuantSpec(INT4, (32,)), None),
    "W4A16 asymmetric": (QuantSpec(UINT4, (32,), zero_point=True), None),
    "W3A16 per row": (QuantSpec(INT3, (-1,)), None),
    "W8A8": (QuantSpec(INT8, (-1,)), TOKEN),
    "FP8 dynamic": (QuantSpec(E4M3, (-1,)), ActivationSpec(QuantSpec(E4M3, (-1,)))),
    "FP8 block": (QuantSpec(E4M3, (128, 128)), None),
    "NVFP4": (NVFP4.with_(scale=NVFP4_SCALE), None),
    "MXFP4": (MXFP4, None),
    "MXFP8": (MXFP8, None),
}


def model_of() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def save(model: LlamaForCausalLM, weights: dict[str, QT], path: Path) -> None:
    """What a converter writes, in one go."""
    assert CODEC.writing is not None
    stored = {name: p.detach() for name, p in model.state_dict().items() if name not in weights}
    metas = {}
    for name, w in weights.items():
        metas[name] = Meta(w.spec, tuple(w.shape), w.dtype, w.act)
        stored |= CODEC.writing.pack(name, w.plain_parts(), metas[name])
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    config["quantization_config"] = CODEC.writing.method(metas, ("lm_head.weight",))
    (path / "config.json").write_text(json.dumps(config))
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", SCHEMES)
def test_transformers_loads_equal_weights(name: str, tmp_path: Path) -> None:
    spec, act = SCHEMES[name]
    model = model_of()
    linear = {f"{n}.weight": m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
    weights = {n: QT.from_float(m.weight, spec, act=act) for n, m in linear.items()}
    save(model, weights, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        ids = torch.arange(24).reshape(2, 12)
        with torch.no_grad():
            got = loaded(ids).logits  # the first call unpacks
    # its NVFP4 and MX values are rounded to bfloat16
    dtype = torch.bfloat16 if spec.format.bits == 4 and isinstance(spec.scale, QuantSpec) else torch.float32
    for n, w in weights.items():
        theirs = loaded.get_submodule(n.removesuffix(".weight")).weight
        assert torch.equal(theirs.to(dtype), w.dequantize(dtype)), n
    if act is not None:
        return  # its activations are rounded elsewhere
    for n, m in linear.items():
        m.weight.data = weights[n].dequantize(dtype).float()
    with torch.no_grad():
        want = model(ids).logits
    torch.testing.assert_close(got.float(), want, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-2)

"""A Llama of a few thousand weights, written in each scheme, is loaded by transformers to the weights that ours has."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM

from pennyweight.core.formats import E4M3, INT3, INT4, INT8, UINT4
from pennyweight.core.spec import MXFP4, MXFP8, NVFP4, ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io.codecs.compressed_tensors import COMPRESSED_TENSORS, find
from pennyweight.io.codecs.compressed_tensors_config import NVFP4_SCALE
from tests.io.codecs.kept import entries_of, tensor_of, written

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
    "FP8 static": (QuantSpec(E4M3, None), ActivationSpec(QuantSpec(E4M3, None), "static")),
    "FP8 block": (QuantSpec(E4M3, (128, 128)), None),
    "NVFP4": (NVFP4.with_(scale=NVFP4_SCALE), None),
    "MXFP4": (MXFP4, None),
    "MXFP8": (MXFP8, None),
}


# Its empty model takes no packed zero points, so that such files load with dequantize=True only.
DEQUANTIZED = {"W4A16 asymmetric", "W4A16", "FP8 block"}


def save(model: LlamaForCausalLM, weights: dict[str, QT], path: Path) -> dict[str, QT]:
    """What a converter writes, in one go. Returns what is read again: NVFP4's global scale is rounded on the way."""
    packed, method = written(COMPRESSED_TENSORS, weights)
    stored = {name: p.detach() for name, p in model.state_dict().items() if name not in weights}
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    config["quantization_config"] = method | {"ignore": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config))
    save_file(stored | packed, path / "model.safetensors", metadata={"format": "pt"})
    return {
        name: tensor_of(found, packed) for name, found in find(entries_of(packed), method, packed.__getitem__).items()
    }


@pytest.mark.parametrize("name", SCHEMES)
def test_transformers_loads_equal_weights(name: str, tmp_path: Path) -> None:
    spec, act = SCHEMES[name]
    dtype = torch.bfloat16 if isinstance(spec.scale, QuantSpec) else torch.float32  # what such values become there
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), dtype=dtype).eval()
    linear = {f"{n}.weight": m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
    weights = {n: QT.from_float(m.weight, spec, act=act) for n, m in linear.items()}
    if act is not None and act.mode == "static":
        weights = {n: w.with_(act_scale=torch.tensor([0.01])) for n, w in weights.items()}
    read = save(model, weights, tmp_path)
    ids = torch.arange(24).reshape(2, 12)
    more = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if name in DEQUANTIZED else {}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # its own
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, **more).eval()
        got = loaded(ids).logits  # the first call unpacks
    assert read.keys() == weights.keys()
    for n, w in read.items():
        theirs = loaded.get_submodule(n.removesuffix(".weight")).weight
        assert theirs.dtype == dtype
        assert torch.equal(theirs, w.dequantize(dtype)), n
        linear[n].weight.data = w.dequantize(dtype)
    with torch.no_grad():
        want = model(ids).logits
    if act is None:
        assert torch.equal(got, want)
    else:  # inputs are rounded too, there
        assert 0 < (got - want).abs().max() < 0.1 * want.abs().max()

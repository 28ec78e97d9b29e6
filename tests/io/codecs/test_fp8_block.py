"""FP8 in blocks, as DeepSeek ships it, against transformers' own Fp8Dequantize."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from pennyweight.core import blocks
from pennyweight.core.formats import E4M3, E5M2
from pennyweight.core.spec import FP8_BLOCK, FP8_ROW, INT8_ROW, MXFP8, ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io.codecs.fp8_block import FP8, find
from pennyweight.io.manifest import Meta
from tests.io.codecs.kept import entries_of, same_bytes, tensor_of, written

CONFIG: dict[str, Any] = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"
}  # fmt: skip
PER_GROUP = ActivationSpec(QuantSpec(E4M3, (128,)))


def layer(shape: tuple[int, ...], block: tuple[int, int] = (128, 128)) -> tuple[Tensor, Tensor]:
    counts = blocks.counts(block, shape)
    return torch.randn(shape).to(torch.float8_e4m3fn), torch.rand(counts) + 0.01


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (64, 48), (128, 32), (3, 256, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_transformers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    codes, scale = layer(shape)
    name, scale_name = ("up.weight", "up.weight_scale_inv") if len(shape) == 2 else ("e.up", "e.up_scale_inv")
    tensors = {name: codes, scale_name: scale, "norm.weight": torch.ones(4, dtype=dtype)}
    found = find(entries_of(tensors), CONFIG, tensors.__getitem__)
    assert list(found) == [name]
    w = tensor_of(found[name], tensors)
    assert (w.dtype, w.spec, w.act) == (dtype, FP8_BLOCK, PER_GROUP)
    assert same_bytes(w.dequantize(), Fp8Dequantize(None)._dequantize_one(codes, scale, dtype))
    back, method = written(FP8, {name: w})
    assert all(same_bytes(back[key], tensors[key]) for key in (name, scale_name))
    assert len(back) == 2
    assert FineGrainedFP8Config(**method).weight_block_size == [128, 128]
    assert find(entries_of(back), method, back.__getitem__)[name].meta.spec == FP8_BLOCK


@pytest.mark.parametrize("shape", [(576, 130), (1, 1), (129, 127), (2, 131, 257)])
def test_blocks_that_do_not_divide(shape: tuple[int, ...]) -> None:
    codes, scale = layer(shape)
    name = "up.weight" if len(shape) == 2 else "up"
    tensors = {name: codes, f"{name}_scale_inv": scale}
    w = tensor_of(find(entries_of(tensors), CONFIG, tensors.__getitem__)[name], tensors)
    spread = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., : shape[-2], : shape[-1]]
    assert torch.equal(w.dequantize(torch.float32), codes.float() * spread)
    back, _ = written(FP8, {name: w})
    assert all(same_bytes(back[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize("ending", ["weight_scale_inv", "scale", "qscale_weight"])
@pytest.mark.parametrize("kind", [torch.float32, torch.uint8, torch.float8_e8m0fnu])
def test_other_names_and_powers_of_two(ending: str, kind: torch.dtype) -> None:
    codes, scale = layer((256, 128))
    exponents = torch.randint(110, 130, scale.shape, dtype=torch.uint8)
    stored = scale if kind is torch.float32 else exponents if kind is torch.uint8 else exponents.view(kind)
    tensors = {"up.weight": codes, f"up.{ending}": stored}
    w = tensor_of(find(entries_of(tensors), CONFIG | {"scale_fmt": "ue8m0"}, tensors.__getitem__)["up.weight"], tensors)
    assert torch.equal(
        w.dequantize(torch.float32), Fp8Dequantize(None)._dequantize_one(codes, stored, torch.float32)
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_in_all_with_static_inputs(shape: tuple[int, ...]) -> None:
    tensors = {
        "up.weight": torch.randn(24, 40).to(torch.float8_e4m3fn), "up.weight_scale_inv": torch.full(shape, 0.3),
        "up.activation_scale": torch.tensor(0.7),
    }  # fmt: skip
    found = find(
        entries_of(tensors), CONFIG | {"weight_block_size": None, "activation_scheme": "static"}, tensors.__getitem__
    )["up.weight"]
    w = tensor_of(found, tensors)
    assert w.act == ActivationSpec(QuantSpec(E4M3, None), "static")
    assert w.act_scale is not None
    assert w.act_scale.tolist() == pytest.approx([0.7])
    assert torch.equal(w.dequantize(torch.float32), tensors["up.weight"].float() * tensors["up.weight_scale_inv"])


def test_other_scales_are_left_alone() -> None:
    tensors = {"norm.scale": torch.ones(4), "norm.weight": torch.ones(4), "x.scale": torch.ones(1)}
    assert find(entries_of(tensors), CONFIG, tensors.__getitem__) == {}


@pytest.mark.parametrize(
    ("change", "config", "why"),
    [
        ({"up.weight_scale_inv": None}, {}, "is FP8, but no scale"),
        ({"up.weight": None}, {}, "is unexpected: up.weight is not stored"),
        ({"up.weight": torch.zeros(256, 128)}, {}, r"float32 \[.*\], expected float8_e4m3fn"),
        ({"up.weight": torch.zeros(128).to(torch.float8_e4m3fn)}, {}, "at least .rows, columns"),
        ({"up.weight": torch.zeros(0, 128).to(torch.float8_e4m3fn)}, {}, "not empty"),
        ({"up.weight_scale_inv": torch.ones(2, 2)}, {}, r"shape \[2, 2\].*expected \[2, 1\]"),
        ({"up.weight_scale_inv": torch.ones(2, 1).half()}, {}, r"float16 \[.*\], expected float32"),
        ({"up.scale": torch.ones(2, 1)}, {}, "two scales"),
        ({"up.activation_scale": torch.ones(1)}, {}, "is unexpected"),
        ({}, {"activation_scheme": "static"}, "activation_scale is missing"),
        ({"up.activation_scale": torch.ones(2)}, {"activation_scheme": "static"}, r"float32 \[2\], expected"),
        ({}, {"activation_scheme": "none"}, "'none' is not supported"),
        ({}, {"activation_scheme": 3}, "must be str"),
        ({}, {"weight_block_size": [64, 128]}, r"weight_block_size \[64, 128\]"),
        ({}, {"weight_block_size": None}, "one scale for each matrix"),
        ({}, {"weight_block_size": [128]}, "two positive sizes"),
        ({}, {"weight_block_size": [0, 128]}, "two positive sizes"),
        ({}, {"weight_block_size": [True, 128]}, "two positive sizes"),
        ({}, {"weight_block_size": 128}, "must be list"),
        ({}, {"fmt": "e5m2"}, "e5m2"),
        ({}, {"expert_dtype": "fp4"}, "fp4"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], config: dict[str, Any], why: str) -> None:
    codes, scale = layer((256, 128))
    tensors = {"up.weight": codes, "up.weight_scale_inv": scale} | change
    tensors = {name: t for name, t in tensors.items() if t is not None}
    with pytest.raises(ValueError, match=why):
        find(entries_of(tensors), CONFIG | config, tensors.__getitem__)


def test_what_cannot_be_written_is_refused() -> None:
    writing = FP8.writing
    assert writing is not None

    def meta(spec: QuantSpec, shape: tuple[int, ...] = (256, 128), **more: Any) -> Meta:
        return Meta(spec, shape, torch.bfloat16, **more)

    row = ActivationSpec(QuantSpec(E4M3, (-1,)))
    cases: list[tuple[str, Meta, str, QuantSpec | None]] = [
        ("up.weight", meta(FP8_ROW), "blocks of 128", FP8_BLOCK),
        ("up.weight", meta(MXFP8), "blocks of 128", FP8_BLOCK),
        ("up.weight", meta(QuantSpec(E5M2, (-1,))), "blocks of 128", FP8_BLOCK),
        ("up.weight", meta(INT8_ROW), "blocks of 128", None),
        ("up.weight", meta(FP8_BLOCK, axes=(1, 0)), "transposed", None),
        ("up.weight", meta(FP8_BLOCK, (128,)), "matrices", None),
        ("table", meta(FP8_BLOCK), "named weight", None),
        ("up.weight", meta(FP8_BLOCK, act=row), "groups of 128", FP8_BLOCK),
    ]
    for name, what, why, nearest in cases:
        assert why in str(writing.refuses(name, what)), name
        assert writing.nearest(name, what) == nearest
    assert writing.refuses("up.weight", meta(FP8_BLOCK, act=PER_GROUP)) is None
    w = QT.from_float(torch.randn(130, 200), FP8_BLOCK)
    tensors, method = written(FP8, {"up.weight": w})
    found = find(entries_of(tensors), method, tensors.__getitem__)["up.weight"]
    assert torch.equal(tensor_of(found, tensors).dequantize(torch.float32), w.dequantize())
    assert writing.method({}, ("lm_head.weight",))["modules_to_not_convert"] == ["lm_head"]


def test_transformers_loads_equal_weights(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    linear = {f"{n}.weight": m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
    weights = {n: QT.from_float(m.weight, FP8_BLOCK, act=PER_GROUP) for n, m in linear.items()}
    packed, method = written(FP8, weights)
    stored = {n: p.detach() for n, p in model.state_dict().items() if n not in weights} | packed
    said = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    said["quantization_config"] = method | {"modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(said))
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        loaded = AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.bfloat16, quantization_config=FineGrainedFP8Config(dequantize=True)
        )
    for n, w in weights.items():
        assert torch.equal(loaded.get_submodule(n.removesuffix(".weight")).weight, w.dequantize()), n

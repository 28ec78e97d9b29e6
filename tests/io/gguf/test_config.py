"""GGUF metadata and config.json, against the config classes and models of transformers."""

import json
import math
from typing import Any

import gguf
import pytest
import torch
import transformers
from torch import nn

from pennyweight.io.gguf.architectures import ARCHITECTURES
from pennyweight.io.gguf.config import (
    POOLING,
    QUANTIZATION_VERSION,
    ROWS,
    config_from_kv,
    generation_files,
    kv_from_config,
    rope_tensors,
)
from pennyweight.io.gguf.metadata import short
from pennyweight.io.gguf.rope import FREQS, LONG, SHORT, llama3_factors, llama3_from_factors
from tests.io.gguf.models import LLAMA3, MODELS, gguf_tensors, random

# Written for a parameter, so told from the tensors and no key; or the defaults of no consequence to values
KEPT = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "layer_norm_eps", "rope_parameters",
    "sliding_window", "layer_types", "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act",
    "hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
    "type_vocab_size", "original_max_position_embeddings", "qk_layernorm", "use_sliding_window",
)  # fmt: skip


def plain(kv: dict[str, tuple[str, Any]]) -> dict[str, Any]:
    """Values as they come back from a file: float32 for FLOAT32."""
    as32 = lambda v: torch.tensor(v, dtype=torch.float32).item()  # noqa: E731
    return {k: as32(v) if kind == "FLOAT32" else v for k, (kind, v) in kv.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_config_comes_back(name: str) -> None:
    model = random(name)
    config = model.config
    stored, _ = gguf_tensors(model)
    kv = plain(kv_from_config(config.to_dict(), 0))
    back = config_from_kv(kv, stored, rope_tensors(config.to_dict()))
    again = transformers.AutoConfig.for_model(
        back["model_type"], **{k: v for k, v in back.items() if k != "model_type"}
    )
    assert type(again) is type(config)
    assert back["architectures"] == [type(model).__name__]
    assert back["torch_dtype"] == "float32"
    for key in KEPT:
        absent = False if key.endswith("_bias") else None  # a Mistral has no word for it
        assert getattr(again, key, absent) == getattr(config, key, absent), key
    with torch.device("meta"):
        built = type(model)(again)
    shapes = {n: p.shape for n, p in model.state_dict().items()}
    assert {n: p.shape for n, p in built.state_dict().items()} == shapes


@pytest.mark.parametrize("name", MODELS)
def test_keys_and_their_types_are_those_of_gguf(name: str) -> None:
    """Every key is one of gguf's, and its writer gives it the same value type."""
    config = MODELS[name][1].to_dict()
    for key, (kind, value) in kv_from_config(config, 7, name="x", pooling="mean").items():
        arch = next((a.gguf for a in ARCHITECTURES if key.startswith(a.gguf + ".")), None)
        assert (key if arch is None else "{arch}" + key.removeprefix(arch)) in GGUF_KEYS, key
        assert {"UINT32": int, "FLOAT32": float, "STRING": str, "BOOL": bool}[kind] is type(value), key


def _constants(cls: type) -> set[str]:
    return {v for k, v in vars(cls).items() if isinstance(v, str) and not k.startswith("_")}


GGUF_KEYS = set().union(*(_constants(c) for c in vars(gguf.Keys).values() if isinstance(c, type)))


def test_the_general_keys() -> None:
    config = MODELS["llama"][1].to_dict()
    kv = kv_from_config(config | {"_name_or_path": "/home/someone/models/Tiny-1B"}, 15)
    assert kv["general.architecture"] == ("STRING", "llama")
    assert kv["general.name"] == ("STRING", "Tiny-1B")
    assert kv["general.file_type"] == ("UINT32", 15)
    assert kv["general.quantization_version"] == ("UINT32", QUANTIZATION_VERSION) == ("UINT32", gguf.GGML_QUANT_VERSION)
    assert kv_from_config(config, 0)["general.name"] == ("STRING", "model")
    assert kv_from_config(config, 0, name="y")["general.name"] == ("STRING", "y")
    assert {k: v for k, v in POOLING.items() if k != "last"} == {
        "none": gguf.PoolingType.NONE, "mean": gguf.PoolingType.MEAN, "cls": gguf.PoolingType.CLS,
    }  # fmt: skip
    with pytest.raises(ValueError, match="pooling 'max'"):
        kv_from_config(config, 0, pooling="max")


@pytest.mark.parametrize(("file_type", "dtype"), [(0, "float32"), (1, "float16"), (32, "bfloat16"), (15, "bfloat16")])
def test_the_dtype_is_that_of_the_file(file_type: int, dtype: str) -> None:
    kv = plain(kv_from_config(MODELS["qwen2"][1].to_dict(), file_type))
    assert config_from_kv(kv)["torch_dtype"] == dtype


def test_a_config_of_transformers_4() -> None:
    config = MODELS["llama3"][1].to_dict()
    old = {k: v for k, v in config.items() if k != "rope_parameters"}
    scaling = {k: v for k, v in LLAMA3.items() if k not in ("rope_type", "rope_theta")}
    for name in ("rope_type", "type"):
        legacy = old | {"rope_theta": 10000.0, "rope_scaling": {name: "llama3", **scaling}}
        assert kv_from_config(legacy, 0) == kv_from_config(config, 0)
        assert torch.equal(rope_tensors(legacy)[FREQS], rope_tensors(config)[FREQS])
    gemma = MODELS["gemma3"][1].to_dict()
    old = {k: v for k, v in gemma.items() if k != "rope_parameters"} | {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
    assert kv_from_config(old, 0) == kv_from_config(gemma, 0)


def test_special_tokens_and_the_vocabulary_come_from_the_tokenizer() -> None:
    kv = plain(kv_from_config(MODELS["llama"][1].to_dict(), 0))
    ids = {f"tokenizer.ggml.{k}_token_id": i for k, i in (("bos", 5), ("eos", 47), ("padding", 48))}
    config = config_from_kv(kv | ids)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (5, 47, None)
    del kv["llama.vocab_size"]
    assert config_from_kv(kv | {"tokenizer.ggml.tokens": ["a"] * 50})["vocab_size"] == 50
    with pytest.raises(ValueError, match=r"llama\.vocab_size nor tokenizer\.ggml\.tokens"):
        config_from_kv(kv)


# -- rotary embeddings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (16.0, 2.0, 5.0, 4096)])
@pytest.mark.parametrize(("head_dim", "theta"), [(128, 5e5), (64, 5e5), (64, 1e4)])
def test_llama3_factors_are_those_of_transformers_and_tell_the_parameters(
    numbers: tuple[float, float, float, int], head_dim: int, theta: float
) -> None:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    rope = {"rope_type": "llama3", "rope_theta": theta, **dict(zip(names, numbers, strict=True))}

    def frequencies(rope: dict[str, Any]) -> torch.Tensor:
        config = transformers.LlamaConfig(
            hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=rope
        )
        return transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq

    plain = frequencies({"rope_type": "default", "rope_theta": theta})
    factors = llama3_factors(head_dim, theta, *numbers)
    torch.testing.assert_close(plain / factors, frequencies(rope), rtol=2e-6, atol=0)
    found = llama3_from_factors(factors, theta)
    torch.testing.assert_close(frequencies(found | {"rope_theta": theta}), frequencies(rope), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "factors", [[1.0, 2.0, 1.0, 8.0], [1.0, math.nan], [1.0, math.inf], [0.0, 1.0], [-1.0, 8.0], [], [3.0, 3.0]]
)
def test_factors_that_no_parameters_give(factors: list[float]) -> None:
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        llama3_from_factors(torch.tensor(factors), 1e4)


def test_the_tensors_that_a_config_depends_on_must_be_given() -> None:
    kv = plain(kv_from_config(MODELS["llama3"][1].to_dict(), 0))
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        config_from_kv(kv, [FREQS])
    extra = rope_tensors(MODELS["phi3_long"][1].to_dict())
    assert extra.keys() == {LONG, SHORT}
    assert not rope_tensors(MODELS["bert"][1].to_dict())
    bad = MODELS["phi3_long"][1].to_dict()
    bad["rope_parameters"] = bad["rope_parameters"] | {"long_factor": [1.0]}
    with pytest.raises(ValueError, match="long_factor has 1 factors for 4 rotated pairs"):
        rope_tensors(bad)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("llama", {"hidden_size": None}, "has no hidden_size"),
        ("llama", {"hidden_size": -4}, "hidden_size must be a positive integer"),
        ("llama", {"num_hidden_layers": 2.0}, "num_hidden_layers must be"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' cannot be stored"),
        ("qwen2", {"rope_parameters": LLAMA3}, "'llama3' cannot be stored"),
        ("qwen2_yarn", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0}}, "mscale"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types\[1\]"),
        ("gemma2", {"query_pre_attn_scalar": 144}, "query_pre_attn_scalar is 144"),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types\[0\]"),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 4, "_sliding_window_pattern": 4}, "pattern is 4"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("phi2", {"qk_layernorm": True}, "qk_layernorm"),
        ("llama", {"rope_parameters": 3}, "rope_parameters must be an object"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        ("gemma3", {"rope_parameters": {"sliding_attention": [1]}}, "sliding_attention must be an object"),
        ("gemma3", {"layer_types": 2.5}, "layer_types must be a list"),
        ("phi3", {"sliding_window": "32"}, "sliding_window must be"),
        ("bert", {"type_vocab_size": "2"}, "type_vocab_size must be"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"model_type": "mamba"}, "model_type 'mamba' is not supported"),
    ],
)
def test_a_config_that_llama_cpp_would_compute_otherwise(name: str, change: dict[str, Any], reason: str) -> None:
    config = MODELS[name][1].to_dict()
    with pytest.raises(ValueError, match=reason):
        kv_from_config(config | change, 0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", "rwkv"), ("general.architecture", None), ("llama.block_count", None),
        ("llama.block_count", 0), ("llama.block_count", -1), ("llama.block_count", True), ("llama.block_count", 2.5),
        ("llama.block_count", "2"), ("llama.block_count", 1 << 40), ("llama.feed_forward_length", [64, 32]),
        ("llama.attention.head_count", []), ("llama.attention.layer_norm_rms_epsilon", "x"),
        ("llama.attention.layer_norm_rms_epsilon", float("inf")), ("llama.rope.freq_base", [1.0]),
        ("llama.attention.value_length", 4), ("llama.rope.scaling.type", "odd"), ("llama.rope.scaling.type", 3),
        ("llama.rope.scaling.type", "yarn"), ("llama.attention.sliding_window", "a"),
    ],
)  # fmt: skip
def test_metadata_that_mean_nothing(key: str, value: Any) -> None:
    kv = plain(kv_from_config(MODELS["llama"][1].to_dict(), 0))
    with pytest.raises(ValueError, match=key.rpartition(".")[2] if "scaling" not in key else "scaling"):
        config_from_kv(kv | {key: value})


def test_one_number_for_all_layers_may_be_a_list() -> None:
    kv = plain(kv_from_config(MODELS["llama"][1].to_dict(), 0)) | {"llama.attention.head_count_kv": [2, 2]}
    assert config_from_kv(kv)["num_key_value_heads"] == 2


def test_every_architecture_has_a_config_row() -> None:
    assert ROWS.keys() == {a.gguf for a in ARCHITECTURES}
    assert all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind, _ in MODELS.values())


@pytest.mark.parametrize("x", [1e-6, 1e-5, 0.1, 10000.0, 500000.0, 0.33333334, 0.0, -2.5, 1e300, 1e-45])
def test_the_shortest_decimal_of_a_float32(x: float) -> None:
    as32 = torch.tensor(x, dtype=torch.float32).item() if x < 1e38 else x
    assert short(as32) == x


@pytest.mark.parametrize(
    ("ids", "ends"),
    [
        ({"eos": 2}, None),
        ({"eos": 2, "eot": 2}, None),
        ({"eos": 2, "eot": 7, "eom": 9}, [2, 7, 9]),
        ({"eot": 7}, [7]),
        ({"eos": 2, "eot": -1}, None),
        ({"eos": 2, "eot": "7"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_all_ends_of_an_answer_are_written(ids: dict[str, Any], ends: list[int] | None) -> None:
    kv = {f"tokenizer.ggml.{name}_token_id": i for name, i in {**ids, "bos": 1}.items()}
    files = generation_files(kv)
    if ends is None:
        assert files == {}
    else:
        assert json.loads(files["generation_config.json"]) == {"eos_token_id": ends, "bos_token_id": 1}

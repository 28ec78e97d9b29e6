"""Names and changes of tensors between GGUF and Hugging Face, against gguf's tables and transformers' reader."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from torch import Tensor

from pennyweight.core.formats import INT4, INT8
from pennyweight.core.spec import MXFP4, NF4_DOUBLE, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io.file import CheckpointError
from pennyweight.io.gguf.architectures import ARCHITECTURES, Architecture, Row
from pennyweight.io.gguf.config import config_from_kv, kv_from_config, rope_tensors
from pennyweight.io.gguf.names import TIED, Patterns, Transform, read_patterns, to_gguf, to_hf
from tests.io.gguf.models import MODELS, gguf_tensors, random

ARCH_OF = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
ROWS = [(arch, row) for arch in ARCHITECTURES for row in arch.rows]


@pytest.mark.parametrize(("arch", "row"), ROWS, ids=[f"{a.gguf}-{r.gguf}" for a, r in ROWS])
def test_a_row_says_what_gguf_says(arch: Architecture, row: Row) -> None:
    names = gguf.get_tensor_name_map(ARCH_OF[arch.gguf], 12)
    hf, ours = row.hf.replace("{i}", "11"), row.gguf.replace("{i}", "11")
    assert names.get_name(hf) == ours
    allowed = {gguf.TENSOR_NAMES[t].replace("{bid}", "11") for t in gguf.MODEL_TENSORS[ARCH_OF[arch.gguf]]}
    assert ours in allowed


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_a_name_and_comes_back(name: str) -> None:
    model = random(name)
    state, config = model.state_dict(), model.config.to_dict()
    stored, mapped = gguf_tensors(model)
    assert mapped.keys() == state.keys()
    left = {n: m.note for n, m in mapped.items() if m.name is None}
    tied = {"lm_head.weight": TIED} if config.get("tie_word_embeddings") and name != "bert" else {}
    pooler = {n: left[n] for n in ("pooler.dense.weight", "pooler.dense.bias") if name == "bert"}
    assert left == tied | pooler
    arch = "llama" if name == "mistral" else model.config.model_type.removesuffix("_text").replace("phi", "phi2")[:6]
    arch = {"phi23": "phi3"}.get(arch, arch)
    kv = {k: v for k, (_, v) in kv_from_config(config, 0).items()}
    assert kv["general.architecture"] == arch
    back = to_hf(stored, arch, kv)
    assert {m.name for m in back.values()} == state.keys() - left.keys()
    for gguf_name, m in back.items():
        x = m.transform.from_gguf(stored[gguf_name])
        if m.transform.name == "plus_one":  # w + 1 - 1 in float32
            torch.testing.assert_close(x, state[m.name], rtol=0, atol=2**-23)
        else:
            assert torch.equal(x, state[m.name]), m.name


def test_a_model_inside_another_one_and_a_bare_one() -> None:
    bert = {"model_type": "bert", "num_attention_heads": 4}
    assert to_gguf(["bert.encoder.layer.3.output.dense.bias"], bert).popitem()[1].name == "blk.3.ffn_down.bias"
    qwen = {"model_type": "qwen3", "num_attention_heads": 4}
    assert to_gguf(["layers.12.mlp.up_proj.weight"], qwen).popitem()[1].name == "blk.12.ffn_up.weight"
    both = ["encoder.layer.3.output.dense.bias", "bert.encoder.layer.3.output.dense.bias"]
    with pytest.raises(ValueError, match=r"both map to blk\.3\.ffn_down\.bias"):
        to_gguf(both, bert)


def test_factors_of_rotary_frequencies_are_left_out_with_a_note() -> None:
    names = ["rope_freqs.weight", "blk.0.attn_rot_embd.weight", "token_embd.weight"]
    mapped = to_hf(names, "llama", {"llama.attention.head_count": 4})
    assert [m.name for m in mapped.values()] == [None, None, "model.embed_tokens.weight"]
    assert "rope_parameters" in mapped["rope_freqs.weight"].note


# -- what has no name --------------------------------------------------------------------------------------------------

LLAMA = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}
KV = {"llama.attention.head_count": 4, "llama.attention.head_count_kv": 2}


@pytest.mark.parametrize(
    "name",
    ["blk.0.attn_sinks.weight", "blk.{i}.attn_q.weight", "blk.0x.attn_q.weight", "blk.0.attn_q", "", "blk..x.weight",
     "blk.\u0663.attn_q.weight", "blk.12345678.attn_q.weight", "model.norm.weight"],
)  # fmt: skip
def test_an_unknown_gguf_name_is_an_error_that_names_it(name: str) -> None:
    with pytest.raises(ValueError, match="pattern file") as e:
        to_hf(["token_embd.weight", name], "llama", KV)
    assert name in str(e.value)


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.experts.0.up_proj.weight", "model.layers.0.self_attn.q_norm.weight"]
)
def test_an_unknown_hf_name_is_an_error_that_names_it(name: str) -> None:
    with pytest.raises(ValueError, match="pattern file") as e:
        to_gguf([name], LLAMA)
    assert name in str(e.value)


def test_an_output_matrix_that_gemma2_has_no_place_for() -> None:
    config = {"model_type": "gemma2", "num_attention_heads": 4}
    assert to_gguf(["lm_head.weight"], config)["lm_head.weight"].note == TIED
    with pytest.raises(ValueError, match=r"lm_head\.weight: no tensor"):
        to_gguf(["lm_head.weight"], config | {"tie_word_embeddings": False})


@pytest.mark.parametrize("arch", ["mamba", "LLAMA", None, 3, ["llama"]])
def test_an_unknown_architecture_is_an_error(arch: Any) -> None:
    with pytest.raises(ValueError, match="known: llama"):
        to_hf([], arch, {})
    with pytest.raises(ValueError, match="known: llama"):
        to_gguf([], {"model_type": arch})


@pytest.mark.parametrize("heads", [None, 0, -4, "4", 4.0, True, [4]])
def test_a_number_of_heads_that_is_none(heads: Any) -> None:
    with pytest.raises(ValueError, match=r"blk\.1\.attn_q\.weight"):
        to_hf(["blk.1.attn_q.weight"], "llama", {"llama.attention.head_count": heads})


# -- pattern files -----------------------------------------------------------------------------------------------------


def written(folder: Path, text: str) -> Path:
    path = folder / "names.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_pattern_file_adds_names_and_takes_precedence(tmp_path: Path) -> None:
    text = """
        left_out = ["blk.{i}.debug", "extra.0.weight"]
        [tensors]
        "blk.{i}.attn_sinks.weight" = "model.layers.{i}.self_attn.sinks"
        "blk.{i}.attn_q.weight" = "model.layers.{i}.attention.query.weight"
        "head.0.weight" = "classifier.weight"
    """
    patterns = read_patterns(written(tmp_path, text))
    names = ["blk.7.attn_sinks.weight", "blk.7.attn_q.weight", "head.0.weight", "blk.7.debug", "blk.7.attn_k.weight"]
    mapped = to_hf(names, "llama", KV, patterns)
    assert [m.name for m in mapped.values()] == [
        "model.layers.7.self_attn.sinks",
        "model.layers.7.attention.query.weight",
        "classifier.weight",
        None,
        "model.layers.7.self_attn.k_proj.weight",
    ]
    # the rows of a llama's queries lie in another order whatever their name
    assert mapped["blk.7.attn_q.weight"].transform == Transform("rotary", 4)
    back = to_gguf([m.name for m in mapped.values() if m.name] + ["extra.0.weight"], LLAMA, patterns)
    assert [m.name for m in back.values()] == [n for n in names if n != "blk.7.debug"] + [None]
    with pytest.raises(ValueError, match=r"q_proj\.weight: no tensor"):  # its place is taken
        to_gguf(["model.layers.7.self_attn.q_proj.weight"], LLAMA, patterns)


def test_a_pattern_file_is_enough_for_an_unknown_architecture() -> None:
    patterns = Patterns({"blk.{i}.a.{i}.w": "layers.{i}.a.{i}.weight"})
    assert to_hf(["blk.3.a.10.w"], "other", {}, patterns)["blk.3.a.10.w"].name == "layers.3.a.10.weight"
    mapped = to_gguf(["layers.3.a.10.weight"], {"model_type": "other"}, patterns)
    assert mapped["layers.3.a.10.weight"].name == "blk.3.a.10.w"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[tensors]\nx = 1", "not a pattern"),
        ('[tensors]\n"" = "y"', "not a pattern"),
        ('[tensors]\n"a.{i}" = "b"', "the same number of"),
        ('[tensors]\n"a.{j}" = "b.{j}"', "the only placeholder"),
        ('[tensors]\n"a.x{i}" = "b.x{i}"', "the only placeholder"),
        ('[tensors]\n"a.{i}.0" = "b.{i}.0"', "write {i} for all"),
        ('[tensors]\n"a" = "c"\n"b" = "c"', "appears twice"),
        ('[tensors]\n"a" = "c"\n"a" = "d"', "TOML|overwrite"),
        ('[tensors]\n"a\\u0000" = "c"', "not a pattern"),
        (f'[tensors]\n"{"a" * 301}" = "c"', "not a pattern"),
        ("tensors = 3", "must be a table"),
        ('left_out = "a"', "must be"),
        ("left_out = [3]", "not a pattern"),
        ('[tensor]\n"a" = "b"', "unknown 'tensor'"),
        ("[tensors", "Expected"),
        ("x = " + "[" * 100000, "nested|TOML"),
        ("#" * 300000, "more than"),
        ("[tensors]\n" + "".join(f'"a{n}" = "b{n}"\n' for n in range(5000)), "the maximum is 4096"),
    ],
)
def test_a_bad_pattern_file_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(CheckpointError, match=reason) as e:
        read_patterns(path)
    assert str(path) in str(e.value)


def test_a_pattern_file_that_is_no_text_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    for name in ("x.toml", "none.toml"):
        with pytest.raises(CheckpointError, match=name):
            read_patterns(tmp_path / name)


# -- changes of values -------------------------------------------------------------------------------------------------


def interleaved(w: Tensor, heads: int) -> Tensor:
    """The permutation as llama.cpp's converter words it."""
    shape = w.shape
    return w.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


@pytest.mark.parametrize(("rows", "heads"), [(32, 4), (32, 1), (6, 3), (2, 1), (0, 5), (14, 1)])
@pytest.mark.parametrize("tail", [(), (1,), (7,), (3, 5)])
def test_rotary_order_of_rows(rows: int, heads: int, tail: tuple[int, ...]) -> None:
    w, t = torch.randn(rows, *tail), Transform("rotary", heads)
    if rows:
        assert torch.equal(t.to_gguf(w), interleaved(w, heads))
    assert torch.equal(t.from_gguf(t.to_gguf(w)), w)
    order = t.row_order(rows, True)
    assert torch.equal(w[order], t.to_gguf(w))
    assert order.dtype == torch.int64
    assert torch.equal(order[t.row_order(rows, False)], torch.arange(rows))


@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec(INT8, (-1,)),
        QuantSpec(INT4, (32,), layout="bits"),
        QuantSpec(INT4, (32,), scale=QuantSpec(INT8, (4,)), zero_point=True),
        QuantSpec(INT8, None),
        MXFP4,
        NF4_DOUBLE.with_(scale=QuantSpec(INT8, (1, 2), offset=torch.float32)),
    ],
    ids=str,
)
def test_rotary_order_of_quantized_rows_is_exact(spec: QuantSpec) -> None:
    torch.manual_seed(0)
    w = QT.from_float(torch.randn(32, 96), spec)
    t = Transform("rotary", 4)
    g = t.to_gguf(w)
    assert isinstance(g, QT)
    assert g.spec.with_(layout="plain") == spec.with_(layout="plain")
    assert torch.equal(g.dequantize(), interleaved(w.dequantize(), 4))
    back = t.from_gguf(g)
    assert torch.equal(back.dequantize(), w.dequantize())
    for a, b in zip(back.plain_parts(), w.plain_parts(), strict=True):
        if isinstance(a, Tensor):
            assert torch.equal(a, b)


def test_rows_that_share_scales_cannot_move() -> None:
    w = QT.from_float(torch.randn(32, 32), QuantSpec(INT8, (16, 16)))
    with pytest.raises(ValueError, match=r"model\.q: its rows share scales"):
        Transform("rotary", 4).to_gguf(w, "model.q")


@pytest.mark.parametrize("rows", [31, 12, 4])
def test_rows_that_are_no_heads(rows: int) -> None:
    with pytest.raises(ValueError, match=f"model.q: {rows} rows"):
        Transform("rotary", 4).to_gguf(torch.zeros(rows, 3), "model.q")


def test_a_norm_plus_one_is_float32_and_never_quantized() -> None:
    w = (torch.randn(512) * 0.01).bfloat16()
    g = Transform("plus_one").to_gguf(w)
    assert g.dtype == torch.float32
    assert torch.equal(Transform("plus_one").from_gguf(g).bfloat16(), w)
    assert Transform("plus_one").row_order(512, True) is None
    with pytest.raises(ValueError, match="norm"):
        Transform("plus_one").to_gguf(QT.from_float(torch.randn(64), QuantSpec(INT8, (32,))))


@pytest.mark.parametrize(("name", "heads"), [("rotary", 0), ("rotary", -1), ("rotary", 2.0), ("transpose", 0)])
def test_a_change_that_is_none(name: str, heads: Any) -> None:
    with pytest.raises(ValueError, match=r"unknown transform|positive number"):
        Transform(name, heads)


# -- a whole file ------------------------------------------------------------------------------------------------------


def write_gguf(path: Path, kv: dict[str, tuple[str, Any]], tensors: dict[str, Tensor]) -> None:
    """A GGUF file of float32 tensors by gguf's own writer."""
    writer = gguf.GGUFWriter(path, kv["general.architecture"][1])
    for key, (kind, value) in kv.items():
        if key != "general.architecture":
            element, _, inner = kind.partition("[")
            sub = gguf.GGUFValueType[inner[:-1]] if inner else None
            writer.add_key_value(key, value, gguf.GGUFValueType[element], sub)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# the others are missing in transformers' own reader
@pytest.mark.parametrize("name", ["llama", "llama_tied_wide", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_transformers_reads_the_file_as_the_same_model(name: str, tmp_path: Path) -> None:
    model = random(name)
    stored, _ = gguf_tensors(model)
    config = model.config.to_dict()
    kv = kv_from_config(config, 0) | {"tokenizer.ggml.padding_token_id": ("UINT32", 0)}  # Phi3Config's own is 32000
    write_gguf(tmp_path / "m.gguf", kv, stored | rope_tensors(config))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    ids = torch.randint(0, 48, (2, 11))
    with torch.no_grad():
        want, got = model(ids).logits, loaded(ids).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_our_names_and_config_give_the_same_model_back(name: str, tmp_path: Path) -> None:
    model = random(name)
    stored, _ = gguf_tensors(model)
    extra = rope_tensors(model.config.to_dict())
    write_gguf(tmp_path / "m.gguf", kv_from_config(model.config.to_dict(), 0), stored | extra)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    kv = {key: f.contents() for key, f in reader.fields.items()}
    tensors = {t.name: torch.from_numpy(t.data.copy()) for t in reader.tensors}
    config = config_from_kv(kv, tensors, {n: tensors[n] for n in extra})
    built = getattr(transformers, config["architectures"][0])(
        transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    ).eval()
    state = {
        m.name: m.transform.from_gguf(tensors[n], n)
        for n, m in to_hf(tensors, kv["general.architecture"], kv).items()
        if m.name
    }
    missing = built.load_state_dict(state, strict=False)
    assert missing.unexpected_keys == []
    assert set(missing.missing_keys) <= {"lm_head.weight", "pooler.dense.weight", "pooler.dense.bias"}
    ids = torch.randint(0, 48, (2, 40))  # beyond the sliding windows and Phi 3's short context
    with torch.no_grad():
        want, got = model(ids)[0], built(ids)[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)

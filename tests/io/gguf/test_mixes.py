"""The mixes of llama.cpp: the type of every tensor is the one that llama.cpp's quantizer chooses.

``mixes.json`` holds its choices (llama-cpp-python 0.3.36), made by ``python -m tests.io.gguf.test_mixes``; where
llama-cpp-python is installed the test runs it again.
"""

import ctypes
import json
import tempfile
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from torch import nn

import pennyweight as pw
from pennyweight.io.gguf.gguf_file import File
from pennyweight.io.gguf.imatrix import Imatrix, Moments, write_imatrix
from pennyweight.io.gguf.mixes import MIXES, mix_types
from pennyweight.io.gguf.names import to_gguf
from tests.io.gguf.test_export import llama, saved

WITH_IMATRIX = ("Q2_K_S", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS", "Q4_K_M")  # those that it changes, and one
GOLDEN = Path(__file__).with_name("mixes.json")
SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 16, "num_attention_heads": 8,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
NARROW = SIZES | {"hidden_size": 96, "intermediate_size": 80, "num_attention_heads": 3, "num_hidden_layers": 5}
SHORT = SIZES | {"num_hidden_layers": 9}
LARGE = SIZES | {"intermediate_size": 32, "num_hidden_layers": 80}
MODELS: dict[str, tuple[type[nn.Module], Any]] = {
    "llama_grouped": (T.LlamaForCausalLM, T.LlamaConfig(**SIZES, num_key_value_heads=2)),
    "llama_tied": (T.LlamaForCausalLM, T.LlamaConfig(**SHORT, tie_word_embeddings=True)),
    "llama_large": (T.LlamaForCausalLM, T.LlamaConfig(**LARGE, num_key_value_heads=4)),
    "qwen2": (T.Qwen2ForCausalLM, T.Qwen2Config(**SHORT, num_key_value_heads=4)),
    "qwen2_narrow": (T.Qwen2ForCausalLM, T.Qwen2Config(**NARROW, num_key_value_heads=3)),
    "gemma": (T.GemmaForCausalLM, T.GemmaConfig(**SHORT, num_key_value_heads=1, head_dim=32)),
    "phi2": (T.PhiForCausalLM, T.PhiConfig(**SHORT)),
    "phi3": (T.Phi3ForCausalLM, T.Phi3Config(**SHORT, num_key_value_heads=2)),
    "mixtral": (T.MixtralForCausalLM, T.MixtralConfig(**SHORT, num_key_value_heads=2, num_local_experts=8)),
    "qwen2_moe": (
        T.Qwen2MoeForCausalLM,
        T.Qwen2MoeConfig(
            **SHORT,
            num_key_value_heads=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=256,
            shared_expert_intermediate_size=64,
        ),
    ),
    "bert": (T.BertModel, T.BertConfig(**SHORT)),
}


def source_of(name: str, folder: Path) -> Path:
    kind, config = MODELS[name]
    torch.manual_seed(0)
    return saved(kind(config).eval(), folder)


def ours(source: Path, mix: str, imatrix: Path | None = None) -> dict[str, str]:
    """The type of each matrix by its name in the file, from a plan."""
    report = pw.convert(source, source / "m.gguf", to="gguf", gguf_type=mix, imatrix=imatrix, dry_run=True)
    names = to_gguf([row.name for row in report.rows], json.loads((source / "config.json").read_text()))
    found = {}
    for row in report.rows:
        name = names[row.name].name
        if name is not None:
            kind = row.scheme or next((k for k in ("F16", "F32") if row.note.endswith(f"as {k}")), "F32")
            found[name] = kind
    return found


@cache
def engine() -> Any:
    """llama.cpp's quantizer, or None."""
    if find_spec("llama_cpp") is None:
        return None
    import llama_cpp

    llama_cpp.llama_backend_init()
    quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *args: None)
    llama_cpp.llama_log_set(quiet, None)
    return llama_cpp, quiet


def theirs(path: Path, mix: str, imatrix: bool = False) -> tuple[dict[str, str], int]:
    """The type of each tensor by llama.cpp, and the file's ``general.file_type``. path: a file of floats. imatrix:
    with an importance matrix of ones."""
    llama_cpp, _ = engine()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = MIXES[mix].file_type, 1
    if imatrix:
        entries = File(str(path)).entries
        sizes = {n: e.shape[-1] * (e.shape[0] if len(e.shape) > 2 else 1) for n, e in entries.items()}
        kind = llama_cpp.llama_model_imatrix_data
        data = (ctypes.c_float * max(sizes.values()))(*[1.0] * max(sizes.values()))
        table = (kind * (len(sizes) + 1))()
        for row, (name, size) in zip(table, sizes.items(), strict=False):
            row.name, row.size = name.encode(), size
            row.data = ctypes.cast(data, ctypes.POINTER(ctypes.c_float))
        params.imatrix = ctypes.cast(table, ctypes.POINTER(kind))
    out = path.with_suffix(".quantized")
    assert llama_cpp.llama_model_quantize(str(path).encode(), str(out).encode(), ctypes.byref(params)) == 0
    file = File(str(out))
    found = {name: entry.type.name for name, entry in file.entries.items()}
    file_type = file.metadata["general.file_type"].data
    file.close()
    out.unlink()
    return found, file_type


def short(types: dict[str, str]) -> dict[str, str]:
    """Types as text: "Q6_K*2 Q4_K*7" for the layers of a tensor."""
    rows: dict[str, list[tuple[int, str]]] = {}
    for name, kind in types.items():
        parts = name.split(".")
        layer = int(parts.pop(1)) if parts[0] == "blk" else 0
        rows.setdefault(".".join(parts), []).append((layer, kind))
    return {
        name: " ".join(f"{kind}*{len([*run])}" for kind, run in groupby(kind for _, kind in sorted(found)))
        for name, found in sorted(rows.items())
    }


def choices(mix: str) -> bool:
    return mix != "Q2_K_S"  # requires an importance matrix


@pytest.mark.parametrize("model", MODELS)
def test_the_type_of_every_tensor_is_that_of_llama_cpp(model: str, tmp_path: Path) -> None:
    source = source_of(model, tmp_path / "f")
    golden = json.loads(GOLDEN.read_text())[model]
    if engine() is not None:
        pw.convert(source, tmp_path / "f.gguf", to="gguf", gguf_type="F32")
    for mix in filter(choices, MIXES):
        found = ours(source, mix)
        assert short(found) == golden[mix], mix
        if engine() is not None:
            made, file_type = theirs(tmp_path / "f.gguf", mix)
            assert made == found, mix
            assert file_type == MIXES[mix].file_type
    one = tmp_path / "ones.gguf"
    write_imatrix(Imatrix({"other.weight": Moments(torch.ones(1, 4), torch.ones(1))}), one)
    for mix in WITH_IMATRIX:
        found = ours(source, mix, one)
        assert short(found) == golden[f"{mix} imatrix"], mix
        if engine() is not None:
            assert theirs(tmp_path / "f.gguf", mix, imatrix=True)[0] == found, mix


def test_a_mix_as_a_file(tmp_path: Path) -> None:
    source = saved(llama(), tmp_path / "f")
    report = pw.convert(source, tmp_path / "m.gguf", to="gguf", gguf_type="q4_k_m")
    file = File(str(tmp_path / "m.gguf"))
    types = {name: entry.type.name for name, entry in file.entries.items()}
    assert file.metadata["general.file_type"].data == 15
    file.close()
    assert types["output.weight"] == types["blk.1.ffn_down.weight"] == types["blk.1.attn_v.weight"] == "Q6_K"
    assert types["blk.0.attn_q.weight"] == types["token_embd.weight"] == "Q4_K"
    rows = {row.name: row for row in report.rows}
    assert rows["lm_head.weight"].sqnr > rows["model.embed_tokens.weight"].sqnr + 6
    fresh = llama(1)
    pw.load(tmp_path / "m.gguf", fresh)


def test_a_name_of_both_is_the_mix_unless_pure(tmp_path: Path) -> None:
    source = saved(llama(), tmp_path / "f")
    for name, kinds in (("Q4_0", {"Q4_0", "Q6_K"}), ("q4_0-pure", {"Q4_0"}), ("q4_k", {"Q4_K"}), ("q8_0", {"Q8_0"})):
        report = pw.convert(source, tmp_path / "m.gguf", to="gguf", gguf_type=name, dry_run=True)
        assert {row.scheme for row in report.rows if row.scheme} == kinds


def test_importance_and_layers_decide() -> None:
    shapes = {f"blk.{i}.ffn_down.weight": (256, 256) for i in range(16)} | {"output.weight": (40, 256)}
    config = {"num_hidden_layers": 16, "num_attention_heads": 8}
    with_, without = (mix_types(MIXES["Q4_0"], shapes, "llama", config, flag) for flag in (True, False))
    assert [with_[f"blk.{i}.ffn_down.weight"] for i in range(4)] == ["Q4_1", "Q4_1", "Q4_0", "Q4_0"]
    assert {without[name] for name in shapes} == {"Q4_0", "Q6_K"}
    with pytest.raises(ValueError, match="Q2_K_S requires an importance matrix"):
        mix_types(MIXES["Q2_K_S"], shapes, "llama", config, False)
    assert mix_types(MIXES["Q2_K_S"], shapes, "llama", config, True)["blk.2.ffn_down.weight"] == "Q2_K"


def main() -> None:
    """Write mixes.json from llama.cpp's choices."""
    table: dict[str, Any] = {}
    for model in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            source = source_of(model, Path(folder) / "f")
            path = Path(folder) / "f.gguf"
            pw.convert(source, path, to="gguf", gguf_type="F32")
            table[model] = {mix: short(theirs(path, mix)[0]) for mix in filter(choices, MIXES)}
            table[model] |= {f"{mix} imatrix": short(theirs(path, mix, imatrix=True)[0]) for mix in WITH_IMATRIX}
    GOLDEN.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()

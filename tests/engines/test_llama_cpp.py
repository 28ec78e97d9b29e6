"""Every row of the engine table that llama.cpp reads, loaded by llama.cpp: with the logits of the stored weights."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import pennyweight as pw
from pennyweight.planning.engines import ROWS, Reads, SpecRow
from tests.engines.test_onnx import config_of
from tests.io.gguf.test_export import CONFIG, saved

pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python")


@pytest.mark.filterwarnings("ignore")  # theirs, on the way out
@pytest.mark.parametrize("row", [r for r in ROWS if isinstance(r.engines["llama.cpp"], Reads)], ids=lambda r: r.example)
def test_llama_cpp_computes_with_the_stored_weights(row: SpecRow, tmp_path: Path) -> None:
    from tests.io.gguf.test_llama_cpp import decided, theirs

    source = saved(decided(), tmp_path / "float", tokenizer=True)
    rules = pw.FqnToConfig({"lm_head": None, "_default": config_of(row)})
    pw.quantize_checkpoint(source, tmp_path / "small", rules, for_="llama.cpp")
    report = pw.convert(tmp_path / "small", tmp_path / "m.gguf", for_="llama.cpp")
    assert report.notes == [], "no weight is rounded again"
    assert all(r.sqnr > 60 for r in report.rows if r.sqnr is not None and r.scheme)
    model = LlamaForCausalLM(CONFIG).eval()
    pw.load(tmp_path / "small", model)
    pw.dequantize_(model)
    engine, tokens = theirs(tmp_path / "m.gguf"), [0, *range(5, 17)]
    engine.eval(tokens)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    scores = torch.tensor(engine.scores[: len(tokens)])
    assert torch.equal(scores.argmax(-1), expected.argmax(-1))
    assert float((scores - expected).abs().max() / expected.abs().max()) < 0.05

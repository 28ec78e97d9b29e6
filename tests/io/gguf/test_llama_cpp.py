"""llama.cpp loads the files we write, and computes with them what we do. Runs where llama-cpp-python is installed."""

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import pennyweight as pw
from tests.io.gguf.test_export import CONFIG, llama, saved

llama_cpp = pytest.importorskip(
    "llama_cpp", reason="llama-cpp-python is built from source: pip install llama-cpp-python"
)
PROMPT, NEW = 12, 24
# Of the greatest logit. llama.cpp rounds the inputs of quantized layers to 8 bits, we do not.
TOLERANCE = {"F32": 1e-3, "F16": 5e-3, "Q8_0": 0.05, "Q4_0": 0.05, "Q4_K": 0.05, "Q6_K": 0.05, "IQ4_NL": 0.05}
TOLERANCE |= dict.fromkeys(("Q3_K_L", "Q4_K_M", "Q5_K_S", "IQ4_XS"), 0.05)


def decided() -> LlamaForCausalLM:
    """Random weights whose next token is decided: the output matrix holds the embeddings, each in the row of the token
    that follows it in a random cycle of all, and they are large beside what the layers add. Logits of plain random
    weights lie so close together that rounding decides."""
    model = llama()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(8)
        cycle = torch.randperm(CONFIG.vocab_size, generator=torch.Generator().manual_seed(1))
        model.lm_head.weight[cycle.roll(-1)] = model.model.embed_tokens.weight[cycle]
    return model


def ours(model: LlamaForCausalLM, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def theirs(path: Path) -> Any:
    with contextlib.redirect_stderr(io.StringIO()):
        return llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, verbose=False, n_threads=2)


@pytest.mark.filterwarnings("ignore")  # theirs, on the way out
@pytest.mark.parametrize("kind", TOLERANCE)
def test_the_same_greedy_tokens(kind: str, tmp_path: Path) -> None:
    source = saved(decided(), tmp_path / "f", tokenizer=True)
    pw.convert(source, tmp_path / "m.gguf", to="gguf", gguf_type=kind)
    model = LlamaForCausalLM(CONFIG).eval()
    pw.load(tmp_path / "m.gguf", model)
    engine = theirs(tmp_path / "m.gguf")
    tokens = [0, *range(5, 4 + PROMPT)]
    engine.eval(tokens)
    worst = 0.0
    for _ in range(NEW):
        mine, other = ours(model, tokens)[-1], torch.from_numpy(np.array(engine.scores[len(tokens) - 1]))
        worst = max(worst, float((mine - other).abs().max() / mine.abs().max()))
        assert int(mine.argmax()) == int(other.argmax()), f"token {len(tokens)}"
        tokens.append(int(mine.argmax()))
        engine.eval(tokens[-1:])
    assert len(set(tokens[PROMPT:])) > NEW // 2, "a model that repeats itself shows nothing"
    assert worst < TOLERANCE[kind]

"""vLLM loads the files of cases.py and computes with the weights that they mean, or refuses them as the page says.

scripts/test-engines runs this file in an environment with vLLM; elsewhere it is skipped.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engines.cases import CASES, CONFIG, VLLM, log_probabilities, write_case

pytest.importorskip("vllm", reason="vLLM is not installed; scripts/test-engines installs it")
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
PROMPT = list(range(5, 25))
# Nats. Engine and reference differ by bfloat16, and by the rounding of inputs where the file asks for it; log
# probabilities reach -40. Weights of another case are off by more: see the last test.
TOLERANCE = {"ct-w8a8-static": 1.5}


def engine_log_probabilities(folder: Path) -> Tensor:
    """[len(PROMPT) - 1, vocabulary]."""
    from vllm import SamplingParams

    from tests.engines.vllm_generate import engine

    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=CONFIG.vocab_size)
    out = engine(str(folder), dtype="bfloat16").generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0]
    return torch.tensor([[row[t].logprob for t in range(CONFIG.vocab_size)] for row in out.prompt_logprobs[1:]])


@pytest.mark.parametrize("name", CASES)
def test_vllm_computes_with_the_stored_weights(name: str, tmp_path: Path) -> None:
    folder = write_case(tmp_path, name)
    refused = CASES[name].refused.get(VLLM)
    try:
        if refused is not None:
            with pytest.raises(Exception) as caught:  # noqa: PT011 (of many types, matched below)
                engine_log_probabilities(folder)
            assert refused in str(caught.value)
            return
        theirs, ours = engine_log_probabilities(folder), log_probabilities(folder, PROMPT)[:-1]
        error = (theirs - ours).abs()
        assert float(error.max()) < TOLERANCE.get(name, 0.5), (
            f"{float(error.max()):.3f}, mean {float(error.mean()):.4f}"
        )
    finally:
        gc.collect()


def test_other_weights_are_told_apart(tmp_path: Path) -> None:
    """The tolerance is below the difference that rounding to 4 bits makes."""
    a = log_probabilities(write_case(tmp_path / "a", "ct-w4a16"), PROMPT)
    b = log_probabilities(write_case(tmp_path / "b", "ct-w8a8"), PROMPT)
    assert float((a - b).abs().max()) > 0.5

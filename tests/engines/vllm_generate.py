"""Print the greedy tokens of vLLM as JSON: ``python vllm_generate.py FOLDER '{"tensor_parallel_size": 2}'``."""

from __future__ import annotations

import json
import sys
from typing import Any

PROMPTS = [list(range(5, 5 + n)) for n in (8, 17)]
NEW_TOKENS = 16


def engine(folder: str, **options: Any) -> Any:
    """vLLM's engine for a small model in float32."""
    from vllm import LLM

    given = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4, "max_logprobs": 512}
    return LLM(model=folder, skip_tokenizer_init=True, disable_log_stats=True, **{**given, **options})


def greedy(llm: Any) -> list[list[int]]:
    """The most likely tokens after each prompt, one prompt at a time."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    outs = [llm.generate([{"prompt_token_ids": p}], params, use_tqdm=False)[0] for p in PROMPTS]
    return [list(out.outputs[0].token_ids) for out in outs]


if __name__ == "__main__":
    print("TOKENS", json.dumps(greedy(engine(sys.argv[1], **json.loads(sys.argv[2])))))

"""Calibration data out of the model itself, where there is none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...quantize.config_resolution import PlanError


def sample(
    model: nn.Module, sequences: int = 64, length: int = 256, *, batch: int = 8, temperature: float = 1.0, seed: int = 0
) -> list[dict[str, Tensor]]:
    """Batches of token ids that the model writes: a first token at random, each other from its softmax.

    model       of Hugging Face's transformers, one that generates text
    sequences, length, batch    how many sequences, of how many tokens, at a time
    temperature 1 is the model's own distribution; below, text is likelier and less varied

    After Liu et al. 2023 (LLM-QAT, arXiv 2305.17888). Needs no data and gives none away. The same seed gives the same
    tokens on one kind of machine. Raises PlanError for a model that generates no text.
    """
    generate = getattr(model, "generate", None)
    can = getattr(model, "can_generate", None)
    if not callable(generate) or (callable(can) and not can()):
        raise PlanError(f"{type(model).__name__} generates no text; pass calibration data of your own")
    if min(sequences, batch) < 1 or length < 2 or not temperature > 0:
        raise PlanError(
            "sample takes at least one sequence of two tokens and a positive temperature, got "
            f"sequences={sequences}, length={length}, batch={batch}, temperature={temperature}"
        )
    config: Any = model.config
    vocabulary, device = config.get_text_config().vocab_size, next(model.parameters()).device
    training, found = model.training, []
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            for begin in range(0, sequences, batch):
                start = torch.randint(
                    vocabulary, (min(batch, sequences - begin), 1), dtype=torch.int64, device="cpu"
                ).to(device)
                ids = generate(
                    input_ids=start, attention_mask=torch.ones_like(start), do_sample=True, temperature=temperature,
                    top_k=0, top_p=1.0, min_new_tokens=length - 1, max_new_tokens=length - 1, pad_token_id=0,
                )  # fmt: skip
                found.append({"input_ids": ids})
    finally:
        model.train(training)
    return found

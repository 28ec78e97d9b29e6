"""The language model: its shape, its files, and what is read and computed for a token."""

from __future__ import annotations

import time
from pathlib import Path

import torch

HIDDEN, LAYERS, FFN, HEADS, KV_HEADS, VOCAB = 2048, 16, 5632, 32, 8, 32000
POSITIONS = 8192


def tokens(sequences: int, length: int) -> list[list[int]]:
    """The same token numbers for all ways, spread over the vocabulary; sequences differ."""
    return [[(7919 * (i + 5003 * s) + 13) % VOCAB for i in range(length)] for s in range(sequences)]


def linear_elements() -> tuple[int, int]:
    """Weights of linear layers: in the blocks, and in the head."""
    kv = HIDDEN * KV_HEADS // HEADS
    return LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * kv + 3 * HIDDEN * FFN), HIDDEN * VOCAB


def cache_elements() -> int:
    """Keys and values of one token."""
    return 2 * LAYERS * HIDDEN * KV_HEADS // HEADS


def write(folder: Path) -> None:
    """The model with random weights, bf16, as a Hugging Face folder."""
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM

    transformers.utils.logging.disable_progress_bar()
    config = LlamaConfig(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, intermediate_size=FFN, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, vocab_size=VOCAB, max_position_embeddings=POSITIONS, rope_theta=10000.0,
        tie_word_embeddings=False, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            p.data.fill_(1)
        else:  # embeddings that outweigh what blocks add: otherwise random blocks amplify errors without measure
            p.data.normal_(0, 1 if "embed" in name else 0.02)
    model.save_pretrained(folder)


def read_and_write(source: list[Path], nbytes: int, scratch: Path) -> float:
    """Seconds to read files whole and to write so many bytes: what no way of quantizing files can beat."""
    begin, buffer = time.perf_counter(), bytearray(1 << 24)
    for path in source:
        with path.open("rb", buffering=0) as f:
            while f.readinto(buffer):
                pass
    with scratch.open("wb", buffering=0) as f:
        for at in range(0, nbytes, len(buffer)):
            f.write(memoryview(buffer)[: min(len(buffer), nbytes - at)])
    seconds = time.perf_counter() - begin
    scratch.unlink()
    return seconds

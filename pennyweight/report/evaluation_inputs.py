"""What an evaluation runs: the model of a folder, its tokenizer, and batches of text or of other inputs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..io.config_files import read_config, read_side_json
from ..io.loading import load
from ..io.meta_model import fresh_model

BATCH, LENGTH, LIMIT = 8, 256, 64
MAX_TEXT_BYTES = 64 << 20  # per file; evaluation uses a few hundred kilobytes


def load_folder(path: str, like: str = "") -> nn.Module:
    """The model of a checkpoint in any format that pw.load reads, in eval mode. Raises CheckpointError.

    path  a Hugging Face folder or a GGUF file; or, if the folder ``like`` defines the architecture, a folder without
          config.json or any file
    """
    alone = not like or (os.path.isdir(path) and read_config(path) is not None)
    model = fresh_model(path if alone else like)
    load(path, model)
    return model.eval()


def read_texts(paths: Sequence[str]) -> list[str]:
    """The text of each UTF-8 file. Raises ValueError for other encodings and empty files, and OSError."""
    texts = []
    for path in paths:
        with open(path, "rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
        if len(data) > MAX_TEXT_BYTES:
            raise ValueError(f"{path} is larger than {MAX_TEXT_BYTES >> 20} MiB; a few hundred kB are enough")
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text (byte {error.start})") from None
        if not text.strip():
            raise ValueError(f"{path} contains no text")
        texts.append(text)
    return texts


def is_causal(model: nn.Module) -> bool:
    """Whether the model generates text. Its text is split into windows; an encoder gets one line per sequence."""
    can_generate = getattr(model, "can_generate", None)
    return bool(callable(can_generate) and can_generate())


def kind_of_model(model: nn.Module) -> str:
    """ "embeddings" for an encoder without a head, else "logits"; see :func:`pennyweight.compare`."""
    return "logits" if is_causal(model) or _has_head(model) else "embeddings"


def _has_head(model: nn.Module) -> bool:
    return type(model).__name__.partition("For")[2] != ""


def pooling_of(folder: str) -> str:
    """The pooling of the folder's sentence embeddings: "mean" unless its sentence-transformers files specify the first
    or the last token."""
    config = read_side_json(os.path.join(folder, "1_Pooling"), "config.json") if _pools(folder) else None
    if config is None or config.get("pooling_mode_mean_tokens"):
        return "mean"
    if config.get("pooling_mode_cls_token"):
        return "first"
    return "last" if config.get("pooling_mode_lasttoken") else "mean"


def _pools(folder: str) -> bool:
    return os.path.isdir(os.path.join(folder, "1_Pooling"))


def text_batches(
    model: nn.Module, tokenizer: Any, texts: Sequence[str], *, batch: int = BATCH, length: int = LENGTH,
    limit: int | None = LIMIT,
) -> list[dict[str, Tensor]]:  # fmt: skip
    """Batches of tokens. For a generative model: windows of ``length`` tokens; the last window of a file may be shorter
    but has at least 2. For others: non-empty lines, truncated to ``length`` and padded.

    limit: total sequences, spread evenly over the text; None: all. Raises ValueError if none is left.
    """
    for name, value in (("batch", batch), ("length", length), ("limit", limit)):
        if value is not None and value < (2 if name == "length" else 1):
            raise ValueError(f"{name} must be at least {2 if name == 'length' else 1}, got {value}")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        name = type(model).__name__
        raise ValueError(f"{name} is an encoder-decoder model; call pw.compare with inputs of your own")
    length = min(length, _longest(model))
    if is_causal(model):
        sequences = [ids for text in texts for ids in _windows(tokenizer, text, length)]
    else:
        lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
        sequences = (
            []
            if not lines
            else tokenizer(_evenly_spaced(lines, limit), truncation=True, max_length=length)["input_ids"]
        )
    sequences = _evenly_spaced(sequences, limit)
    if not sequences:
        raise ValueError("the text contains no sequence of at least two tokens")
    padding = getattr(tokenizer, "pad_token_id", None) or 0  # any number works where the mask is 0
    return [_padded(sequences[i : i + batch], padding) for i in range(0, len(sequences), batch)]


def input_batches(path: str, batch: int = BATCH, limit: int | None = LIMIT) -> list[dict[str, Tensor]]:
    """Batches from a safetensors file that holds the model's keyword arguments ("pixel_values", "input_features") with
    one sample per row; at most ``limit`` samples. Raises ValueError, and CheckpointError for the file.
    """
    if batch < 1 or (limit is not None and limit < 1):
        raise ValueError(f"batch and limit must be at least 1, got {batch} and {limit}")
    named = load(path)
    rows = {name: len(t) if t.ndim else 0 for name, t in named.items()}
    if not rows or len(set(rows.values())) != 1 or 0 in rows.values():
        raise ValueError(
            f"{path}: every input needs the same number of samples on its first axis, got "
            + (", ".join(f"{name} {list(t.shape)}" for name, t in named.items()) or "no tensor")
        )
    count = min(next(iter(rows.values())), limit or 1 << 62)
    return [{name: t[i : min(i + batch, count)] for name, t in named.items()} for i in range(0, count, batch)]


def _windows(tokenizer: Any, text: str, length: int) -> list[list[int]]:
    ids = tokenizer(text, verbose=False)["input_ids"]
    return [w for i in range(0, len(ids), length) if len(w := ids[i : i + length]) > 1]


def _evenly_spaced(some: list[Any], limit: int | None) -> list[Any]:
    if limit is None or len(some) <= limit:
        return some
    return [some[i * len(some) // limit] for i in range(limit)]


def _padded(sequences: list[list[int]], padding: int) -> dict[str, Tensor]:
    width = max(map(len, sequences))
    ids = torch.full((len(sequences), width), padding, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def _longest(model: nn.Module) -> int:
    """The maximum sequence length of a model."""
    found = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 1 else 1 << 30

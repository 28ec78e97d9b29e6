"""The kind of layer that a tensor belongs to, by its name."""

from __future__ import annotations

import re

KINDS = ("embeddings", "attention", "MLP", "convolutions", "head", "norms", "other")
# The kind of a module by its name, for models of transformers, timm, diffusers, llama.cpp and the original
# repositories. The innermost module decides about norms, the whole name about the rest; the first match applies.
_NORM = re.compile(r"norm|(?:^|_)ln(?:_?\w)?$|^bn\d*$|^ln_")
_HEAD = re.compile(r"head|^output$|classifier|^score$|^fc$|^cls\b|pooler|^proj_out$")
_BY_NAME = (
    ("embeddings", re.compile(r"embed|\bembd|_embd|\bwte\b|\bwpe\b|(?:^|\.)(?:shared|relative_attention_bias)$")),
    ("attention", re.compile(r"att|\b[qkvo]_proj\b|qkv|\bto_[qkv]\b|to_out|\b(?:query|key|value)\b|(?:^|\.)[qkvo]$")),
    ("MLP", re.compile(r"mlp|ffn|ff\b|feed_?forward|experts?\b|fc\d|dense|gate|\b(?:up|down)(?:_proj)?\b|lin\d")),
    ("convolutions", re.compile(r"conv[^.]*$")),
)
_NUMBER = re.compile(r"(?:^|\.)\d+\.")  # of a repeated block, inside which nothing is the model's head
_OWN_NAMES = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def kind_of_layer(name: str, type_name: str = "", rank: int = 2) -> str:
    """One of KINDS, from the name of a tensor, the class of its module ("" if unknown) and its number of axes; "other"
    if these say nothing."""
    module, _, last = name.rpartition(".")
    module = (module if last in _OWN_NAMES else name).lower()
    if "Norm" in type_name or _NORM.search(module.rpartition(".")[2]):
        return "norms"
    if type_name == "Embedding":
        return "embeddings"
    if "Conv" in type_name and type_name != "Conv1D":  # Conv1D of transformers is a linear layer
        return "convolutions"
    head = _HEAD.search(module)
    if head is not None and not _NUMBER.search(module[: head.start()]) and "embed" not in module:
        return "head"
    for found, pattern in _BY_NAME:
        if pattern.search(module):
            return found
    return "convolutions" if rank > 3 else "other"

"""Bytes of a model by kind of layer: embeddings, attention, MLP, convolutions, head, norms, other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from .layers import stored_bytes, unwrapped

KINDS = ("embeddings", "attention", "MLP", "convolutions", "head", "norms", "other")

# Searched in a name in this order, because names nest: "attention.output.LayerNorm" is a norm, "attention.output.dense"
# is attention, "output.dense" is the MLP of a BERT
_NORM = re.compile(r"(^|[._])(\w*norm\d*|ln_?\d*|ln_\w+)([._]|$)", re.I)
_EMBEDDING = re.compile(r"(embe?d|\bwte\b|\bwpe\b|token_type|relative_attention_bias)", re.I)
_HEAD = re.compile(
    r"(^|\.)(lm_head|head|classifier|score|pooler|cls|output_projection|qa_outputs|vocab_projector)(\.|$)"
)
_ATTENTION = re.compile(r"(attn|attention|(^|[._])(q|k|v|o|qkv)(_?proj|_lin)?([._]|$)|in_proj|c_attn)", re.I)
_MLP = re.compile(
    r"(mlp|ffn|feed_forward|feedforward|experts?|intermediate|output\.dense|(^|[._])(fc\d*|lin\d|up|down|gate|wi|wo)([._]|$)"
    r"|(up|down|gate)_proj|dense_\w*h|c_fc)",
    re.I,
)  # fmt: skip


@dataclass(frozen=True)
class KindBytes:
    """Stored bytes of the layers of one kind, float (None: unknown) and quantized, and how many of their elements are
    quantized."""

    kind: str
    bytes_float: int | None
    bytes: int
    elements: int
    quantized: int


def kind_of_layer(name: str, type_name: str = "", rank: int = 2) -> str:
    """One of KINDS, from the name of a parameter, the class of its module ("" if unknown) and its number of axes."""
    if "Norm" in type_name or _NORM.search(name):
        return "norms"
    if type_name == "Embedding" or _EMBEDDING.search(name):
        return "embeddings"
    if "Conv" in type_name and type_name != "Conv1D":  # Conv1D of transformers is a linear layer
        return "convolutions"
    for kind, pattern in (("head", _HEAD), ("attention", _ATTENTION), ("MLP", _MLP)):
        if pattern.search(name):
            return kind
    return "convolutions" if rank > 3 else "other"


def model_kinds(quantized: nn.Module, exact: nn.Module | None = None) -> list[KindBytes]:
    """Bytes by kind of a model's state dict, tied weights once; kinds without bytes are left out. The sum is that of
    :func:`pennyweight.report.layers.model_bytes`."""
    before = None if exact is None else {k: size for k, size, _, _ in _sums(_entries(exact))}
    after = {k: (size, n, q) for k, size, n, q in _sums(_entries(quantized))}
    out = []
    for kind in KINDS:
        size, n, q = after.get(kind, (0, 0, 0))
        old = None if before is None else before.get(kind, 0)
        if size or old:
            out.append(KindBytes(kind, old, size, n, q))
    return out


def stored_kinds(entries: Iterable[tuple[str, int, int, int, bool]]) -> list[KindBytes]:
    """Bytes by kind from a checkpoint's headers: (name, axes, bytes, elements, whether it is quantized)."""
    some = (
        (kind_of_layer(name, "", rank), size, n, n if quantized else 0) for name, rank, size, n, quantized in entries
    )
    sums = {k: (size, n, q) for k, size, n, q in _sums(some)}
    return [KindBytes(kind, None, *sums[kind]) for kind in KINDS if kind in sums]


def _entries(model: nn.Module) -> Iterator[tuple[str, int, int, int]]:
    """(kind, bytes, elements, quantized elements) of each parameter and persistent buffer."""
    seen: set[int] = set()
    for prefix, module in unwrapped(model).named_modules():
        lasting = module._buffers.keys() - module._non_persistent_buffers_set
        held: dict[str, Tensor | None] = {**module._parameters, **{n: module._buffers[n] for n in lasting}}
        for name, tensor in held.items():
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            full = f"{prefix}.{name}" if prefix else name
            kind = kind_of_layer(full, type(module).__name__, tensor.ndim)
            quantized = hasattr(tensor, "spec")
            yield kind, stored_bytes(tensor), tensor.numel(), tensor.numel() if quantized else 0


def _sums(entries: Iterable[tuple[str, int, int, int]]) -> list[tuple[str, int, int, int]]:
    found: dict[str, list[int]] = {}
    for kind, *numbers in entries:
        here = found.setdefault(kind, [0, 0, 0])
        for i, n in enumerate(numbers):
            here[i] += n
    return [(kind, *numbers) for kind, numbers in found.items()]  # type: ignore[misc]

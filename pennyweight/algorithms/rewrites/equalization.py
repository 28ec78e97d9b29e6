"""Equalization pairs: a writer (norm or linear layer) and the linear layers that read its output. Dividing the writer's
output channels by scales and multiplying the readers' columns by them leaves the model's function unchanged.

    writer / s,  reader * s

The trace of one run proposes pairs; each is tested with random powers of two, which do not change rounding. A pair is
valid if the model's outputs do not change, and if they do change when only the readers are scaled. There is no table of
model classes: a norm that also feeds the residual stream (BERT), a gelu between two layers, or a query taken for a
value all fail this test.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration.block_order import inference_mode
from .graph import Matrix, Node, Trace, norm_width, ops_between, sources, trace
from .verify_rewrite import TOLERANCE, SavedTensors, float_outputs, probe_batch, relative_difference

MIXES = frozenset(("scaled_dot_product_attention", "matmul", "__matmul__", "bmm", "baddbmm", "einsum"))


# -- writers and readers -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class NormWeight:
    """The vector of a norm: its output is n(x) * (weight + shift) + bias. shift is 1 for Gemma's norms."""

    name: str
    module: nn.Module
    shift: float = 0.0

    @property
    def width(self) -> int:
        return norm_width(self.module)

    @property
    def bias(self) -> Tensor | None:
        return self.module._parameters.get("bias")

    @property
    def weight(self) -> Tensor:
        return self.module._parameters["weight"]  # type: ignore[return-value]

    def tensors(self) -> list[Tensor]:
        return [p for p in (self.weight, self.bias) if p is not None]

    def value(self) -> Tensor:
        """float64 [width]."""
        return self.weight.data.double() + self.shift

    def put(self, value: Tensor) -> None:
        self.weight.data.copy_(value - self.shift)

    def divide(self, s: Tensor) -> None:
        self.put(self.value() / s)
        if self.bias is not None:
            self.bias.data.copy_(self.bias.data.double() / s)


@dataclass(eq=False)
class LinearRows:
    """Outputs [start, start + width) of a linear layer."""

    matrix: Matrix
    start: int
    width: int

    @property
    def name(self) -> str:
        return self.matrix.name.removesuffix(".weight")

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.matrix.weight, self.matrix.bias) if t is not None]

    def divide(self, s: Tensor) -> None:
        view = self.matrix.view[self.start : self.start + self.width]
        view.copy_(view.double() / s.unsqueeze(1))
        if self.matrix.bias is not None:
            bias = self.matrix.bias.data[self.start : self.start + self.width]
            bias.copy_(bias.double() / s)


@dataclass(eq=False)
class EqualizationPair:
    """index [width of the readers]: the writer's channel that each column reads; None: identity. head: width of an
    attention head, if attention is in between."""

    writer: NormWeight | LinearRows
    readers: tuple[Matrix, ...]
    index: Tensor | None = None
    head: int = 0

    def tensors(self) -> list[Tensor]:
        return [*self.writer.tensors(), *(r.weight for r in self.readers)]

    def scale_of_readers(self, s: Tensor) -> Tensor:
        return s if self.index is None else s[self.index.to(s.device)]

    def gather(self, x: Tensor) -> Tensor:
        """The largest entry of x [width of the readers] for each channel of the writer."""
        if self.index is None:
            return x
        found = torch.zeros(self.writer.width, dtype=x.dtype, device=x.device)
        return found.scatter_reduce(0, self.index.to(x.device), x, "amax")

    def scale_readers(self, s: Tensor) -> None:
        for r in self.readers:
            r.view.copy_(r.view.double() * self.scale_of_readers(s))

    def apply(self, s: Tensor) -> None:
        """Divide the writer by s, float64 [its width], and multiply the readers' columns."""
        s = s.double().to(self.readers[0].weight.device)
        self.writer.divide(s)
        self.scale_readers(s)


# -- search ------------------------------------------------------------------------------------------------------------


@dataclass
class FoundPairs:
    """pairs: the valid pairs. without: linear layers without one, parameter name -> reason."""

    pairs: list[EqualizationPair]
    without: dict[str, str]


@torch.no_grad()
def find_pairs(model: nn.Module, batch: Any, wanted: Iterable[str] | None = None) -> FoundPairs:
    """Pairs with a reader among ``wanted`` (names of weights; None: any), tested on two samples of a batch. The model
    is restored bit for bit.

    Raises ValueError if its output has no tensors to compare.
    """
    batch, wanted = probe_batch(batch), None if wanted is None else set(wanted)
    seen = trace(model, batch)
    reference = float_outputs(model, batch, before=True)
    groups: dict[str, list[list[EqualizationPair]]] = {}  # by name pattern: variants of each candidate
    without: dict[str, str] = {}
    for node, readers in shared_readers(seen):
        if wanted is not None and not wanted.intersection(r.name for r in readers):
            continue
        if not all(r.plain and r.bias is not r.weight for r in readers):
            without |= dict.fromkeys((r.name for r in readers), "a layer with the same input is already quantized")
            continue
        candidates = list(_candidates(model, node, readers))
        for variants in candidates:
            key = re.sub(r"\d+", "*", " ".join([variants[0].writer.name, *(r.name for r in readers)]))
            groups.setdefault(f"{key} {variants[0].writer.width}", []).append(variants)
        why = "the model's outputs change when its scale is folded into the layer before"
        without |= dict.fromkeys((r.name for r in readers), why if candidates else _nothing(node))
    pairs: list[EqualizationPair] = []
    for group in groups.values():
        for pair in _tried(model, batch, reference, group):
            names = [r.name for r in pair.readers]
            if all(n in without for n in names):  # keep only the first valid pair; two would divide twice
                pairs.append(pair)
                for n in names:
                    del without[n]
    return FoundPairs(pairs, {n: w for n, w in without.items() if wanted is None or n in wanted})


def shared_readers(seen: Trace) -> list[tuple[Node, tuple[Matrix, ...]]]:
    """(node that produced a tensor, linear layers that read it), in call order."""
    nodes: dict[int, tuple[Node, dict[int, Matrix]]] = {}
    for matrix, source in seen.uses:
        node = source.resolved()
        # A norm called twice is one writer
        nodes.setdefault(id(node.what) if node.kind == "norm" else id(node), (node, {}))[1][id(matrix)] = matrix
    return [(node, tuple(found.values())) for node, found in nodes.values()]


def _nothing(node: Node) -> str:
    if node.kind == "norm":
        return f"the gain of {node.name} has an unknown form"
    return "it reads the model's input" if node.kind == "unknown" else "no layer before it can absorb its scale"


def _candidates(model: nn.Module, node: Node, readers: tuple[Matrix, ...]) -> Iterator[list[EqualizationPair]]:
    """Variants of each pair that the graph allows."""
    width = readers[0].width
    if node.kind == "norm":
        gain = norm_weight_of(node.name, node.what, readers[0].weight)
        if gain is not None and gain.width == width:
            yield [EqualizationPair(gain, readers)]
        return
    for source in sources(node):
        matrix = source.what
        if source.kind != "matrix" or matrix.kind != "linear" or not matrix.plain:
            continue
        between = ops_between(node, source)
        if not between & MIXES:
            if matrix.height in (width, 2 * width):  # in a fused [gate; up], up comes second
                yield [EqualizationPair(LinearRows(matrix, matrix.height - width, width), readers)]
            continue
        heads = head_widths(model, readers[0])
        variants = []
        for rows in _value_rows(matrix.height, width, heads):
            if rows == width:
                head = next((h for h in heads if width % h == 0), 0)
                variants.append(EqualizationPair(LinearRows(matrix, matrix.height - rows, rows), readers, None, head))
            else:
                for head in heads:
                    if rows % head == 0:
                        index = repeat_kv_index(rows, head, width // rows)
                        variants.append(
                            EqualizationPair(LinearRows(matrix, matrix.height - rows, rows), readers, index, head)
                        )
        if variants:
            yield variants


def _value_rows(height: int, width: int, heads: list[int]) -> list[int]:
    """Possible numbers of value outputs of a layer, for ``width`` inputs of the output projection; values come last."""
    if height <= width:
        return [height] if width % height == 0 else []
    rest = height - width  # queries first: keys and values share the rest
    shared = [rest // 2] if rest % 2 == 0 and width % (rest // 2) == 0 else []
    return [rows for rows in shared if rows == width or any(rows % h == 0 for h in heads)]


def repeat_kv_index(rows: int, head: int, times: int) -> Tensor:
    """Channel index for grouped-query attention: each head of ``rows`` values is repeated ``times`` times."""
    return torch.arange(rows, dtype=torch.int64, device="cpu").view(-1, head).repeat_interleave(times, 0).flatten()


def head_widths(model: nn.Module, matrix: Matrix) -> list[int]:
    """Candidate head widths: from the enclosing modules, then from configs; if there are none, common sizes."""
    around = [model]
    *path, _ = matrix.name.split(".")
    for part in path:
        around.append(getattr(around[-1], part))
    widths: list[int] = []
    for owner in [*reversed(around), *(getattr(m, "config", None) for m in reversed(around))]:
        for name in ("head_dim", "attention_head_size"):
            widths.append(getattr(owner, name, None))  # type: ignore[arg-type]
        for name in ("num_heads", "num_attention_heads"):
            count = getattr(owner, name, None)
            if isinstance(count, int) and count > 0 and matrix.width % count == 0:
                widths.append(matrix.width // count)
    known = [h for h in dict.fromkeys(widths) if isinstance(h, int) and h > 0 and matrix.width % h == 0]
    return known or [h for h in (128, 64, 32, 256, 96, 80, 16, 8) if matrix.width % h == 0]


def norm_weight_of(name: str, module: nn.Module, like: Tensor) -> NormWeight | None:
    """How a norm uses its weight, tested on random inputs; None if its output is not n(x) (weight + shift) + bias."""
    weight, bias = module.weight, module._parameters.get("bias")
    assert isinstance(weight, Tensor)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, weight.shape[0], generator=generator, dtype=torch.float32, device="cpu").to(
        like.device, like.dtype
    )
    kept = SavedTensors([weight])

    def at(value: float) -> Tensor:
        weight.data.fill_(value)
        out = module(x).double()
        return out if bias is None else out - bias.data.double()

    try:
        with inference_mode(module):
            zero, one, two = at(0.0), at(1.0), at(2.0)
    finally:
        kept.restore()
    near = 1e-5 if weight.dtype is torch.float32 else 0.05
    if relative_difference([one - zero], [two - one]) > near or not bool((one - zero).any()):
        return None
    for shift in (0.0, 1.0):
        if torch.linalg.vector_norm(zero - shift * (one - zero)) <= near * torch.linalg.vector_norm(one - zero):
            return NormWeight(name, module, shift)
    return None


# -- tests of candidates -----------------------------------------------------------------------------------------------


def _tried(
    model: nn.Module, batch: Any, reference: list[Tensor], group: list[list[EqualizationPair]]
) -> list[EqualizationPair]:
    """Valid pairs of a group with the same name pattern: the first is tested alone, then the others together."""

    def holds(pairs: list[EqualizationPair]) -> bool:
        return _holds(model, batch, reference, pairs)

    variant = next((i for i, pair in enumerate(group[0]) if holds([pair])), None)
    if variant is None:
        return []
    rest = [variants[variant] for variants in group[1:] if variant < len(variants)]
    good = not rest or holds(rest)
    return [group[0][variant], *(rest if good else [c for c in rest if holds([c])])]


def _holds(model: nn.Module, batch: Any, reference: list[Tensor], pairs: list[EqualizationPair]) -> bool:
    """Whether outputs are the same with random scales. Scales are powers of two, which do not change how values are
    rounded, so the outputs of a model in 16 bits are as equal as those of one in 32. Not so with a norm of 1 + weight,
    whose weight has other bits then, and with subnormal numbers of float16: such pairs are not found in 16 bits."""
    kept = SavedTensors(t for c in pairs for t in c.tensors())
    generator = torch.Generator().manual_seed(0)
    try:
        scales = []
        for c in pairs:
            powers = torch.randint(
                -1, 3, (c.writer.width,), generator=generator, dtype=torch.int64, device="cpu"
            ).double()
            scales.append(torch.exp2(powers).to(c.readers[0].weight.device))
            c.scale_readers(scales[-1])
        changed = relative_difference(reference, float_outputs(model, batch))
        if changed <= 10 * TOLERANCE:
            return False  # the readers do not affect the output, so the test would show nothing
        for c, s in zip(pairs, scales, strict=True):
            c.writer.divide(s)
        return relative_difference(reference, float_outputs(model, batch)) <= TOLERANCE
    finally:
        kept.restore()

"""Linear layers, embeddings and heads of vLLM on our kernels.

vLLM fuses weights (q, k, v; gate, up) and cuts them for the ranks of tensor parallelism in the loaders of its layers,
which copy slices into one float tensor. To take the same slices of quantized tensors, each loader is run on the numbers
of rows and columns: the numbers that it copies are those that this rank needs. Slices of quantized tensors are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.utils import set_weight_attrs

from ...core.ops.slice import concatenate
from ...core.tensor import AffineQuantizedTensor
from ...distributed.sharding import prepare_for_shards
from ...io.file import CheckpointError
from ...kernels.linear import linear
from ...kernels.repack import prepare

MISSING, PADDING = -1, 0  # entries of a row map that no weight fills, or that vLLM fills with zeros; others: row + 1


@dataclass
class Piece:
    """Rows of the layer's local weight: ``weight`` starts at row ``start``. None: rows that vLLM pads with zeros."""

    start: int
    rows: int
    weight: Tensor | None


@dataclass
class Pending:
    """What has arrived for a layer: pieces of its local weight [rows, columns], by their first row."""

    rows: int
    columns: int
    pieces: dict[int, Piece] = field(default_factory=dict)

    def add(self, piece: Piece) -> None:
        """Keep a piece. One that arrives again, such as a tied weight under its second name, replaces the former."""
        self.pieces[piece.start] = piece

    def missing(self) -> int:
        """The number of rows that have not arrived."""
        return self.rows - sum(piece.rows for piece in self.pieces.values())


def index_map(load: Callable[..., Any], size: int, local: int, axis: int, args: tuple[Any, ...]) -> Tensor:
    """Which indices of an axis of ``size`` a loader of vLLM copies to which of ``local``: [local], see MISSING.

    axis  0 for rows (vLLM's output_dim), 1 for columns (input_dim)
    """
    shape = (-1, 1) if axis == 0 else (1, -1)
    target = Parameter(torch.full((local,), MISSING, dtype=torch.int64, device="cpu").view(shape), requires_grad=False)
    set_weight_attrs(target, {("output_dim", "input_dim")[axis]: axis, "ignore_warning": True})
    load(target, torch.arange(1, size + 1, dtype=torch.int64, device="cpu").view(shape), *args)
    return target.detach().flatten()


def runs(numbers: Tensor) -> Iterable[tuple[int, int, int]]:
    """(start, length, first source index or PADDING - 1) of each run of consecutive indices in a map."""
    given = numbers.tolist()
    i = 0
    while i < len(given):
        if given[i] == MISSING:
            i += 1
            continue
        step = 0 if given[i] == PADDING else 1
        end = i + 1
        while end < len(given) and given[end] == given[end - 1] + step:
            end += 1
        yield i, end - i, given[i] - 1
        i = end


def cut(w: Tensor, axis: int, start: int, length: int, layer: str) -> Tensor:
    """w[.., start:start + length, ..], quantized if w is. Raises ValueError where that cuts through blocks."""
    if (start, length) == (0, w.shape[axis]):
        return w
    if not isinstance(w, AffineQuantizedTensor):
        return w.narrow(axis, start, length)
    try:
        piece = prepare_for_shards(w, axis, length).narrow(axis, start, length)
    except ValueError as e:
        raise ValueError(f"{layer}: {e}") from e
    if not isinstance(piece, AffineQuantizedTensor):
        raise ValueError(
            f"{layer}: a quantized weight {tuple(w.shape)} ({w.spec}) cannot be cut to [{start}:{start + length}] "
            f"along axis {axis} for this rank; use another tensor_parallel_size, or a group size that divides {length}"
        )
    return piece


def merge(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces in order, joined where they can be stored together: same spec, and scales not shared by all rows."""
    out: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: p.start):
        joined = _joined(out[-1].weight, piece.weight) if out else None
        if joined is None:
            out.append(Piece(piece.start, piece.rows, piece.weight))
        else:
            out[-1] = Piece(out[-1].start, out[-1].rows + piece.rows, joined)
    return out


def _joined(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None or isinstance(a, AffineQuantizedTensor) != isinstance(b, AffineQuantizedTensor):
        return None
    if not isinstance(a, AffineQuantizedTensor) or not isinstance(b, AffineQuantizedTensor):
        return torch.cat([a, b])
    both = concatenate([a, b], 0)
    return None if both is NotImplemented else both


class PennyweightLinearMethod(LinearMethodBase):
    """The method of one linear layer. Its weight may be quantized, float, or parts of both."""

    ops: tuple[str, ...] = ("linear",)

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.unquantized: Any = UnquantizedLinearMethod()  # vLLM's own, for a layer whose weight is float

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register ``weight`` without memory; its loader keeps what this rank needs of each loaded tensor."""
        rows = sum(output_partition_sizes)
        shape = (rows, input_size_per_partition)
        weight = Parameter(torch.empty(shape, dtype=params_dtype, device="meta"), requires_grad=False)
        layer.pennyweight = pending = Pending(*shape)
        load = extra_weight_attrs.pop("weight_loader")

        def weight_loader(param: Parameter, loaded_weight: Tensor, *shard_id: Any) -> None:
            self.receive(layer, pending, load, loaded_weight, shard_id)

        set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0, "weight_loader": weight_loader})
        set_weight_attrs(weight, extra_weight_attrs)
        layer.register_parameter("weight", weight)

    def receive(self, layer: nn.Module, pending: Pending, load: Any, w: Tensor, args: tuple[Any, ...]) -> None:
        """Keep the rows and columns of w that belong to this rank."""
        try:
            columns = [(0, pending.columns, 0)]
            if w.ndim != 2:
                raise ValueError("not a matrix")
            if w.shape[1:] != (pending.columns,):
                columns = list(runs(index_map(load, w.shape[1], pending.columns, 1, args)))
            rows = list(runs(index_map(load, w.shape[0], pending.rows, 0, args)))
        except (RuntimeError, AssertionError, IndexError, ValueError) as e:  # what vLLM's loaders raise for other sizes
            columns, rows, reason = [], [], e
        else:
            reason = None
        if [length for _, length, _ in columns] != [pending.columns]:
            which = f" (part {args[0]!r} of it)" if args and args[0] is not None else ""
            raise ValueError(
                f"{self.prefix}: the checkpoint has a weight {list(w.shape)}{which}, which does not fit the model: the "
                f"layer has {pending.rows} rows and {pending.columns} columns on each rank"
            ) from reason
        w = cut(w, 1, columns[0][2], pending.columns, self.prefix)
        for start, length, first in rows:
            piece = None if first < 0 else cut(w, 0, first, length, self.prefix)
            pending.add(Piece(start, length, piece))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Join the pieces and pack them for their kernels."""
        pending: Pending | None = layer.__dict__.pop("pennyweight", None)
        if pending is None:  # tied to a layer that has been processed
            return
        if pending.missing():
            raise ValueError(f"{self.prefix}: {pending.missing()} of {pending.rows} rows of its weight were not loaded")
        parts = merge(pending.pieces.values())
        while parts and parts[-1].weight is None:  # padding behind the last row
            parts.pop()
        dtype = layer.weight.dtype
        if len(parts) == 1 and not isinstance(parts[0].weight, AffineQuantizedTensor):
            w = parts[0].weight
            assert w is not None
            layer.weight = Parameter(F.pad(w.to(dtype), (0, 0, 0, pending.rows - w.shape[0])), requires_grad=False)
            layer.pennyweight_parts = 0
            self.unquantized.process_weights_after_loading(layer)
            return
        weights = []
        for part in parts:
            w = part.weight
            assert w is not None, f"{self.prefix}: padding between rows"
            w = prepare(w, self.ops, dtype) if isinstance(w, AffineQuantizedTensor) else w.to(dtype).contiguous()
            weights.append(Parameter(w, requires_grad=False))
        layer.weight = weights[0]
        for i, weight in enumerate(weights[1:], 1):
            layer.register_parameter(f"weight_{i}", weight)
        layer.pennyweight_parts = len(weights)
        layer.pennyweight_padding = pending.rows - sum(w.shape[0] for w in weights)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [.., columns] -> [.., rows]."""
        if not layer.pennyweight_parts:
            return self.unquantized.apply(layer, x, bias)
        if layer.pennyweight_parts == 1:
            y = product(x, layer.weight, bias if not layer.pennyweight_padding else None)
        else:
            weights = [layer.weight, *(getattr(layer, f"weight_{i}") for i in range(1, layer.pennyweight_parts))]
            y = torch.cat([product(x, w, None) for w in weights], -1)
            if bias is not None and not layer.pennyweight_padding:
                y = y + bias
        if layer.pennyweight_padding:
            y = F.pad(y, (0, layer.pennyweight_padding))
            y = y if bias is None else y + bias
        return y


def product(x: Tensor, w: Any, bias: Tensor | None) -> Tensor:
    """F.linear; in eager mode quantized weights call their kernel without dispatch on tensor subclasses."""
    if not isinstance(w, AffineQuantizedTensor) or torch.compiler.is_compiling():
        return F.linear(x, w, bias)
    with torch._C.DisableTorchFunctionSubclass():
        return linear(x, w, bias, eager=True)


class PennyweightEmbeddingMethod(PennyweightLinearMethod):
    """The method of an embedding, or of an output layer, which may share its weight."""

    ops = ("embedding", "linear")

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix)
        self.unquantized = UnquantizedEmbeddingMethod()

    def embedding(self, layer: nn.Module, input_: Tensor) -> Tensor:
        """Rows of the weight."""
        return F.embedding(input_, layer.weight)

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        """The embedding itself becomes the output layer: one weight, one method."""
        return embed_tokens


def check_complete(model: nn.Module, loaded: set[str] | None, folder: str) -> None:
    """Raise CheckpointError for parameters of the model that the checkpoint did not fill."""
    for name, module in model.named_modules():
        pending = module.__dict__.get("pennyweight")
        if isinstance(pending, Pending) and pending.missing():
            raise CheckpointError(
                folder, f"{name}.weight",
                f"{pending.missing()} of the {pending.rows} rows that the model needs are not in the checkpoint",
            )  # fmt: skip
    if loaded is None:  # a model that does not say what it loaded
        return
    empty = sorted(name for name, p in model.named_parameters() if name not in loaded and p.numel() and not p.is_meta)
    if empty:
        raise CheckpointError(folder, empty[0], f"the model has {len(empty)} parameters that are not in the checkpoint")

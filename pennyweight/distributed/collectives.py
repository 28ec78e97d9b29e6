"""torch.distributed collectives on quantized tensors: each part is sent as stored, nothing is dequantized.

Parts are sent in a portable layout and repacked by the receiver. Before parts are sent, the ranks compare their static
properties (:func:`require_same_kind`), because int8 codes received as float8 codes would go unnoticed. Reductions are
undefined on codes and raise an error. All collectives are synchronous, even if called with async_op=True.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from ..core.ops.inplace import check_writable, copy_parts_
from ..core.ops.parts import to_portable, with_alias
from ..core.tensor import AffineQuantizedTensor
from .rank_check import part_tensors, require_same_kind

QT = AffineQuantizedTensor


def for_each_part(fn: Callable[..., Any], own: QT, *sent: QT) -> Any:
    """Call fn on the corresponding plain tensors of quantized tensors of one kind; returns the result of the last call.

    fn gets contiguous tensors; what it writes to the first is copied back to ``own``."""
    done = None
    for first, *rest in zip(*map(part_tensors, (own, *sent)), strict=True):
        buffer = first.contiguous()
        done = fn(buffer, *(p.contiguous() for p in rest))
        dist.Work.unbox(done[-1]).wait()
        if buffer.data_ptr() != first.data_ptr():
            first.copy_(buffer)
    return done


def _received(targets: list[QT], buffers: list[QT]) -> None:
    for target, buffer in zip(targets, buffers, strict=True):
        if buffer is not target:
            copy_parts_(target, buffer.to_layout(target.spec.layout))


def _group(so: Any) -> Any:
    return dist.ProcessGroup.unbox(so)


def _broadcast_(func: Any, args: Any, kwargs: Any) -> Any:
    tensors, so, *rest = args
    done: Any = None
    for t in tensors:
        if not isinstance(t, QT):
            done = func([t], so, *rest)
            dist.Work.unbox(done[1]).wait()
            continue
        if _group(so).rank() != rest[0]:
            check_writable(t)
        buffer = to_portable(t)
        require_same_kind(_group(so), buffer)
        done = for_each_part(lambda p: func([p], so, *rest), buffer)
        if _group(so).rank() != rest[0]:
            _received([t], [buffer])
    return tensors, done[1]


def _scatter_(func: Any, args: Any, kwargs: Any) -> Any:
    outputs, inputs, so, *rest = args
    (output,), pieces = outputs, inputs[0] if inputs else []
    if not isinstance(output, QT) or not all(isinstance(p, QT) for p in pieces):
        raise TypeError(
            f"scatter of {[type(p).__name__ for p in pieces]} into {type(output).__name__}: either all pieces must be "
            "quantized tensors, or none"
        )
    buffer, sent = to_portable(output), [to_portable(p) for p in pieces]
    require_same_kind(_group(so), buffer)
    for piece in sent:
        if piece.spec != buffer.spec or piece.shape != buffer.shape:
            raise ValueError(
                f"scatter: pieces {tuple(piece.shape)} ({piece.spec}) for {tuple(buffer.shape)} ({buffer.spec})"
            )
    done = for_each_part(lambda first, *parts: func([first], [list(parts)] if parts else [], so, *rest), buffer, *sent)
    _received([output], [buffer])
    return outputs, done[1]


def _allgather_(func: Any, args: Any, kwargs: Any) -> Any:
    outputs, (given,), so, *rest = args
    sent, buffers = to_portable(given), [to_portable(t) for t in outputs[0]]
    require_same_kind(_group(so), sent)
    done: Any = None
    for p, *into in zip(*map(part_tensors, (sent, *buffers)), strict=True):
        gathered = [torch.empty_like(q, memory_format=torch.contiguous_format) for q in into]
        done = func([gathered], [p.contiguous()], so, *rest)
        dist.Work.unbox(done[-1]).wait()
        for q, one in zip(into, gathered, strict=True):
            q.copy_(one)
    _received(outputs[0], buffers)
    return outputs, done[1]


def _all_gather_into_tensor(func: Any, args: Any, kwargs: Any) -> Any:
    """Used by DTensor: the pieces concatenated along axis 0, as a quantized tensor."""
    given, count, group = args
    sent = to_portable(given)
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    process_group = resolve(group) if isinstance(group, str) else group
    require_same_kind(process_group, sent)
    wait = torch.ops._c10d_functional.wait_tensor.default
    gathered = iter([wait(func(p.contiguous(), count, group)) for p in part_tensors(sent)])

    def each_rank(w: QT) -> list[QT]:
        slots: list[dict[str, Any]] = [{} for _ in range(count)]
        for name, p in w.parts._asdict().items():
            if p is None:
                continue
            of_ranks = (
                each_rank(p) if isinstance(p, QT) else next(gathered).view(p.dtype).unflatten(0, (count, p.shape[0]))
            )
            if name in ("scale", "zero_point", "offset") and _covers(w):  # a rank without rows has none
                of_ranks = [of_ranks[0]] * count
            for slot, one in zip(slots, of_ranks, strict=True):
                slot[name] = one
        return [w.with_(readonly=False, **slot) for slot in slots]

    return torch.ops.aten.cat.default(each_rank(sent), 0)


def _covers(w: QT) -> bool:
    """Whether one block covers the first axis on all ranks; otherwise sharding would have made blocks finer."""
    block = w.spec.block
    return block is None or (len(block) == w.ndim and not 0 < block[0] <= w.shape[0])


def _already_complete(func: Any, args: Any, kwargs: Any) -> Any:
    """Nothing to wait for: gathered quantized tensors are complete."""
    return with_alias(args[0])


_HANDLERS = {
    "c10d::broadcast_": _broadcast_,
    "c10d::scatter_": _scatter_,
    "c10d::allgather_": _allgather_,
    "_c10d_functional::all_gather_into_tensor": _all_gather_into_tensor,
    "_c10d_functional::wait_tensor": _already_complete,
    "_c10d_functional::_wrap_tensor_autograd": _already_complete,
}


def collective(func: Any, args: Any, kwargs: Any) -> Any:
    """Handles every c10d op, by name."""
    handler = _HANDLERS.get(func.name().partition(".")[0])
    if handler is not None:
        return handler(func, args, kwargs)
    w = next(a for a in tree_leaves((args, kwargs)) if isinstance(a, QT))
    raise TypeError(
        f"{func} of a quantized tensor {tuple(w.shape)} ({w.spec}): not supported on codes; exchange w.dequantize(), "
        "or the gradients"
    )

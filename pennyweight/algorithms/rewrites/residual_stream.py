"""Residual stream of a pre-norm transformer: the layers that write to it, and its norms with their readers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...planning.config_resolution import PlanError
from ..calibration.block_order import inference_mode
from .equalization import NormWeight, norm_weight_of, shared_readers
from .graph import ADDS, SCALES, TRANSPARENT, Matrix, Node, norm_width, trace
from .hadamard import mean_preserving_rotation, rotation
from .verify_rewrite import SavedTensors, relative_difference


@dataclass
class ResidualStream:
    """Components of the residual stream.

    norms       (gain, the layers that read its output)
    centred     whether one of the norms subtracts the mean
    writers     layers and tables that add to it; parameters: names and places of tensors that are added directly
    """

    width: int
    norms: list[tuple[NormWeight, tuple[Matrix, ...]]]
    centred: bool
    writers: list[Matrix]
    parameters: list[tuple[str, nn.Module, str]]


def find_stream(model: nn.Module, batch: Any) -> ResidualStream:
    """Find the residual stream of a pre-norm transformer. Raises PlanError with the reason if it cannot be rotated."""
    seen = trace(model, batch)
    readers = {id(node.what): found for node, found in shared_readers(seen) if node.kind == "norm"}
    first = next((n for n in seen.norms if id(n.what) in readers), None)
    if first is None:
        raise PlanError(
            f"rotate: {type(model).__name__} has no linear layer that reads a norm, hence no residual stream to rotate"
        )
    width = norm_width(first.what)
    on_stream = {id(n.what): (n.what, n) for n in seen.norms if norm_width(n.what) == width}
    made_of = list(_made_of([n.parents[0] for n in seen.norms if id(n.what) in on_stream]))
    norms, centred = [], False
    for module, node in on_stream.values():
        gain = norm_weight_of(node.name, module, module.weight)
        commutes = None if gain is None else _commuting_rotations(gain)
        if id(module) not in readers:
            raise PlanError(
                f"rotate: no linear layer reads {node.name}, so its gain cannot be folded; rotate the whole model "
                "including its head"
            )
        if gain is None or commutes is None:
            raise PlanError(f"rotate: {node.name} ({type(module).__name__}) does not commute with a rotation")
        for r in readers[id(module)]:
            if not r.plain:
                raise PlanError(f"rotate: {r.name} is already quantized; rotate before quantizing")
        centred = centred or commutes == "centred"
        norms.append((gain, readers[id(module)]))
    writers: dict[int, Matrix] = {}
    parameters: dict[str, tuple[str, nn.Module, str]] = {}
    for node in made_of:
        if node.kind == "matrix":
            if not node.what.plain:
                raise PlanError(f"rotate: {node.name} is already quantized; rotate before quantizing")
            writers[id(node.what)] = node.what
        else:
            parameters[node.name] = node.what
    return ResidualStream(width, norms, centred, list(writers.values()), list(parameters.values()))


def _made_of(begins: list[Node]) -> Iterator[Node]:
    """Matrices and parameters that add up to the residual stream. Raises PlanError for anything else in it."""
    visited = {id(n) for n in begins}
    todo = list(reversed(begins))
    while todo:
        node = todo.pop()
        if node.kind in ("matrix", "parameter"):
            yield node
            continue
        if node.kind == "norm":
            raise PlanError(
                f"rotate: {node.name} normalises what is added to the residual stream, or the stream itself "
                "(post-norm, as in BERT and Gemma 2); its gain cannot be folded and does not commute with a rotation"
            )
        if node.kind == "unknown":
            raise PlanError(
                f"rotate: a tensor of shape {list(node.what)} that is not a parameter is added to the residual stream "
                "(an input or a buffer); it would have to be rotated at run time"
            )
        if not (node.name in TRANSPARENT or node.name in ADDS or (node.name in SCALES and len(node.parents) == 1)):
            raise PlanError(f"rotate: the residual stream goes through {node.name!r}, which mixes or scales channels")
        for parent in reversed(node.parents):
            if id(parent) not in visited:
                visited.add(id(parent))
                todo.append(parent)


def _commuting_rotations(gain: NormWeight) -> str | None:
    """Rotations that commute with a norm: "plain", any; "centred", those that preserve the mean; None: none."""
    norm, weight = gain.module, gain.weight
    kept = SavedTensors(gain.tensors())
    width, generator = weight.shape[0], torch.Generator().manual_seed(0)
    x = torch.randn(8, width, generator=generator, dtype=torch.float64, device="cpu")
    near = 1e-4 if weight.dtype is torch.float32 else 0.05

    def run(x: Tensor) -> Tensor:
        return norm(x.to(weight.device, weight.dtype)).double().cpu()

    try:
        gain.put(torch.ones(width, dtype=torch.float64, device=weight.device))
        if gain.bias is not None:
            gain.bias.data.zero_()
        with inference_mode(norm):
            for name, q in (("plain", rotation(width, 1)), ("centred", mean_preserving_rotation(width, 1))):
                if relative_difference([run(x) @ q], [run(x @ q)]) <= near:
                    return name
    finally:
        kept.restore()
    return None

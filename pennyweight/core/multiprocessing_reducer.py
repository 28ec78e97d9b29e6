"""How a quantized tensor is handed to another process: its stored parts, in shared memory, in their layout.

Pickling (``__reduce_ex__``) makes new tensors, in a layout that other machines read. torch hands a tensor's memory over
as a file descriptor that lives as long as the tensor, and "spawn" and "forkserver" use it after pickling: a tensor made
while pickling is gone by then. The stored parts live as long as the tensor. As for other tensors, both processes then
share the numbers.
"""

from __future__ import annotations

import json
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from .numerics import Parts
from .spec import DTYPES, ActivationSpec, QuantSpec
from .tensor import SLOTS, AffineQuantizedTensor, static_json


def reduce(w: AffineQuantizedTensor) -> tuple[Any, ...]:
    parts = {name: part for name, part in zip(SLOTS, w.parts, strict=True) if part is not None}
    return rebuild, (static_json(w), parts, w.requires_grad, isinstance(w, torch.nn.Parameter))


def rebuild(static: str, parts: dict[str, Tensor], requires_grad: bool, is_param: bool) -> AffineQuantizedTensor:
    data = json.loads(static)
    act = None if data["act"] is None else ActivationSpec.from_dict(data["act"])
    axes = None if data["axes"] is None else tuple(data["axes"])
    spec, dtype = QuantSpec.from_dict(data["spec"]), DTYPES[data["dtype"]]
    w = AffineQuantizedTensor(
        Parts(**parts), spec, data["shape"], dtype, act, axes, bool(data["readonly"]), requires_grad
    )
    if is_param:
        w._is_param = True
    return w


ForkingPickler.register(AffineQuantizedTensor, reduce)

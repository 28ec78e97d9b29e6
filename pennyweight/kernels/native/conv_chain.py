"""Native chains of convolutions; see kernels/conv_chain.py for the steps and arguments.py for the rules.

Weights are checked when the chain is compiled, sizes once for each size of inputs. Each call checks its inputs, and
that no part of a weight changed its size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.tracing import in_memory
from ...support.errors import ArgumentError
from ..conv_chain import (
    AddStep,
    ConvChain,
    ConvStep,
    Format,
    InputStep,
    MaxStep,
    MeanStep,
    fits,
    formats,
    structure,
)
from ..cpu import library
from ..cpu.abi import (
    CHAIN_ADD,
    CHAIN_CONV,
    CHAIN_INPUT,
    CHAIN_MAX,
    CHAIN_MEAN,
    CONV_WEIGHT,
    F32,
    Chain,
    ChainInput,
    ChainStep,
    ChainTensor,
)
from ..cpu.block import FUNCTIONS
from .arguments import TILE, address, check_status, count_tiles, extents, native_function, optional_address
from .conv import _CHANNELS_LAST, convolution_sizes

_KINDS = {InputStep: CHAIN_INPUT, ConvStep: CHAIN_CONV, MaxStep: CHAIN_MAX, MeanStep: CHAIN_MEAN, AddStep: CHAIN_ADD}
MOST_SIZES = 8  # of inputs, whose structures are kept
Size = tuple[int, int, int]


def compile_chain(chain: ConvChain) -> NativeChain | str:
    """The native form of a chain, or the reason why the native library cannot run it."""
    verdict = library.usable()
    if verdict is not True:
        return str(verdict)
    for step in chain.steps:
        if isinstance(step, ConvStep):
            reason = fits(step.weight, step.groups)
            if reason:
                return reason
            if step.function not in FUNCTIONS:
                return f"the function {step.function!r} is not known"
            if step.bias is not None and not bool(torch.isfinite(step.bias).all()):
                return "a bias is not finite"
    return NativeChain(chain)


class _Weight:
    """The parts of the weight of a step, as native code reads them."""

    def __init__(self, step: ConvStep) -> None:
        w: Any = step.weight
        self.struct = structure(w)
        parts = extents(CONV_WEIGHT, self.struct)
        what = f"convolution {list(w.shape)}"
        weight_parts = w.parts
        optional_address(weight_parts.codes, f"{what}: codes", parts[0].kind, parts[0].least)
        optional_address(weight_parts.scale, f"{what}: scale", parts[1].kind, parts[1].least)
        o = int(w.shape[0])
        self.codes, self.scale = weight_parts.codes, weight_parts.scale
        signed = w.spec.format.to_unsigned(w.codes).int() - 128
        sums = torch.zeros(count_tiles(o) * TILE, dtype=torch.int32, device="cpu")
        sums[:o] = signed.reshape(o, -1).sum(1)
        self.sums = sums
        self.bias = None
        if step.bias is not None:
            self.bias = step.bias.detach().float().contiguous()
            address(self.bias, f"{what}: bias", (torch.float32,), o, exact=True)

    def tensors(self) -> list[Tensor]:
        return [self.codes, self.scale, *(() if self.bias is None else (self.bias,))]


@dataclass
class _Ready:
    """Structures of one size of inputs, for one call at a time."""

    chain: Any
    address: int
    inputs: Any
    outputs: Any
    shapes: list[Size]  # of the outputs
    addresses: list[int]  # of the parts of weights
    held: tuple[Any, ...]


class NativeChain:
    """A chain that the native library runs. Several Python threads may call it at once."""

    def __init__(self, chain: ConvChain) -> None:
        self._call = native_function("pw_conv_chain")
        self.chain, self.formats = formats(chain)
        self._weights = {i: _Weight(s) for i, s in enumerate(self.chain.steps) if isinstance(s, ConvStep)}
        self._parts = [t for weight in self._weights.values() for t in weight.tensors()]
        self._bytes = [t.nbytes for t in self._parts]
        self._inputs = 1 + max(s.index for s in self.chain.steps if isinstance(s, InputStep))
        codes = {f.codes for f in self.formats.values() if f.codes is not None}
        self._scales = {c: torch.tensor([c.scale], dtype=torch.float32, device="cpu") for c in codes}
        self._ready: dict[tuple[Size, ...], list[_Ready]] = {}

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        """The outputs [N, C, H, W], channels last, for float32 inputs of this form; see conv_chain.run_reference.

        A sample with an input that is not finite gives NaN. None if the native library cannot read an input: another
        dtype or device, or a mode, tracer or transform must see the call. Raises ArgumentError if sizes do not fit or a
        weight lost its memory, and MemoryError.
        """
        if len(inputs) != self._inputs:
            raise ArgumentError(f"chain of convolutions: expected {self._inputs} inputs, got {len(inputs)}")
        given = []
        for x in inputs:
            if not in_memory(x) or not x.is_cpu or x.dtype is not torch.float32 or x.ndim != 4:
                return None
            last = not x.is_contiguous()
            if last and not x.is_contiguous(memory_format=_CHANNELS_LAST):
                x, last = x.contiguous(), False
            given.append((x, last))
        n = given[0][0].shape[0]
        if any(x.shape[0] != n for x, _ in given):
            raise ArgumentError("chain of convolutions: inputs of one batch size are expected")
        if [t.nbytes for t in self._parts] != self._bytes:
            raise ArgumentError("chain of convolutions: a part of a weight was resized")
        sizes = tuple(tuple(x.shape[1:]) for x, _ in given)
        for_sizes: Any = self._ready.get(sizes)  # type: ignore[arg-type]
        if for_sizes is None:
            first = self._structures(sizes)
            if len(self._ready) >= MOST_SIZES:
                self._ready.clear()
            for_sizes = self._ready[sizes] = [first]  # type: ignore[index]
        try:
            ready = for_sizes.pop()
        except IndexError:  # all are in use by other Python threads
            ready = self._structures(sizes)
        if [t.data_ptr() for t in self._parts] != ready.addresses:  # their memory was moved
            ready = self._structures(sizes)
        try:
            outputs = [
                torch.empty((n, *shape), dtype=torch.float32, device="cpu", memory_format=_CHANNELS_LAST)
                for shape in ready.shapes
            ]
            for i, (x, last) in enumerate(given):
                ready.inputs[i].data, ready.inputs[i].last = x.data_ptr(), last
            for i, y in enumerate(outputs):
                ready.outputs[i] = y.data_ptr()
            ready.chain.n, ready.chain.threads = n, torch.get_num_threads()
            status = self._call(ready.address) if n else 0
        finally:
            for_sizes.append(ready)
        if status:
            check_status(status, f"chain of convolutions: inputs {[list(x.shape) for x, _ in given]}")
        return outputs

    def _structures(self, sizes: Any) -> _Ready:
        """Structures for these sizes [C, H, W] of inputs. Raises ArgumentError if they do not fit the steps."""
        steps = self.chain.steps
        shapes: dict[int, Size] = {}
        margins: dict[int, tuple[int, int]] = {}
        for step in steps:
            shapes[step.y] = _size(step, shapes, sizes)
            if isinstance(step, ConvStep):
                m = margins.get(step.x, (0, 0))
                margins[step.x] = (max(m[0], step.padding[0]), max(m[1], step.padding[1]))
        places, scratch = _places(steps, self.chain.outputs, self.formats, shapes, margins)
        tensors = (ChainTensor * (1 + max(shapes)))()
        for t in range(len(tensors)):  # those of no step
            tensors[t] = ChainTensor(1, 1, 1, 0, 0, -1, 0, None, 0, 0, 0, F32, -1)
        for t, (c, h, w) in shapes.items():
            codes, m = self.formats[t].codes, margins.get(t, (0, 0))
            output = self.chain.outputs.index(t) if t in self.chain.outputs else -1
            scale, rest = None, (0, 0, 0, F32)
            if codes is not None:
                scale, rest = self._scales[codes].data_ptr(), codes[1:]
            tensors[t] = ChainTensor(c, h, w, *m, *places[t], scale, *rest, output)
        native = (ChainStep * len(steps))()
        for i, step in enumerate(steps):
            _fill(native[i], step, self._weights.get(i))
        inputs, outputs = (ChainInput * self._inputs)(), (ctypes.c_void_p * len(self.chain.outputs))()
        chain = Chain(*map(_address, (native, tensors, inputs, outputs)))
        chain.scratch, chain.step_count, chain.tensor_count = max(scratch, 64), len(steps), len(tensors)
        chain.input_count, chain.output_count, chain.threads = len(inputs), len(outputs), 1
        found = [shapes[t] for t in self.chain.outputs]
        addresses = [t.data_ptr() for t in self._parts]
        return _Ready(chain, ctypes.addressof(chain), inputs, outputs, found, addresses, (native, tensors))


def _address(table: Any) -> int:
    return ctypes.addressof(table)


def _size(step: Any, shapes: dict[int, Size], inputs: Sequence[Size]) -> Size:
    """The size of the result of a step. Raises ArgumentError if sizes do not fit."""
    if isinstance(step, InputStep):
        return inputs[step.index]
    c, h, w = found = shapes[step.x]
    if isinstance(step, ConvStep):
        o, each, *kernel = step.weight.shape
        if c != each * step.groups or o % step.groups:
            raise ArgumentError(f"convolution {list(step.weight.shape)}, {step.groups} groups: got {c} input channels")
        rows, columns = convolution_sizes((h, w), kernel, step.stride, step.padding, step.dilation)
        found = (int(o), rows, columns)
    elif isinstance(step, MaxStep):
        if any(2 * p > k for p, k in zip(step.padding, step.kernel, strict=True)):
            raise ArgumentError("max pooling: the padding is more than half of the kernel")
        rows, columns = convolution_sizes((h, w), step.kernel, step.stride, step.padding, (1, 1))
        found = (c, rows, columns)
    elif isinstance(step, MeanStep):
        found = (c, 1, 1)
    if min(found) < 1:
        raise ArgumentError(f"a step of a chain of convolutions makes an empty tensor of an input [{c}, {h}, {w}]")
    residual = getattr(step, "residual", None)
    if residual is not None and shapes[residual] != found:
        raise ArgumentError(f"a residual of {list(shapes[residual])} is added to {list(found)}")
    return found


def _places(
    steps: Sequence[Any], outputs: Sequence[int], kept: dict[int, Format], shapes: dict[int, Size],
    margins: dict[int, tuple[int, int]],
) -> tuple[dict[int, tuple[int, int]], int]:  # fmt: skip
    """Places of codes and numbers of each tensor in the scratch of a sample, and its size. Memory of a tensor that no
    later step reads is used again."""
    last = {step.y: i for i, step in enumerate(steps)}
    for i, step in enumerate(steps):
        for t in (None if isinstance(step, InputStep) else step.x, getattr(step, "residual", None)):
            if t is not None:
                last[t] = i + (i + 1 < len(steps) and isinstance(steps[i + 1], MaxStep))  # which runs together with it
    free: list[tuple[int, int]] = [(0, 1 << 60)]  # place, bytes
    busy: list[tuple[int, int, int]] = []  # last step, place, bytes
    places: dict[int, tuple[int, int]] = {}
    top = 0
    for i, step in enumerate(steps):
        done = [b for b in busy if b[0] < i]
        busy = [b for b in busy if b[0] >= i]
        for _, place, size in done:
            free = _join([*free, (place, size)])
        c, h, w = shapes[step.y]
        mh, mw = margins.get(step.y, (0, 0))
        residual = getattr(step, "residual", None)
        found = []
        for wanted, size in (
            (kept[step.y].codes is not None, (h + 2 * mh) * (w + 2 * mw) * -(-c // 4) * 4),
            (kept[step.y].numbers and step.y not in outputs, h * w * c * 4),
        ):
            size = -(-size // 64) * 64
            if not wanted:
                found.append(-1)
                continue
            if found and residual is not None and last[residual] == i and places[residual][1] >= 0:
                place = places[residual][1]  # each number takes the place of the one that was added
                busy = [b for b in busy if b[1] != place]
            else:
                j = next(j for j, (_, room) in enumerate(free) if room >= size)
                place, room = free[j]
                free[j : j + 1] = [(place + size, room - size)] if room > size else []
            busy.append((last[step.y], place, size))
            top = max(top, place + size)
            found.append(place)
        places[step.y] = (found[0], found[1])
    return places, top


def _join(free: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours become one."""
    out: list[tuple[int, int]] = []
    for place, size in sorted(free):
        if out and out[-1][0] + out[-1][1] == place:
            out[-1] = (out[-1][0], out[-1][1] + size)
        else:
            out.append((place, size))
    return out


def _fill(to: ChainStep, step: Any, weight: _Weight | None) -> None:
    """A step as the structure of src/abi.h."""
    residual = getattr(step, "residual", None)
    to.kind, to.y = _KINDS[type(step)], step.y
    to.x = step.index if isinstance(step, InputStep) else step.x
    to.residual = -1 if residual is None else residual
    to.lo, to.hi = getattr(step, "lo", -float("inf")), getattr(step, "hi", float("inf"))
    to.groups = to.kh = to.kw = to.stride_h = to.stride_w = to.dilation_h = to.dilation_w = 1
    if isinstance(step, MaxStep):
        (to.kh, to.kw), (to.stride_h, to.stride_w), (to.pad_h, to.pad_w) = step.kernel, step.stride, step.padding
    if isinstance(step, ConvStep) and weight is not None:
        to.kh, to.kw = (int(k) for k in step.weight.shape[2:])
        (to.stride_h, to.stride_w), (to.pad_h, to.pad_w) = step.stride, step.padding
        (to.dilation_h, to.dilation_w), to.groups = step.dilation, step.groups
        to.function, to.conv = FUNCTIONS[step.function], ctypes.addressof(weight.struct)
        to.codes, to.scale, to.sums = weight.codes.data_ptr(), weight.scale.data_ptr(), weight.sums.data_ptr()
        to.bias = None if weight.bias is None else weight.bias.data_ptr()

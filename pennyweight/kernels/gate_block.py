"""The gate to the native steps of a transformer block; see block.py for the steps and gate.py for the rules of a gate.

What is the same in all calls is checked once, when the block is compiled. Each call checks the input, the tensors of
the :class:`~pennyweight.kernels.block.Call`, and that no parameter changed its size, dtype or device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core.errors import ArgumentError
from ..core.tracing import is_observed
from .block import Call, Steps
from .block_plan import Plan, Refused, Structures, plan, structures
from .cpu.library import usable
from .gate import _CPU, PLAIN, address, check_status, native_function


def compile_steps(steps: Steps) -> NativeBlock | str:
    """The native form of a block, or the reason why the native library cannot run it.

    Raises ArgumentError if sizes of the steps do not fit each other.
    """
    verdict = usable()
    if verdict is not True:
        return str(verdict)
    try:
        return NativeBlock(plan(steps))
    except Refused as reason:
        return str(reason)


class _Ready:
    """Structures with the addresses of the parameters, for one call at a time."""

    def __init__(self, plan: Plan) -> None:
        s: Structures = structures(plan)
        self.block, self.buffers, self.address, self.zeros = s.block, s.buffers, s.address, s.zeros
        self.input, self.output = s.buffers[0], s.buffers[1]
        held = [*s.parts, *s.numbers]
        self.parameters = [p for p, _, _ in held]
        self.fields = [(to, name) for _, to, name in held]
        self.sizes = [p.nbytes for p in self.parameters]
        self.numbers = [p for p, _, _ in s.numbers]
        self.kinds = [(p.dtype, True) for p in self.numbers]
        self.addresses: list[int] = []

    def renew(self) -> None:
        """Enter the addresses of the parameters. Raises ArgumentError if one of them changed."""
        if [p.nbytes for p in self.parameters] != self.sizes or [
            (p.dtype, p.is_cpu) for p in self.numbers
        ] != self.kinds:
            raise ArgumentError(
                "block: a parameter was resized, converted or moved after the block was compiled; compile it again"
            )
        addresses = [p.data_ptr() for p in self.parameters]
        if addresses != self.addresses:
            for (to, name), at in zip(self.fields, addresses, strict=True):
                setattr(to, name, at)
            self.addresses = addresses
        for zero, shift, to in self.zeros:
            to.act_zero_point = int(zero) - shift


class NativeBlock:
    """A block that the native library runs. Several Python threads may call it at once."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._call = native_function("pw_block")
        self._dtype, self._widths = plan.steps.dtype, plan.steps.widths
        self._ready = [_Ready(plan)]  # not in use by a call

    def run(self, x: Tensor, call: Call) -> Tensor | None:
        """The output [batch, tokens, width] for x [batch, tokens, width]; see :func:`block.run_reference`.

        None if the native library cannot read x: another dtype or device, a gradient is wanted, or a mode, tracer or
        transform must see the call. Parameters get no gradient. Raises ArgumentError if the shape of x, a tensor of
        the call or a parameter does not fit, and MemoryError.
        """
        if (  # hot path, runs per block and call
            type(x) not in PLAIN or not x.is_cpu or x.dtype is not self._dtype or x.is_neg()
            or x.layout is not torch.strided or (x.requires_grad and torch.is_grad_enabled())
            or (
                (torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None
                 or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0)
                and is_observed(x)
            )
        ):  # fmt: skip
            return None
        shape = x.shape
        if len(shape) != 3 or shape[2] != self._widths[0]:
            raise ArgumentError(f"block: expected an input [batch, tokens, {self._widths[0]}], got {list(shape)}")
        if not x.is_contiguous():
            x = x.contiguous()
        batch, tokens, width = shape[0], shape[1], self._widths[1]
        y = torch.empty_strided((batch, tokens, width), (tokens * width, width, 1), dtype=self._dtype, device=_CPU)
        try:
            ready = self._ready.pop()
        except IndexError:  # all are in use by other Python threads
            ready = _Ready(self.plan)
        kept: dict[int, Tensor] = call.kept
        try:
            ready.renew()
            ready.input.data, ready.output.data = x.data_ptr(), y.data_ptr()
            block: Any = ready.block
            block.rows, block.threads = batch * tokens, torch.get_num_threads()
            if kept or self.plan.given:
                self._keep(ready, kept, batch * tokens)
            status = self._call(ready.address)
        finally:
            for i in kept:
                if 1 < i < len(self._widths):
                    ready.buffers[i].data = None
            self._ready.append(ready)
        if status:
            check_status(status, f"block: input {list(shape)}")
        return y

    def _keep(self, ready: _Ready, kept: dict[int, Tensor], rows: int) -> None:
        if missing := self.plan.given - kept.keys():
            raise ArgumentError(f"block: buffers {sorted(missing)} are read before they are written; keep them")
        for i, t in kept.items():
            if not 1 < i < len(self._widths):
                raise ArgumentError(f"block: cannot keep buffer {i}; scratch buffers are 2 to {len(self._widths) - 1}")
            what = f"block: kept buffer {i}"
            ready.buffers[i].data = address(t, what, (torch.float32,), rows * self._widths[i], exact=True)

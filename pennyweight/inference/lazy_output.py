"""Lazy outputs of fused blocks: a block whose output goes to another fused block runs with it, in one native call.

A pass of a model calls one block after the other. From the second pass on the first block returns a
:class:`LazyOutput` at once, and so does each that takes it; the last one runs all of them. Whatever else reads a lazy
output, at any time, runs the blocks so far and gets their values: an operation, a hook, a copy, another library. What
was called is the same in both cases, and so are the results.

Only calls without gradients and with few rows are lazy. The input and the other tensors are copied, because a caller
may write to them before the blocks run. Between two blocks that is seen too, by the tensors' versions; tensors of
inference mode have none, and for them it is looked at once, when it is found out which block follows which.
"""

from __future__ import annotations

import threading
import weakref
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from ..kernels.block import Call
from .block_arguments import Read
from .block_stack import BlockStack, stack_of
from .bound_block import no_block
from .fused_module import FusedModule

MOST = 1 << 16  # numbers of a lazy output: with more, one parallel region more costs nothing
TRIES = 4  # notes of who follows a block
MOST_COPIED = 1 << 18  # numbers of the other tensors of a lazy call, which are copied

# What a lazy output has before it is computed.
_NAMES = ("shape", "dtype", "device", "ndim", "layout", "is_cpu", "is_cuda", "requires_grad")
_PROPERTIES = {
    *(getattr(Tensor, name).__get__ for name in _NAMES), Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.element_size, Tensor.__len__,
    Tensor.__hash__,
}  # fmt: skip


def _unobserved() -> bool:
    """Whether no gradients, mode, tracer, transform or autocast act on operations."""
    c = torch._C
    return not (
        torch.is_grad_enabled() or c._len_torch_function_stack() or c._len_torch_dispatch_stack()
        or c._get_tracing_state() is not None or c._are_functorch_transforms_active()
        or forward_ad._current_level >= 0 or torch.is_autocast_enabled("cpu")
    )  # fmt: skip


class _Arguments:
    """Arguments that some blocks of a pass share, besides their inputs."""

    def __init__(self, reader: Any, rest: tuple[Any, ...], kwargs: dict[str, Any], read: Read) -> None:
        self.reader, self.rest, self.kwargs, self.read = reader, rest, kwargs, read
        self.tensors = [t for t in tensors_of(rest, kwargs) if not t.is_inference()]
        self.versions = [t._version for t in self.tensors]

    def are(self, reader: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a block is called with the same, and nothing was written to them."""
        return (
            self.reader.reads_alike(reader) and len(self.rest) == len(rest) and self.kwargs.keys() == kwargs.keys()
            and all(map(is_, self.rest, rest)) and all(map(is_, self.kwargs.values(), kwargs.values()))
            and [t._version for t in self.tensors] == self.versions
        )  # fmt: skip


def _copied(call: Call) -> bool:
    """Copy the tensors of a call. False: they are large."""
    given = [(name, t) for name in ("cos", "sin", "mask") if (t := getattr(call, name)) is not None]
    if sum(t.numel() for _, t in given) > MOST_COPIED:
        return False
    for name, t in given:
        setattr(call, name, t.clone())
    return True


class Pass:
    """Calls of fused blocks, each on the output of the one before it. Threads may share it."""

    def __init__(self, stack: BlockStack, x: Tensor) -> None:
        self.stack, self.x = stack, x
        self.lock = threading.RLock()
        self.modules: list[Any] = []  # that were called
        self.which: list[int] = []  # the arguments of each
        self.arguments: list[_Arguments] = []
        self.inference = torch.is_inference_mode_enabled()
        self.outputs: Any = None  # once it has run: of each block
        self.failed: BaseException | None = None

    def add(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Add a call of the next block of the stack. False if this is another one, or cannot be fused: then it is not
        added."""
        i, stack = len(self.modules), self.stack
        if (
            self.outputs is not None or self.failed is not None or i >= len(stack.classes)
            or type(module) is not stack.classes[i] or stack.bounds[i].module() is not module
            or torch.is_inference_mode_enabled() != self.inference
        ):  # fmt: skip
            return False
        reader, rest = stack.bounds[i].reader, args[1:]
        group = next((i for i, known in enumerate(self.arguments) if known.are(reader, rest, kwargs)), None)
        if group is None:
            read = reader.read((self.x, *rest), kwargs)
            if isinstance(read, str) or not _copied(read.call):
                return False
            group = len(self.arguments)
            self.arguments.append(_Arguments(reader, rest, kwargs, read))
        self.modules.append(module)
        self.which.append(group)
        return True

    def run(self) -> None:
        """Run what was called, once. Raises MemoryError, and what forwards raise."""
        with self.lock:
            if self.failed is not None:
                raise self.failed
            if self.outputs is not None:
                return
            if len(self.modules) < len(self.stack.classes):  # read by something else than the next block
                self.stack.bounds[0].stack = None
                self.stack.bounds[len(self.modules) - 1].next = no_block
            try:
                with torch.inference_mode(self.inference), torch.no_grad():
                    reads = [known.read for known in self.arguments]
                    self.outputs = self.stack.run(self.x, reads, self.which)
                    if self.outputs is None:
                        self.outputs = _InTurn(self)
            except BaseException as error:
                self.failed = error
                raise

    def __del__(self) -> None:
        if self.outputs is None and self.failed is None and any(a.read.cache is not None for a in self.arguments):
            self.run()  # the caller may want the keys and values only


class _InTurn:
    """Outputs of blocks that are called one by one."""

    def __init__(self, calls: Pass) -> None:
        x, self.each = calls.x, []
        for module, bound, group in zip(calls.modules, calls.stack.bounds, calls.which, strict=False):
            known = calls.arguments[group]
            forward = FusedModule.forward if isinstance(module, FusedModule) else type(module).forward
            with torch.autocast("cpu", enabled=False):  # it was off when they were called
                y = forward(module, x, *known.rest, **known.kwargs)
            x = _hidden(bound, y)
            self.each.append(x)

    def of(self, index: int) -> Tensor:
        return self.each[index]


class LazyOutput(Tensor):
    """The output of a block in a :class:`Pass`. Operations get the tensor ``value()``, so that none of them returns a
    lazy output."""

    calls: Pass
    place: int  # of the block

    @staticmethod
    def __new__(cls, calls: Pass, place: int) -> LazyOutput:
        x = calls.x
        made: Any = Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)
        made.calls, made.place = calls, place
        return made

    def value(self) -> Tensor:
        """The output, after the blocks have run. Raises MemoryError."""
        self.calls.run()
        return self.calls.outputs.of(self.place)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PROPERTIES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = computed((args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = computed((args, kwargs or {}))
        return func(*args, **kwargs)


def computed(tree: Any) -> Any:
    """The same with values instead of lazy outputs. Raises MemoryError."""
    if torch.compiler.is_dynamo_compiling():  # the blocks run outside of the graph
        return torch.compiler.disable(_values)(tree)
    return _values(tree)


def _values(tree: Any) -> Any:
    return pytree.tree_map_only(LazyOutput, LazyOutput.value, tree)


def lazy_call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a fused block returns without running alone: a lazy output, or the output if it is the last one of a pass.
    None: the call is not lazy."""
    x, bound = args[0], type(module).bound
    if type(x) is LazyOutput:
        calls = x.calls
        with calls.lock:
            if x.place + 1 != len(calls.modules) or not _unobserved() or not calls.add(module, args, kwargs):
                return None
            y: Any = LazyOutput(calls, x.place + 1)
            bound = calls.stack.bounds[x.place + 1]
            if len(calls.modules) == len(calls.stack.classes):
                y = y.value()
                _note(bound, y, args, kwargs)
            return bound.reader.returned(y, args, kwargs)
    if bound is None or bound.next() is None or type(x) is not Tensor or x.numel() > MOST or not _unobserved():
        return None
    stack = bound.stack
    if stack is None or not stack.linked():
        stack = bound.stack = stack_of(bound)
    if stack is None:
        bound.next = no_block
        return None
    if not stack.unobserved():
        return None
    calls = Pass(stack, x.clone())  # the caller may write to x before the blocks run
    return bound.reader.returned(LazyOutput(calls, 0), args, kwargs) if calls.add(module, args, kwargs) else None


# -- which block gets the output of which ------------------------------------------------------------------------------


def tensors_of(rest: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Tensors among arguments, also in tuples."""
    found = []
    for value in (*rest, *kwargs.values()):
        found += [t for t in (value if type(value) is tuple else (value,)) if isinstance(t, Tensor)]
    return found


class _Last:
    """The last output of a fused block in a thread, and its other arguments as they were."""

    def __init__(self, y: Any, bound: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = tensors_of(args[1:], kwargs)
        self.known = isinstance(y, Tensor) and sum(t.numel() for t in found) <= MOST_COPIED
        self.output, self.bound = weakref.ref(y) if self.known else no_block, weakref.ref(bound)
        self.arguments = [(weakref.ref(t), t.clone()) for t in found] if self.known else []

    def handed_on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether these are the arguments of a call on the output, and no argument of both was written to between."""
        if not self.known or self.output() is not args[0]:
            return False
        before = [(ref(), copy) for ref, copy in self.arguments]
        now = tensors_of(args[1:], kwargs)
        return all(torch.equal(old, copy) for old, copy in before if old is not None and any(t is old for t in now))


class _Thread(threading.local):
    last: _Last | None = None


_THREAD = _Thread()


def call_alone(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a fused block returns for a call that is not lazy.

    Notes which block gets the output of which: then later calls of both may be lazy. It looks a few times at a block
    that nobody follows.
    """
    if type(args[0]) is LazyOutput:
        args = args[0].value(), *args[1:]
    last, _THREAD.last = _THREAD.last, None
    if last is not None and (bound := type(module).bound) is not None:
        before = last.bound()
        if before is not None and before is not bound and last.handed_on(args, kwargs):
            before.next = weakref.ref(bound)
    y = FusedModule.forward(module, *args, **kwargs)
    bound, x = getattr(type(module), "bound", None), args[0]
    if bound is not None and type(x) is Tensor and 0 < x.numel() <= MOST:
        _note(bound, _hidden(bound, y), args, kwargs)
    return y


def _note(bound: Any, y: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note an output, to see who gets it."""
    if bound.next() is None and bound.tries < TRIES and _unobserved():
        bound.tries += 1
        _THREAD.last = _Last(y, bound, args, kwargs)


def _hidden(bound: Any, y: Any) -> Any:
    """The hidden states in what a block returned."""
    output = bound.description.output
    return y[output.index("")] if output is not None and type(y) is tuple else y

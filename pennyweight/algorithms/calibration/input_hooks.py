"""Observes the inputs that weights are multiplied by, in a module's own forward or in code that reads its weight."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ...kernels import recurrent
from ...planning.parameters import EXPERTS, kind_of

See = Callable[[str, Tensor], None]  # (parameter name, inputs as float32 [groups, tokens, width])


class Expert(NamedTuple):
    """One matrix of a parameter [count, .., ..]."""

    name: str
    index: int
    count: int


SeeExpert = Callable[[Expert, Tensor], None]  # inputs as float32 [1, tokens, width]


def require_finite(name: str, x: Tensor) -> None:
    """Raise ValueError for inputs of a parameter that are not finite."""
    if not bool(x.isfinite().all()):
        bad = int((~x.isfinite()).sum())
        raise ValueError(f"{name}: its inputs on the calibration data have {bad} NaN or infinite values")


class InputHooks(TorchFunctionMode):
    """Calls ``see(name, x)`` for each product with a watched weight.

    weights     id of the tensor -> name
    mask        bool [batch, length]: tokens that count; inputs with another leading shape are used whole
    unfold      pass inputs as [groups, tokens, width], those of a convolution as patches; else in their own shape
    look        called with the name for each lookup of rows of a watched weight
    see_expert  called for each product with one matrix ``weight[i]`` of a watched weight with three axes. ``mask`` does
                not apply: a router has put the tokens in another order (:func:`without_padding` takes them out before)
    """

    def __init__(
        self, weights: dict[int, str], see: See, mask: Tensor | None = None, unfold: bool = True,
        look: Callable[[str], object] = lambda name: None, see_expert: SeeExpert | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weights, self.see, self.mask, self.unfold, self.look = weights, see, mask, unfold, look
        self.see_expert = see_expert
        self.experts = WeakTensorKeyDictionary()  # weight[i] -> Expert

    def __torch_function__(self, func: Any, classes: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reader = READERS.get(func)
        if reader is not None:
            found = reader(args, kwargs)
            name = self.weights.get(id(found[1])) if found is not None else None
            if found is not None and name is not None:
                x = self._counting(found[0])
                self.see(name, found[2](x) if self.unfold else x.detach().float())
            elif found is not None and self.see_expert is not None and isinstance(found[1], Tensor):
                expert = self.experts.get(found[1])
                if expert is not None:
                    self.see_expert(expert, found[2](found[0]))
        table = LOOKUPS[func](args, kwargs) if func in LOOKUPS else None
        if table is not None and id(table) in self.weights:
            self.look(self.weights[id(table)])
        if func in COMPOSITE:  # it multiplies weights inside
            with self:
                return COMPOSITE[func](*args, **kwargs)
        out = func(*args, **kwargs)
        if func is Tensor.__getitem__ and self.see_expert is not None:
            w, index = args
            name, one = self.weights.get(id(w)), index.ndim == 0 if isinstance(index, Tensor) else type(index) is int
            if name is not None and one and w.ndim == 3:
                self.experts[out] = Expert(name, int(index) % len(w), len(w))
        return out

    def _counting(self, x: Tensor) -> Tensor:
        mask = self.mask
        if mask is None or x.ndim < 2:
            return x
        if x.ndim > 2 and x.shape[:2] == mask.shape:
            return x[mask.to(x.device)]
        if x.ndim > 2 and x.shape[:2] == mask.shape[::-1]:  # [length, batch, width], as in nn.MultiheadAttention
            return x[mask.t().to(x.device)]
        return x[mask.flatten().to(x.device)] if x.ndim == 2 and x.shape[0] == mask.numel() else x


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold experts of transformers in one parameter, by name."""
    return {name: module for name, module in model.named_modules() if kind_of(module) in EXPERTS}


@contextmanager
def without_padding(modules: Iterable[nn.Module], mask: Tensor | None) -> Iterator[None]:
    """Inside, modules of experts compute only the tokens that count, and return zeros for the others.

    modules     of :func:`expert_modules`; their arguments and their result have one row for each token of a batch
    mask        bool [batch, length]: tokens that count; None: all
    """
    if mask is None or bool(mask.all()):
        yield
        return
    keep = mask.flatten()

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        calls.append(bool(tensors) and all(t.ndim and len(t) == len(keep) for t in tensors))
        if not calls[-1]:
            return None

        def part(value: Any) -> Any:
            return value[keep.to(value.device)] if isinstance(value, Tensor) else value

        return tuple(map(part, args)), {name: part(value) for name, value in kwargs.items()}

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        if not calls.pop():
            return None
        whole = output.new_zeros((len(keep), *output.shape[1:]))
        whole[keep.to(output.device)] = output
        return whole

    calls: list[bool] = []
    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(after))
        yield


def _tokens(x: Tensor) -> Tensor:
    return x.detach().reshape(1, -1, x.shape[-1]).float()


def _argument(args: Any, kwargs: Any, position: int, *names: str) -> Any:
    if len(args) > position:
        return args[position]
    return next((kwargs[name] for name in names if name in kwargs), None)


def read_linear(args: Any, kwargs: Any) -> Any:
    return _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "weight"), _tokens


def _addmm(args: Any, kwargs: Any) -> Any:
    return _argument(args, kwargs, 1, "mat1"), _argument(args, kwargs, 2, "mat2"), _tokens


def _product(args: Any, kwargs: Any) -> Any:
    """x @ w, also for w a transposed view; with three axes one matrix per entry of the first."""
    x, w = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "other", "mat2")
    if isinstance(w, Tensor) and w.ndim == 3 and isinstance(x, Tensor) and x.ndim == 3:
        return x, w, lambda x: x.detach().float()
    return x, w, _tokens


def _convolution(rank: int) -> Callable[[Any, Any], Any]:
    def read(args: Any, kwargs: Any) -> Any:
        x, w = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "weight")
        stride, padding, dilation = (
            _argument(args, kwargs, i, name) for i, name in ((3, "stride"), (4, "padding"), (5, "dilation"))
        )
        groups = _argument(args, kwargs, 6, "groups") or 1
        if not isinstance(w, Tensor):
            return None
        return x, w, lambda x: _patches(x, w.shape[2:], stride, padding, dilation, groups, rank)

    return read


def _patches(x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, groups: int, rank: int) -> Tensor:
    """Inputs of a convolution as linear-layer inputs: [groups, positions, channels per group * kernel]."""
    steps, spread = _tuple(stride, rank, 1), _tuple(dilation, rank, 1)
    reach = [d * (k - 1) for k, d in zip(kernel, spread, strict=True)]
    if padding == "same":
        sides = [(r // 2, r - r // 2) for r in reach]
    else:
        sides = [(p, p) for p in _tuple(0 if padding == "valid" else padding, rank, 0)]
    x = x.detach().float()
    if x.ndim == rank + 1:
        x = x.unsqueeze(0)
    x = F.pad(x, [side for pair in reversed(sides) for side in pair])
    for axis in range(rank):
        x = x.unfold(axis + 2, reach[axis] + 1, steps[axis])[..., :: spread[axis]]
    x = x.unflatten(1, (groups, -1))  # [batch, groups, channels, *positions, *kernel]
    order = (1, 0, *range(3, 3 + rank), 2, *range(3 + rank, 3 + 2 * rank))
    return x.permute(order).reshape(groups, -1, x.shape[2] * math.prod(kernel))


def _positions(args: Any, kwargs: Any) -> Any:
    """A transposed convolution multiplies each position [channels] of its input by the whole kernel."""
    x, w = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "weight")
    if not isinstance(w, Tensor):
        return None
    return x, w, lambda x: _tokens(x.movedim(1 - w.ndim, -1))


def _tuple(value: Any, rank: int, default: int) -> tuple[int, ...]:
    if value is None:
        value = default
    value = (value,) if isinstance(value, int) else tuple(value)
    return value * rank if len(value) == 1 else value


READERS: dict[Any, Callable[[Any, Any], Any]] = {
    F.linear: read_linear,
    torch.addmm: _addmm,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm), _product),
    **dict.fromkeys((torch.bmm, Tensor.bmm), _product),
    torch.conv1d: _convolution(1),
    torch.conv2d: _convolution(2),
    torch.conv3d: _convolution(3),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), _positions),
}

# Functions that read rows of a weight, not products with it: (args, kwargs) -> the weight
LOOKUPS: dict[Any, Callable[[Any, Any], Any]] = {
    **dict.fromkeys((F.embedding, F.embedding_bag), lambda args, kwargs: _argument(args, kwargs, 1, "weight")),
    torch.embedding: lambda args, kwargs: _argument(args, kwargs, 0, "weight"),
    **dict.fromkeys(
        (torch.index_select, Tensor.index_select), lambda args, kwargs: _argument(args, kwargs, 0, "input")
    ),
}


def _inner(function: Any) -> Any:
    """A function of torch.nn.functional without its own __torch_function__ check, so that its inner calls dispatch."""
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    again = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    again.__kwdefaults__ = function.__kwdefaults__
    return again


COMPOSITE = {F.multi_head_attention_forward: _inner(F.multi_head_attention_forward), **recurrent.PRODUCTS}

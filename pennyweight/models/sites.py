"""Sites: which parameter of a module is quantized, for which op, and along which axis it is contracted.

A new module type is three lines: ``@site(MyModule)`` over nothing but a SiteKind, see below.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .granularity import Granularity, PerBlock, PerGroup, PerTensor


@dataclass(frozen=True)
class SiteKind:
    """What a module type offers.

    params      names of its quantizable parameters
    op          op of the kernel table that consumes them
    transposed  the parameter is [in, out]; it is stored [out, in] so that the contracted axis is last
    default     whether ``quantize_`` takes it without being asked by name or filter
    """

    params: tuple[str, ...]
    op: str
    transposed: bool = False
    default: bool = True


_KINDS: dict[type | str, SiteKind] = {}


def site(module_type: type | str, kind: SiteKind) -> SiteKind:
    """Register a module type (or its qualified name, where importing it is not wanted) as a site."""
    _KINDS[module_type] = kind
    return kind


def kinds() -> dict[type | str, SiteKind]:
    """Registered module types."""
    return dict(_KINDS)


def kind_of(module: nn.Module) -> SiteKind | None:
    """The kind of a module, by its type or the nearest base type that is registered."""
    for cls in type(module).__mro__:
        found = _KINDS.get(cls) or _KINDS.get(f"{cls.__module__}.{cls.__qualname__}")
        if found is not None:
            return found
    return None


site(nn.Linear, SiteKind(("weight",), "linear"))
site(nn.MultiheadAttention, SiteKind(("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"), "linear"))
site("transformers.pytorch_utils.Conv1D", SiteKind(("weight",), "linear", transposed=True))
site(nn.Embedding, SiteKind(("weight",), "embedding", default=False))
for _conv in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    site(_conv, SiteKind(("weight",), "convolution", default=False))


@dataclass(frozen=True)
class Site:
    """One parameter of one module.

    name    parameter FQN; module: its module's FQN
    shape   stored shape: contracted axis last (for convolutions [O, I/groups, *kernel])
    """

    name: str
    module: str
    param: str
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    type_name: str
    transposed: bool = False
    default: bool = True

    def block(self, granularity: Granularity, on_indivisible: str = "pad") -> tuple[int, ...] | None:
        """The block of a weight at this site. Raises ValueError where a group does not fit and the policy says error.

        on_indivisible, for a group size that does not divide the contracted axis: "pad" to whole groups (exact),
        the "largest_divisor" not above the group size, or "error".
        """
        if isinstance(granularity, PerTensor):
            return None
        if isinstance(granularity, PerBlock):
            return granularity.block_size
        if not isinstance(granularity, PerGroup):  # per output channel
            return (-1,) * (len(self.shape) - 1) if self.op == "convolution" else (-1,)
        group = granularity.group_size
        if self.op == "convolution":  # whole kernels of as many input channels as fill a group
            taps = 1
            for n in self.shape[2:]:
                taps *= n
            channels = largest_divisor(self.shape[1], max(1, group // taps))
            return (channels, *((-1,) * (len(self.shape) - 2)))
        k = self.shape[-1]
        if group < k and k % group and on_indivisible != "pad":
            if on_indivisible == "largest_divisor":
                group = largest_divisor(k, group)
            else:
                raise ValueError(
                    f"{self.name}: group size {granularity.group_size} does not divide its {k} inputs; use "
                    f"group_size={largest_divisor(k, group)}, or on_indivisible='pad', 'largest_divisor' or 'skip'"
                )
        return (group,)

    def activation_block(self, granularity: Granularity) -> tuple[int, ...] | None:
        """The block of this site's input: per token, or for a convolution per sample."""
        if isinstance(granularity, PerTensor):
            return None
        if isinstance(granularity, (PerGroup, PerBlock)):
            return (granularity.group_size,) if isinstance(granularity, PerGroup) else granularity.block_size
        return (-1,) * (len(self.shape) - 1) if self.op == "convolution" else (-1,)


def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of n that is at most ``limit``."""
    return next(d for d in range(min(n, limit), 0, -1) if n % d == 0)


def parameters(model: nn.Module) -> Iterator[tuple[str, str, nn.Module, str, Any]]:
    """(parameter FQN, module FQN, module, name, tensor) of every parameter, and of plain tensors where a site's
    parameter was replaced by one (PEFT leaves weights so). Shared modules appear under their first name."""
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        names = [n for n, p in module._parameters.items() if p is not None]
        kind = kind_of(module)
        if kind is not None:
            names += [n for n in kind.params if n not in names and isinstance(module.__dict__.get(n), Tensor)]
        for name in names:
            yield prefix + name, module_name, module, name, getattr(module, name)


def make_site(
    name: str, module_name: str, module: nn.Module, param: str, tensor: Tensor, *, named: bool = False
) -> Site | str:
    """The site of a parameter, or the reason why it is none. ``named``: asked for by its own name."""
    kind = kind_of(module)
    op, transposed, default = None, False, False
    if kind is not None and param in kind.params:
        op, transposed, default = kind.op, kind.transposed, kind.default
    elif named and tensor.ndim in (2, 3):
        op = "linear" if tensor.ndim == 2 else "bmm"
    elif named:
        return f"a bare parameter must be 2-d or 3-d to be quantized, {name} is {tensor.ndim}-d"
    if op is None:
        if kind is not None:
            return f"{param} of {type(module).__name__} stays as it is"
        return f"no site for {type(module).__name__}" if tensor.ndim > 1 else "vector"
    if not tensor.is_floating_point():
        return f"dtype {tensor.dtype} is not floating point"
    shape = tuple(tensor.shape)
    return Site(
        name, module_name, param, op, shape[::-1] if transposed else shape, tensor.dtype, tensor.device.type,
        type(module).__name__, transposed, default,
    )  # fmt: skip


def is_linear(module: nn.Module, fqn: str = "") -> bool:
    """The default filter: modules whose weight multiplies its input (Linear, HF Conv1D, attention's in_proj)."""
    kind = kind_of(module)
    return kind is not None and kind.default

"""For inference, quantized convolutions run as chains: int8 codes from layer to layer, one native call for each chain.

Part of :func:`~pennyweight.fuse_`. As with transformer blocks only the class of the net changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree

from ..core.tensor import AffineQuantizedTensor
from ..core.tracing import in_memory
from ..kernels.native.conv_chain import NativeChain, compile_chain
from ..planning.quantize_report import Row
from ..support.errors import Refusal
from .block_arguments import is_observed
from .detect_changes import Watch, module_classes, own_class, refusal
from .examples import Random
from .fused_module import FusedModule, Kind, fuse_class_
from .plan_conv_chains import Net, Segment, plan, quantized
from .trace_net import trace
from .verify_block import compare

# Limit of mean |difference| / mean |output|. Codes and sums are equal to the last bit; the mean of global average
# pooling and activations like SiLU round differently, which moves codes of later inputs by one. Measured: 2e-4 at most.
TOLERANCE = 1e-2
SIDES = (224, 64, 32, 299, 96, 28)  # of images to try, if no example is given


@dataclass(frozen=True)
class NetDescription:
    """What a fused net was made from: its name, the classes of its modules, and the sizes [C, H, W] of its inputs."""

    name: str
    modules: tuple[tuple[str, str], ...]
    sizes: tuple[tuple[int, ...], ...]


class BoundNet:
    """The chains and other nodes of one net, with its tensors. Raises Refusal if native code cannot run them.

    inputs: an example, tensors [N, C, H, W].
    """

    def __init__(self, root: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.module = weakref.ref(root)
        with torch.no_grad():
            self.net: Net = plan(root, trace(root), inputs)
        if not self.net.taken:
            reasons = dict.fromkeys(self.net.left.values())
            raise Refusal("; ".join(reasons) or "no convolution is quantized")
        self.count = len(inputs)
        slots: dict[fx.Node, int] = {n: i for i, n in enumerate(self.net.placeholders)}
        self.items: list[Any] = []  # (chain, inputs, outputs) or (node, module or None, output)
        for item in self.net.items:
            if isinstance(item, Segment):
                assert item.chain is not None
                chain = compile_chain(item.chain)
                if isinstance(chain, str):
                    raise Refusal(chain)
                read = [slots[n] for n in item.inputs]
                made = [slots.setdefault(n, len(slots)) for n in item.outputs]
                self.items.append((chain, read, made))
            else:
                module = root.get_submodule(str(item.target)) if item.op == "call_module" else None
                self.items.append((item, module, slots.setdefault(item, len(slots))))
        self.slots = slots
        self.parameters: list[Any] = list(root.parameters())
        self.watch = Watch(root, trains)
        parameters = [p for module in root.modules() for p in module._parameters.values()]
        self.tensors = [t for p in parameters for t in _parts(p) if type(t) in _PLAIN and not t.is_inference()]
        self.numbers: list[Any] = [p for p in parameters if type(p) in _PLAIN]
        self.versions, self.memory = list(map(_VERSION, self.tensors)), self._memory()

    def about(self) -> str:
        """The number of convolutions and chains."""
        chains = sum(isinstance(item, Segment) for item in self.net.items)
        return f"{len(self.net.taken)} convolutions in {chains} chain{'s' * (chains > 1)}"

    def unchanged(self, root: nn.Module) -> bool:
        """Whether the net still consists of the same modules, parameters, values, attributes and modes."""
        return (
            self.module() is root and self.watch.unchanged()
            and list(map(_VERSION, self.tensors)) == self.versions and self._memory() == self.memory
        )  # fmt: skip

    def _memory(self) -> list[Any]:
        """Where biases and parameters of norms are: an assignment to .data replaces the memory, not the parameter."""
        return [*map(Tensor.data_ptr, self.numbers), *map(Tensor.stride, self.numbers), *map(_KIND, self.numbers)]

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output for a call of the net's forward, or the reason (str) why it is not fused."""
        try:
            return self._run(args, kwargs)
        except ValueError as error:  # sizes that do not fit: the net's own forward has the message
            return str(error)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reason = unfit(args, kwargs, self.count)
        if reason:
            return reason
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*args, *self.parameters) if t is not None):
            return "gradients are enabled; call the model under torch.inference_mode() or torch.no_grad()"
        if torch.is_autocast_enabled("cpu"):
            return "autocast is on"
        if self.watch.hooked():
            return "a module in the net has a forward hook"
        values: list[Any] = [*args, *[None] * (len(self.slots) - len(args))]
        for what, read, made in self.items:
            if type(what) is NativeChain:
                given = [values[i] for i in read]
                outputs = what.run(given)
                if outputs is None:
                    return "native code cannot read an input of a chain"
                plain = given[0].is_contiguous()
                for i, y in zip(made, outputs, strict=True):
                    values[i] = y.contiguous() if plain else y  # the memory format of torch's convolutions
            else:
                values[made] = self._node(what, read, values)
        return fx.node.map_arg(self.net.output, lambda n: values[self.slots[n]])

    def _node(self, node: fx.Node, module: nn.Module | None, values: list[Any]) -> Any:
        args: Any = fx.node.map_arg(node.args, lambda n: values[self.slots[n]])
        kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: values[self.slots[n]])
        target: Any = node.target
        if module is not None:
            return module(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        if node.op == "get_attr":
            value: Any = self.module()
            for part in target.split("."):
                value = getattr(value, part)
            return value
        return target(*args, **kwargs)


_KIND = attrgetter("nbytes", "dtype")
_VERSION = attrgetter("_version")
_QT = AffineQuantizedTensor
_PLAIN = (Tensor, nn.Parameter)


def _parts(p: Any) -> tuple[Any, ...]:
    """The tensors of a parameter that chains read."""
    return (p._codes, p._scale, p._act_scale, p._act_zero_point) if type(p) is _QT else (p,)


def unfit(args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> str:
    """Why these are not arguments of a fused net, or ""."""
    if kwargs or len(args) != count:
        return f"it is called with other arguments than {count} tensor{'s' * (count > 1)}"
    for x in args:
        if type(x) not in _PLAIN or not x.is_cpu or not in_memory(x) or is_observed():
            return "the input is not in the memory of the CPU, or a mode, tracer or transform observes it"
        if x.ndim != 4 or x.dtype is not torch.float32 or 0 in x.shape:
            return "the input is not a float32 tensor [N, C, H, W]"
    return ""


_SAME = (
    nn.Conv2d, nn.Linear, nn.Identity, nn.Flatten, nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.SiLU, nn.Hardswish, nn.GELU,
    nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
)  # fmt: skip


def trains(module: nn.Module) -> bool:
    """Whether a module may compute something else in training mode. `fold` leaves new nn.Identity modules."""
    return own_class(module) not in _SAME


def _refused(root: nn.Module, description: NetDescription, args: Any, kwargs: Any) -> str:
    reason = unfit(args, kwargs, len(description.sizes)) or refusal(root, trains)
    return reason or ("a module in it was replaced" if module_classes(root) != description.modules else "")


def _bind(root: nn.Module, description: NetDescription, args: Any, kwargs: Any) -> BoundNet:
    return BoundNet(root, tuple(t[:1] for t in args))


def _check(fused: Callable[..., Any], root: Any, args: Any, kwargs: Any) -> Any:
    """fused(root, its class, args, kwargs), compared with the net's own forward."""
    cls = type(root)
    y = fused(root, cls, args, kwargs)
    if type(y) is not str:
        want = cls.thawed.forward(root, *args, **kwargs)
        compare(f"{cls.description.name}: the output", difference(y, want), TOLERANCE, "net")
    return y


def _weights(net: FusedConvNet) -> list[str]:
    bound = type(net).bound
    return [] if bound is None else [f"{path}.weight" for path in bound.net.taken]


def _about(net: FusedConvNet) -> str:
    bound = type(net).bound
    return "chains of convolutions" if bound is None else bound.about()


class FusedConvNet(FusedModule):
    """A net whose quantized convolutions run as native chains. Made by :func:`fuse_`, as a subclass of the net's class.

    Calls that native code cannot take run the net's own forward, and are counted in ``pennyweight.fallbacks()`` with
    the reason: training, gradients, autocast, tracing, hooks on inner modules, another dtype, other arguments.
    """

    fused_kind = Kind("net", "chains", _refused, _bind, _check, _weights, _about)
    description: NetDescription


# -- fuse_ -------------------------------------------------------------------------------------------------------------


def fuse_nets(model: nn.Module, example: Any) -> list[Row]:
    """Fuse a convolution net, or the largest modules in it that torch.fx can trace. A row for each, fused or with the
    reason why it is not. Expects the model in eval mode, without gradients."""
    if not quantized(model):
        return []
    rows: list[Row] = []
    _fuse_within("", model, _inputs(model, example), rows)
    return rows


def chained_convolutions(model: nn.Module) -> Iterator[Any]:
    """The convolutions in chains of fused nets."""
    for net in model.modules():
        if isinstance(net, FusedConvNet) and net.bound is not None:
            for path in net.bound.net.taken:
                yield net.get_submodule(path)


def _fuse_within(name: str, module: nn.Module, inputs: Any, rows: list[Row]) -> None:
    kind = own_class(module)
    if isinstance(module, FusedConvNet):
        rows.append(Row(name, kind.__name__, (), "net", "chains", 0, 0, note="already fused"))
        return
    reason, error = "", None
    for args in inputs:
        try:
            note = _fuse_net(name, module, args)
        except Refusal as refusal:
            error = error or str(refusal)
            continue
        rows.append(Row(name, kind.__name__, (), "net", "chains", 0, 0, note=note))
        return
    reason = error or "no example input could be made for it; pass example="
    seen = _calls_of_children(module, next(iter(inputs), None)) if isinstance(inputs, list) else {}
    for key, args in seen.items():
        _fuse_within(f"{name}.{key}" if name else key, module.get_submodule(key), [args], rows)
    if not any(row.scheme for row in rows if row.name.startswith(name)):
        rows.append(Row(name, kind.__name__, (), "", "", 0, 0, note=reason))


def _fuse_net(name: str, module: nn.Module, args: tuple[Any, ...]) -> str:
    """Fuse a net. Returns what the user should know; raises Refusal if it is left alone."""
    reason = unfit(args, {}, len(args))
    if reason:
        raise Refusal(reason)
    bound = BoundNet(module, args)
    verify(module, bound, args)
    description = NetDescription(name or "the model", module_classes(module), tuple(tuple(t.shape[1:]) for t in args))
    fuse_class_(module, FusedConvNet, description, bound)
    return "; ".join([bound.about(), *(f"{path}: {why}" for path, why in bound.net.left.items())])


def verify(module: nn.Module, bound: BoundNet, example: tuple[Tensor, ...]) -> None:
    """Compare with the module's own forward, on the example and on random inputs in both memory formats. Raises
    Refusal if they differ."""
    random = Random(2)
    forms = (torch.contiguous_format, torch.channels_last)
    cases = [("the example", example)]
    for batch, form in zip((1, 3), forms, strict=True):
        made = tuple(random.normal((batch, *t.shape[1:])).contiguous(memory_format=form) for t in example)
        cases.append((f"batch {batch}", made))
    with torch.no_grad():
        for case, args in cases:
            y = bound.run(args, {})
            if isinstance(y, str):
                raise Refusal(f"{case}: {y}")
            found = difference(y, type(module).forward(module, *args))
            if not found <= TOLERANCE:  # also NaN
                raise Refusal(f"{case}: its output differs by {found:.1e}, the limit is {TOLERANCE:.0e}")


def difference(y: Any, want: Any) -> float:
    """The largest mean |y - want| / mean |want| of the tensors in two outputs; infinite if shapes differ."""
    found, expected = _pytree.tree_leaves(y), _pytree.tree_leaves(want)
    if len(found) != len(expected):
        return float("inf")
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if not isinstance(b, Tensor):
            worst = worst if a == b else float("inf")
        elif not isinstance(a, Tensor) or a.shape != b.shape or a.dtype is not b.dtype:
            return float("inf")
        elif b.numel() and not torch.equal(a, b):
            both = ~(a.isnan() & b.isnan())  # NaN where the other is NaN, too
            error = (a - b)[both].abs().float().mean() / b[both].abs().float().mean().clamp_min(1e-30)
            worst = max(worst, float(error.nan_to_num(float("inf")))) if bool(both.any()) else worst
    return worst


def _inputs(model: nn.Module, example: Any) -> Any:
    """Inputs to try: the example, or random images for the first convolution."""
    if example is not None:
        if isinstance(example, Tensor):
            return [(example,)]
        return [tuple(example)] if isinstance(example, (tuple, list)) else []
    first = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
    return _images(first.in_channels)


def _images(channels: int) -> Iterator[tuple[Tensor]]:
    random = Random(0)
    for side in SIDES:
        yield (random.normal((2, channels, side, side)),)


def _calls_of_children(module: nn.Module, args: Any) -> dict[str, tuple[Any, ...]]:
    """The arguments of the first call of each child with quantized convolutions, in one run of the module."""
    seen: dict[str, tuple[Any, ...]] = {}
    hooks = []

    def hook_for(key: str) -> Any:
        def hook(child: nn.Module, given: Any, more: Any) -> None:
            if key not in seen and not more:
                seen[key] = given

        return hook

    for key, child in module.named_children():
        within = child.named_children() if isinstance(child, nn.ModuleList) else [("", child)]
        for part, one in within:
            path = f"{key}.{part}" if part else key
            if quantized(one) > 1:
                hooks.append(one.register_forward_pre_hook(hook_for(path), with_kwargs=True))
    try:
        if hooks and args is not None:
            module(*args)
    except Exception:  # the example does not fit: nothing was seen, and the user is told
        seen.clear()
    finally:
        for hook in hooks:
            hook.remove()
    return seen

"""freeze_(model): for inference, quantized linear layers without the tensor class on the way.

A frozen layer holds the parts of its weight as plain buffers and calls the selected kernel itself. It is the same
module object under another class, so hooks, names and ties stay, and :func:`thaw_` undoes it exactly. Its state dict is
that of the layer before, with one quantized ``weight``: a checkpoint does not know whether a model was frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core.spec import DTYPES
from ..core.tensor import SLOTS, AffineQuantizedTensor
from ..kernels.activation import autocast_dtype
from ..kernels.linear import PLAIN, Bound, bind, graph_key, linear
from ..kernels.table import case_of, select
from .report import Report, Row
from .siblings import Siblings, families
from .sites import Place, places

_ASKED = ("spec", "act", "axes", "readonly", "shape", "stored_shape", "dtype", "device", "ndim", "parts")


class PlainWeight:
    """All that a kernel asks of a weight, without being a tensor. What it does not hold, ``tensor`` is asked for.

    tensor  the quantized parameter itself
    flat    its plain tensors, nested ones too, under the names of the buffers that hold them
    """

    __slots__ = (*_ASKED, "_bound", "flat", "tensor")

    def __init__(self, w: AffineQuantizedTensor) -> None:
        for name in _ASKED:
            setattr(self, name, getattr(w, name))
        self._bound: dict[torch.dtype, Bound] = {}
        self.flat = tuple(_flat(w, "weight"))
        self.tensor = w

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "tensor"), name)


def _flat(w: AffineQuantizedTensor, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for slot, part in zip(SLOTS, w.parts, strict=True):
        name = f"{prefix}_{slot}"
        if isinstance(part, AffineQuantizedTensor):
            yield from _flat(part, name)
        elif part is not None:
            yield name, part


def _refilled(w: AffineQuantizedTensor, tensors: Iterator[Tensor]) -> AffineQuantizedTensor:
    """w with other plain tensors, in the order of ``flat``."""
    parts = {slot: part for slot, part in zip(SLOTS, w.parts, strict=True) if part is not None}
    return w.with_(
        **{
            slot: _refilled(part, tensors) if isinstance(part, AffineQuantizedTensor) else next(tensors)
            for slot, part in parts.items()
        }
    )


class FrozenLinear(nn.Linear):
    """A linear layer with the parts of its quantized weight as plain buffers: weight_codes, weight_scale, ...

    Made by :func:`freeze_`. Values are those of the layer before, bit for bit. A gradient reaches the input and the
    bias, never the weight. ``weight`` is the quantized parameter, over the same storages; assigning to it is not
    possible. ``.to()``, ``deepcopy``, ``pickle`` and state dicts mean what they mean for the layer before.
    """

    _plain: PlainWeight
    _keys: dict[torch.dtype, str]  # of the op that graphs hold, by dtype of the input
    _thawed: type[nn.Linear]
    _siblings: Siblings | None = None

    def forward(self, input: Tensor) -> Tensor:
        """input [.., K] -> [.., N], in input's dtype."""
        if torch.compiler.is_compiling():  # every line here costs each layer of each step of a model
            return self._traced(input)
        w, buffers, bias = self._plain, self._buffers, self._parameters["bias"]
        for name, part in w.flat:
            if buffers[name] is not part:
                w = self._renewed()
        bound = w._bound.get(input.dtype)
        if (
            bound is None or type(input) is not Tensor or (bias is not None and type(bias) not in PLAIN)
            or input.shape[-1] != bound[0] or torch._C._is_any_autocast_enabled()
        ):  # fmt: skip
            return self._unbound(w, input)
        if torch.is_grad_enabled() and (input.requires_grad or (bias is not None and bias.requires_grad)):
            return linear(input, w.tensor, bias)
        if self._siblings is not None and (y := self._siblings.take(self, w, bias, input)) is not None:
            return y
        return bound[1](input, bound[2] or w, bias)

    def _unbound(self, w: PlainWeight, x: Tensor) -> Tensor:
        """The first call with a dtype, and whatever is not plain eager mode."""
        y = linear(x, w.tensor, self.bias)
        if x.dtype in DTYPES.values():
            w._bound[x.dtype] = w.tensor._bound.get(x.dtype) or bind(w.tensor, x.dtype)
        return y

    def _traced(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise ValueError(f"linear: input {tuple(x.shape)} must have {self.in_features} as its last size")
        bias: Tensor | None = self.bias
        if (dtype := autocast_dtype(x)) is not None:
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        parts = [self._buffers[name] for name in self._names]
        return torch.ops.pennyweight.linear.default(x, parts, bias, self._keys[x.dtype])

    @property
    def weight(self) -> AffineQuantizedTensor:  # type: ignore[override]
        """The quantized parameter, over the storages of the buffers."""
        return self._renewed().tensor

    def extra_repr(self) -> str:
        w = self._plain
        act = "" if w.act is None else f", activation {w.act}"
        return f"{super().extra_repr()}, weight={w.spec}{act}"

    # -- buffers and the weight --------------------------------------------------------------------------------------

    def _hold(self, w: AffineQuantizedTensor) -> None:
        """Have this weight."""
        self._plain = PlainWeight(w)
        self._names = tuple(name for name, _ in self._plain.flat)
        self._keys = {dtype: graph_key(w, dtype) for dtype in DTYPES.values()}
        self._buffers.update(self._plain.flat)
        self._non_persistent_buffers_set.update(self._names)

    def _renewed(self) -> PlainWeight:
        """What kernels see, made anew where other tensors were put into the buffers (functional_call does that)."""
        held = [self._buffers[name] for name in self._names]
        if any(a is not part for a, (_, part) in zip(held, self._plain.flat, strict=True)):
            w = _refilled(self._plain.tensor, iter(held))  # type: ignore[arg-type]
            self._plain = PlainWeight(nn.Parameter(w, requires_grad=False))  # type: ignore[arg-type]
        return self._plain

    def _state(self) -> dict[str, Any]:
        """``__dict__`` of the layer before."""
        mine = ("_plain", "_keys", "_names", "_thawed", "_siblings")
        state = {k: v for k, v in self.__dict__.items() if k not in mine}
        state["_parameters"] = {"weight": self.weight, **self._parameters}
        state["_buffers"] = {k: v for k, v in self._buffers.items() if k not in self._names}
        state["_non_persistent_buffers_set"] = self._non_persistent_buffers_set.difference(self._names)
        return state

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """.to(), .half(), .cuda() and their kin act on the quantized weight, which knows that scales are no weights."""
        return _while_thawed(self, lambda layer: layer._apply(fn, recurse))

    def _load_from_state_dict(self, *args: Any) -> None:
        """``weight`` of the state dict, as into the layer before. What is assigned and not quantized thaws it."""
        _while_thawed(self, lambda layer: layer._load_from_state_dict(*args))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight if keep_vars else self.weight.detach()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def __getstate__(self) -> dict[str, Any]:  # a packed buffer would mean something else on another machine
        return {**self._state(), "_thawed": self._thawed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._hold(self._parameters.pop("weight"))  # type: ignore[arg-type]


def _freeze(layer: Any) -> None:
    w, kind = layer._parameters.pop("weight"), type(layer)
    layer.__class__ = FrozenLinear
    layer._thawed = kind
    layer._hold(w)


def _thaw(layer: Any) -> None:
    if layer._siblings is not None:
        layer._siblings.part()
    state, kind = layer._state(), layer._thawed
    layer.__dict__.clear()
    layer.__dict__.update(state)
    layer.__class__ = kind


def _while_thawed(layer: Any, act: Callable[[nn.Linear], Any]) -> Any:
    siblings = layer._siblings
    _thaw(layer)
    try:
        return act(layer)
    finally:
        if isinstance(layer._parameters["weight"], AffineQuantizedTensor):
            _freeze(layer)
            if siblings is not None:
                siblings.join()


def freeze_(model: nn.Module) -> Report:
    """Turn each linear layer with a quantized weight into a :class:`FrozenLinear`, in place; say what was done.

    The report has a row for each quantized parameter, with the kernel, or with the reason why it was left alone: only
    ``nn.Linear``'s own forward can be replaced, and a weight that is being trained is none to freeze. Values do not
    change, nothing is copied, ties are kept. What is not quantized stays as it is.
    """
    rows = []
    for where in list(places(model)):
        w = where[0].get()
        if not isinstance(w, AffineQuantizedTensor):
            continue
        reasons = {place.name: _refusal(place, w) for place in where}
        for place in where:
            if reasons[place.name] == "" and not isinstance(place.module, FrozenLinear):
                _freeze(place.module)
        name, kind, size = where[0].name, type(where[0].module).__name__, int(w.nbytes)
        stays = dict.fromkeys(r for r in reasons.values() if r)
        notes = [f"tied: {', '.join(p.name for p in where[1:])}"] if len(where) > 1 else []
        frozen = "" in reasons.values()
        kernel = select("linear", case_of(w)).name if frozen else ""
        rows.append(
            Row(name, kind, tuple(w.shape), _scheme(w) if frozen else "", kernel, size, size,
                note="; ".join([*stays, *notes]))
        )  # fmt: skip
    for layers in families(model):
        if (
            all(isinstance(layer, FrozenLinear) for layer in layers)
            and len({layer.in_features for layer in layers}) == 1
        ):
            Siblings(layers).join()
    return Report("freeze_", rows, verb="frozen")


def _refusal(place: Place, w: AffineQuantizedTensor) -> str:
    """Why a layer cannot be frozen, or ""."""
    module, kind = place.module, type(place.module).__name__
    if type(module).forward is not nn.Linear.forward or "forward" in module.__dict__ or place.param != "weight":
        return f"{kind} at {place.name} does more than F.linear, so its weight stays a tensor"
    if not {"weight", "bias"} <= module._parameters.keys():
        return f"{place.name} or its bias is no parameter of its layer"
    if w.requires_grad:
        return "is being trained; requires_grad_(False) first"
    return "" if w.axes is None and w.ndim == 2 else "is stored transposed"


def _scheme(w: AffineQuantizedTensor) -> str:
    return str(w.spec.with_(layout="plain")) + ("" if w.act is None else f" × {w.act}")


def thaw_(model: nn.Module) -> Report:
    """Undo :func:`freeze_`: each frozen layer is again what it was, with the same parameter. Says what was done."""
    rows = []
    for name, module in list(model.named_modules()):
        if isinstance(module, FrozenLinear):
            _thaw(module)
            w: Any = module.weight
            kernel, size = select("linear", case_of(w)).name, int(w.nbytes)
            own = f"{name}.weight" if name else "weight"
            rows.append(Row(own, type(module).__name__, tuple(w.shape), _scheme(w), kernel, size, size))
    return Report("thaw_", rows, verb="thawed")

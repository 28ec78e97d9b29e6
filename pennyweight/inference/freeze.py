"""freeze_(model): for inference, quantized linear layers call their kernels without tensor-subclass dispatch.

A frozen layer calls the kernel table directly; ``nn.Linear`` calls ``F.linear``, which reaches the table through
``__torch_function__``. Only the class of the module changes, in one assignment. Parameters, buffers, hooks, ties and
the state dict stay the same objects, so other libraries see no difference, :func:`thaw_` undoes it exactly, and threads
inside the layer finish their calls correctly.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.describe_spec import describe, describe_activation, shorten
from ..core.model_arguments import check_arguments
from ..core.tensor import AffineQuantizedTensor
from ..kernels.linear import linear
from ..kernels.table import case_of, select
from ..planning.module_handlers import thaw_classes_
from ..planning.parameters import Place, places
from ..planning.quantize_report import Report, Row


class FrozenLinear(nn.Linear):
    """A linear layer that calls the kernel of its quantized weight directly.

    Made by :func:`freeze_`. Outputs are bit-identical to those of the original layer. ``weight`` is the same parameter,
    and may be replaced as in any module. Anything other than a plain tensor times a quantized weight runs as in
    ``nn.Linear``.
    """

    thawed: type[nn.Linear] = nn.Linear  # the original class
    plan_error = ("is frozen", "call thaw_(model) first")  # state and remedy, for plan(), which is below this module

    def forward(self, input: Tensor) -> Tensor:
        """input [.., K] -> [.., N], in input's dtype."""
        parameters = self._parameters  # an attribute lookup by nn.Module costs 0.3 µs
        w: Any = parameters.get("weight")
        if type(w) is not AffineQuantizedTensor or "bias" not in parameters or torch.compiler.is_compiling():
            return F.linear(input, self.weight, self.bias)
        if type(input) is not Tensor or torch._C._len_torch_function_stack():  # a TorchFunctionMode sees the call
            return F.linear(input, w, parameters["bias"])
        with torch._C.DisableTorchFunctionSubclass():  # as F.linear's handler does
            return linear(input, w, parameters["bias"], eager=True)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As the original layer. A layer that gets an unquantized weight (by ``assign=True``) is thawed."""
        super()._load_from_state_dict(*args, **kwargs)
        if not isinstance(self._parameters.get("weight"), AffineQuantizedTensor):
            self.__class__ = type(self).thawed  # type: ignore[assignment]

    def __prepare_scriptable__(self) -> nn.Module:
        """What torch.jit.script compiles: the original layer, with the same parameters and hooks."""
        plain = type(self).thawed.__new__(type(self).thawed)
        plain.__dict__.update(self.__dict__)
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, *state = reduced
        return (_blank, (type(self).thawed,), *state)


_FROZEN: dict[type, type[FrozenLinear]] = {nn.Linear: FrozenLinear}


def _frozen(kind: type) -> type[FrozenLinear]:
    """The frozen class of a layer class: a subclass of it, so that its methods and registrations still apply."""
    if kind not in _FROZEN:
        made = type(f"Frozen{kind.__name__}", (FrozenLinear, kind), {"thawed": kind, "__module__": __name__})
        _FROZEN.setdefault(kind, made)
    return _FROZEN[kind]


def _blank(kind: type[nn.Linear]) -> FrozenLinear:
    """Unpickle: a frozen layer without its state."""
    cls = _frozen(kind)
    return cls.__new__(cls)


@check_arguments()
def freeze_(model: nn.Module) -> Report:
    """Convert each linear layer with a quantized weight to a :class:`FrozenLinear`, in place. Returns a report.

    The report has a row for each quantized parameter, with the kernel, or with the reason why it was left alone: only
    ``nn.Linear``'s own forward can be replaced, and weights that require grad are not frozen. Outputs do not change,
    nothing is copied, ties are kept. Unquantized layers are left alone. May be called while other threads run the
    model.

    >>> import torch, pennyweight as pw
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 8)).requires_grad_(False)
    >>> report = pw.quantize_(model, "int8")
    >>> report = pw.inference.freeze_(model)
    >>> isinstance(model[0], pw.inference.FrozenLinear)
    True
    """
    rows = []
    for where in list(places(model)):
        w = where[0].get()
        if not isinstance(w, AffineQuantizedTensor):
            continue
        reasons = {place.name: _refusal(place, w) for place in where}
        again = any(isinstance(place.module, FrozenLinear) for place in where)
        for place in where:
            if reasons[place.name] == "" and not isinstance(place.module, FrozenLinear):
                place.module.__class__ = _frozen(type(place.module))
        name, kind, size = where[0].name, type(where[0].module).__name__, int(w.nbytes)
        stays = dict.fromkeys(r for r in reasons.values() if r)
        done = [one for one, reason in reasons.items() if not reason]
        if stays and done:  # a table shared by an embedding and a layer
            stays = {f"frozen at {', '.join(done)} only": None}
        notes = ["already frozen"] if again else []
        notes += [f"tied: {', '.join(p.name for p in where[1:])}"] if len(where) > 1 else []
        frozen = "" in reasons.values()
        kernel = select("linear", case_of(w)).name if frozen else ""
        note = "; ".join([*stays, *notes])
        row = Row(name, kind, tuple(w.shape), "", kernel, size, size, note=note)
        rows.append(with_scheme(row, w) if frozen else row)
    return Report("freeze_", rows, verb="frozen")


def _refusal(place: Place, w: AffineQuantizedTensor) -> str:
    """Why a layer cannot be frozen, or ""."""
    module, kind = place.module, type(place.module).__name__
    plain = type(module).forward in (nn.Linear.forward, FrozenLinear.forward)
    if not plain or "forward" in module.__dict__ or place.param != "weight":
        return f"{kind} at {place.name} does more than F.linear, so it cannot be frozen"
    if not {"weight", "bias"} <= module._parameters.keys():
        return f"{place.name} or its bias is not a registered parameter of its layer"
    if w.requires_grad:
        return "requires grad; call requires_grad_(False) first"
    return "" if w.axes is None and w.ndim == 2 else "is stored transposed"


def with_scheme(row: Row, w: AffineQuantizedTensor) -> Row:
    """The row with the scheme of a weight."""
    row.scheme = str(w.spec.with_(layout="plain")) + ("" if w.act is None else f" × {w.act}")
    row.scheme_text = describe(w.spec, w.ndim) + ("" if w.act is None else f"; {describe_activation(w.act)}")
    row.scheme_short = shorten(w.spec, w.act, w.ndim)
    return row


@check_arguments()
def thaw_(model: nn.Module) -> Report:
    """Undo :func:`freeze_` and :func:`~pennyweight.fuse_`: each frozen layer and fused block gets its original class
    back. Returns a report."""
    rows = []
    for name, module in thaw_classes_(model):
        w: Any = module._parameters.get("weight")
        if w is None or not isinstance(module, nn.Linear):
            rows.append(Row(name, type(module).__name__, (), "", "", 0, 0))
            continue
        own, size = f"{name}.weight" if name else "weight", int(w.nbytes)
        row = Row(own, type(module).__name__, tuple(w.shape), "", "", size, size)
        if isinstance(w, AffineQuantizedTensor):  # it may have been replaced since
            with_scheme(row, w)
            row.kernel = select("linear", case_of(w)).name
        rows.append(row)
    return Report("thaw_", rows, verb="thawed")

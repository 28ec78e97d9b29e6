"""LSTM, GRU and simple recurrent networks with quantized weights: ``torch.lstm``, ``torch.gru``, ``torch.rnn_tanh``,
``torch.rnn_relu`` and their cells.

``nn.LSTM`` and the others call these functions. The products with input weights are one linear product over all time
steps per layer and direction; those with hidden weights (and with the projection of an LSTM) are one per step. Each
runs the kernel of its weight. Gates are computed as torch does:

    LSTM   i, f, g, o = split(W_ih x + b_ih + W_hh h + b_hh)
           c' = sigmoid(f) * c + sigmoid(i) * tanh(g);  h' = W_hr (sigmoid(o) * tanh(c')), without W_hr if not projected
    GRU    r, z, n = split(W_ih x + b_ih);  r', z', n' = split(W_hh h + b_hh)
           u = sigmoid(z + z');  m = tanh(n + sigmoid(r + r') * n');  h' = u * h + (1 - u) * m
    RNN    h' = tanh(W_ih x + b_ih + W_hh h + b_hh), or relu

Weights may be quantized or float, each on its own. So the result is that of the dequantized weights within rounding; a
dynamic or static activation is quantized at the input of each product: x per token, h per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo

from ..core import fallback
from ..core.tensor import FUNCTIONS, AffineQuantizedTensor, implements
from ..support.errors import ArgumentError
from .activation import autocast_dtype
from .linear import linear
from .table import case_of, select

QT = AffineQuantizedTensor
State = tuple[Tensor, ...]  # (h,), or (h, c) of an LSTM
Product = Callable[[Tensor], Tensor]
Step = Callable[[Tensor, State, Product, "Product | None"], State]  # products with the input, state, hidden, projection


class Kind(NamedTuple):
    """A kind of recurrent network.

    gates   its gates: rows of a weight are gates * hidden
    states  tensors of a state
    step    computes the next state
    """

    name: str
    gates: int
    states: int
    step: Step


def _lstm_step(x: Tensor, state: State, hidden: Product, projection: Product | None) -> State:
    h, c = state
    i, f, g, o = (hidden(h) + x).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (h if projection is None else projection(h)), c


def _gru_step(x: Tensor, state: State, hidden: Product, projection: Product | None) -> State:
    (h,) = state
    reset, update, new = x.chunk(3, 1)
    h_reset, h_update, h_new = hidden(h).chunk(3, 1)
    update = (h_update + update).sigmoid()
    new = (new + (h_reset + reset).sigmoid() * h_new).tanh()
    return ((h - new) * update + new,)


def _simple_step(
    activation: Callable[[Tensor], Tensor], x: Tensor, state: State, hidden: Product, projection: Product | None
) -> State:
    return (activation(hidden(state[0]) + x),)


LSTM = Kind("lstm", 4, 2, _lstm_step)
GRU = Kind("gru", 3, 1, _gru_step)
RNN_TANH = Kind("rnn_tanh", 1, 1, partial(_simple_step, torch.tanh))
RNN_RELU = Kind("rnn_relu", 1, 1, partial(_simple_step, torch.relu))

_BATCHED = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")
_PACKED = ("data", "batch_sizes", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
_CELL = ("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh")


def layers(kind: Kind, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """``torch.lstm`` and the like, with weights that may be quantized: (output, h_n) or (output, h_n, c_n).

    Arguments are those of torch, for a batch or for packed sequences:

    input       [steps, batch, width], or [batch, steps, width] with batch_first
    data        [rows of all steps, width], with batch_sizes: int64 [steps], not increasing
    hx          [layers * directions, batch, hidden], for an LSTM (h, c)
    params      for each layer and direction: w_ih, w_hh, then the two biases if it has them, then w_hr if projected

    output has the steps of the input and directions * hidden columns. Raises ArgumentError (a RuntimeError) if sizes,
    dtypes or devices do not fit.
    """
    packed = "data" in kwargs or (len(args) > 3 and isinstance(args[3], (list, tuple)))
    given = {**dict(zip(_PACKED if packed else _BATCHED, args, strict=False)), **kwargs}
    x, sizes = _float(kind, given["data" if packed else "input"]), None
    states = _state(kind, given["hx"])
    directions = 2 if given["bidirectional"] else 1
    if packed:
        sizes = [int(n) for n in given["batch_sizes"]]
    elif given["batch_first"]:
        x = x.transpose(0, 1)
    count = given["num_layers"] * directions
    cells = _cells(kind, given["params"], given["has_biases"], count, states)
    x, *hx = _cast(kind, x, *states, projected=cells[0].w_hr is not None)
    _check(kind, x, sizes, hx, count)
    finals: list[State] = []
    for layer in range(given["num_layers"]):
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            y, final = _run(kind, x, sizes, tuple(h[at] for h in hx), cells[at], reverse=direction == 1)
            outputs.append(y)
            finals.append(final)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if given["dropout"] and given["train"] and layer < given["num_layers"] - 1:
            x = torch.dropout(x, given["dropout"], True)
    if not packed and given["batch_first"]:
        x = x.transpose(0, 1)
    return (x, *(torch.stack(parts) for parts in zip(*finals, strict=True)))


def cell(kind: Kind, *args: Any, **kwargs: Any) -> Any:
    """``torch.lstm_cell`` and the like: one step. input [batch, width] -> h [batch, hidden], for an LSTM (h, c)."""
    given = {"b_ih": None, "b_hh": None, **dict(zip(_CELL, args, strict=False)), **kwargs}
    x, *state = _cast(kind, _float(kind, given["input"]), *_state(kind, given["hx"]), projected=True)
    if any(h.ndim != 2 or h.shape[0] != x.shape[0] for h in state):
        raise ArgumentError(f"{kind.name}_cell: states {[list(h.shape) for h in state]} do not fit {list(x.shape)}")
    gates = _product(given["w_ih"], given["b_ih"])(x)
    out = kind.step(gates, tuple(state), _product(given["w_hh"], given["b_hh"]), None)
    return out if kind.states > 1 else out[0]


def _float(kind: Kind, t: Tensor) -> Tensor:
    """An input, state or bias, which a product takes as float: a quantized one is dequantized, and that is counted."""
    if not isinstance(t, QT):
        return t
    fallback.record(kind.name, t)
    return t.dequantize()


def _state(kind: Kind, hx: Any) -> State:
    return tuple(_float(kind, h) for h in (hx if kind.states > 1 else (hx,)))


def _cast(kind: Kind, *tensors: Tensor, projected: bool) -> tuple[Tensor, ...]:
    """Inputs and states in the dtype of autocast, where torch casts whole networks and not each product: on a GPU, and
    on a CPU an LSTM without projection."""
    dtype = autocast_dtype(tensors[0])
    if dtype is None or (tensors[0].device.type == "cpu" and (kind is not LSTM or projected)):
        return tensors
    return tuple(t.to(dtype) for t in tensors)


class _Cell(NamedTuple):
    """The weights of one layer and direction."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None


def _cells(kind: Kind, params: Sequence[Tensor], biases: bool, count: int, hx: Sequence[Tensor]) -> list[_Cell]:
    projected = kind.states > 1 and hx[0].shape[-1] != hx[1].shape[-1]
    each = (4 if biases else 2) + projected
    if len(params) != each * count:
        raise ArgumentError(f"{kind.name}: {len(params)} parameters, expected {each} for each of {count} layers")
    found = []
    for at in range(0, len(params), each):
        w_ih, w_hh, *rest = params[at : at + each]
        w_hr = rest.pop() if projected else None
        b_ih, b_hh = rest or (None, None)
        found.append(_Cell(w_ih, w_hh, b_ih, b_hh, w_hr))
    return found


def _check(kind: Kind, x: Tensor, sizes: list[int] | None, hx: Sequence[Tensor], count: int) -> None:
    """Raise ArgumentError for an input or state that does not fit; the products check the rest."""
    if x.ndim != (3 if sizes is None else 2):
        raise ArgumentError(f"{kind.name}: an input of {x.ndim} axes; expected 3, or 2 for packed sequences")
    if (x.shape[0] if sizes is None else len(sizes)) == 0:
        raise ArgumentError(f"{kind.name}: expected at least one step, got the input {list(x.shape)}")
    if sizes is not None and (sum(sizes) != x.shape[0] or sizes != sorted(sizes, reverse=True)):
        raise ArgumentError(f"{kind.name}: batch_sizes {sizes} do not fit the packed input {list(x.shape)}")
    batch = x.shape[1] if sizes is None else sizes[0]
    for h in hx:
        if h.ndim != 3 or h.shape[0] != count or h.shape[1] != batch:
            raise ArgumentError(f"{kind.name}: a state of {list(h.shape)}; expected [{count}, {batch}, hidden]")
        if h.device != x.device or (h.dtype != x.dtype and not torch._C._is_any_autocast_enabled()):
            raise ArgumentError(f"{kind.name}: the state is {h.dtype} on {h.device}, the input {x.dtype} on {x.device}")


def _product(w: Tensor, bias: Tensor | None, repeated: bool = False) -> Product:
    """x -> x @ w.T + bias.

    repeated: it is called at each step. Then a weight that has no kernel, or that gradients go through, is dequantized
    once instead of at each step, unless its input is quantized.
    """
    if not isinstance(w, QT):
        return lambda x: F.linear(x, w, bias)
    if repeated and w.act is None and not torch.compiler.is_compiling():
        if select("linear", case_of(w)).rank < 0:
            fallback.count("linear/dequantize")
        elif not torch.is_grad_enabled():
            return lambda x: linear(x, w, bias)
        plain: dict[torch.dtype, Tensor] = {}  # by dtype: under autocast inputs have another one

        def product(x: Tensor) -> Tensor:
            if x.dtype not in plain:
                plain[x.dtype] = w.dequantize(x.dtype)
            return F.linear(x, plain[x.dtype], bias)

        return product
    return lambda x: linear(x, w, bias)


def _run(
    kind: Kind, x: Tensor, sizes: list[int] | None, first: State, weights: _Cell, reverse: bool
) -> tuple[Tensor, State]:
    """One layer in one direction: its outputs, [steps, batch, hidden] or packed, and its final state."""
    gates = _product(weights.w_ih, weights.b_ih)(x)
    if gates.shape[-1] != kind.gates * first[-1].shape[-1]:
        raise ArgumentError(
            f"{kind.name}: a weight of {gates.shape[-1]} rows does not fit a state of {first[-1].shape[-1]} columns; "
            f"expected {kind.gates} times as many"
        )
    steps = gates.unbind(0) if sizes is None else gates.split(sizes)
    hidden = _product(weights.w_hh, weights.b_hh, repeated=True)
    projection = None if weights.w_hr is None else _product(weights.w_hr, None, repeated=True)
    outputs: list[Tensor] = []
    ended: list[State] = []  # states of sequences that ended, the shortest first
    n = steps[-1 if reverse else 0].shape[0]
    state = tuple(s[:n] for s in first) if sizes is not None else first
    for step in reversed(steps) if reverse else steps:
        if step.shape[0] < n:
            ended.append(tuple(s[step.shape[0] :] for s in state))
            state = tuple(s[: step.shape[0]] for s in state)
        elif step.shape[0] > n:  # backwards, sequences begin as they get longer
            begun = tuple(s[n : step.shape[0]] for s in first)
            state = tuple(torch.cat(both) for both in zip(state, begun, strict=True))
        n = step.shape[0]
        state = kind.step(step, state, hidden, projection)
        outputs.append(state[0])
    if ended:
        state = tuple(torch.cat(parts) for parts in zip(state, *reversed(ended), strict=True))
    if reverse:
        outputs.reverse()
    return (torch.stack(outputs) if sizes is None else torch.cat(outputs)), state


FUNCTION = {torch.lstm: LSTM, torch.gru: GRU, torch.rnn_tanh: RNN_TANH, torch.rnn_relu: RNN_RELU}
CELLS = {
    torch.lstm_cell: LSTM, torch.gru_cell: GRU, torch.rnn_tanh_cell: RNN_TANH, torch.rnn_relu_cell: RNN_RELU,
}  # fmt: skip
# What to call instead of each function of torch.
PRODUCTS: dict[Any, Callable[..., Any]] = {
    **{function: partial(layers, kind) for function, kind in FUNCTION.items()},
    **{function: partial(cell, kind) for function, kind in CELLS.items()},
}


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():  # as the handler of F.linear does
        return PRODUCTS[func](*args, **kwargs)


# Dynamo breaks the graph at these networks; otherwise it would then compile this file, step by step.
_call_outside_graph = _disable_dynamo(_call)


@implements(*PRODUCTS, table=FUNCTIONS)
def _recurrent(func: Any, args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return _call_outside_graph(func, args, kwargs)
    return _call(func, args, kwargs)


@implements(torch._cudnn_rnn_flatten_weight, table=FUNCTIONS)
def _keep_apart(func: Any, args: Any, kwargs: Any) -> Any:
    """``flatten_parameters`` of a module on a GPU joins float weights in one buffer; with a quantized one they stay."""
    return None

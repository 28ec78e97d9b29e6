"""Recurrent networks with quantized weights compute torch's formula with dequantized weights."""

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import pennyweight as pw
from pennyweight.core.numerics import sqnr
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.kernels import recurrent, reference
from pennyweight.kernels.cpu import library
from pennyweight.support.errors import ArgumentError

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
INT8, INT4 = pw.Int8WeightOnlyConfig(), pw.Int4WeightOnlyConfig(group_size=32)
DYNAMIC = pw.Int8DynamicActivationInt8WeightConfig()
STATIC = pw.Int8StaticActivationInt8WeightConfig
FLOAT8 = pw.Float8DynamicActivationFloat8WeightConfig(granularity=pw.PerRow())
NETS = [nn.LSTM, nn.GRU, nn.RNN]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "bidirectional": True},
    {"num_layers": 3, "batch_first": True, "bias": False},
    {"num_layers": 2, "bidirectional": True, "proj_size": 5},
    {"bidirectional": True, "nonlinearity": "relu"},
]


def make(net: type[nn.Module], variant: dict[str, Any], width: int = 13, hidden: int = 9) -> Any:
    torch.manual_seed(0)
    only = {"proj_size": nn.LSTM, "nonlinearity": nn.RNN}
    if any(name in variant and net is not kind for name, kind in only.items()):
        pytest.skip("not a variant of this kind")
    return net(width, hidden, **variant)


def dequantized(module: nn.Module) -> Any:
    plain = copy.deepcopy(module)
    pw.dequantize_(plain)
    return plain


def flat(out: Any) -> list[Tensor]:
    """Tensors of (output, h_n) or (output, (h_n, c_n)), output packed or not, or of what a cell returns."""
    if isinstance(out, Tensor):
        return [out]
    y, h = out
    return [y.data if isinstance(y, PackedSequence) else y, *(h if isinstance(h, tuple) else (h,))]


def same(mine: Any, theirs: Any, **close: float) -> None:
    for a, b in zip(flat(mine), flat(theirs), strict=True):
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b, **close)


def states(module: Any, *batch: int) -> Any:
    rows = module.num_layers * (2 if module.bidirectional else 1)
    h = torch.randn(rows, *batch, module.proj_size or module.hidden_size)
    return (h, torch.randn(rows, *batch, module.hidden_size)) if isinstance(module, nn.LSTM) else h


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("config", [INT8, INT4])
def test_the_result_is_that_of_dequantized_weights(
    net: type[nn.Module], variant: dict[str, Any], config: pw.AOBaseConfig
) -> None:
    module = make(net, variant)
    names = {n for n, _ in module.named_parameters() if n.startswith("weight")}
    report = pw.quantize_(module, config)
    assert {r.name for r in report.quantized} == names
    assert {r.note for r in report.skipped} <= {f"bias of {net.__name__} is not quantized"}
    plain, first = dequantized(module), 1 if module.batch_first else 0
    pw.reset_fallbacks()
    with torch.no_grad(), pw.kernels.strict():
        for steps, batch in ((5, 3), (1, 1), (4, 17)):
            x = torch.randn(steps, batch, 13).transpose(0, first)
            same(module(x), plain(x))
            hx = states(module, batch)
            same(module(x, hx), plain(x, hx))
        same(module(x.select(1 - first, 0)), plain(x.select(1 - first, 0)))  # unbatched
        hx = states(module)
        same(module(x.select(1 - first, 0), hx), plain(x.select(1 - first, 0), hx))
    assert not pw.fallbacks() or library.available() is not True


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("lengths", [(3, 5, 2, 5), (1,), (4, 4), (6, 1, 1)])
def test_packed_sequences(net: type[nn.Module], variant: dict[str, Any], lengths: tuple[int, ...]) -> None:
    module = make(net, variant)
    pw.quantize_(module, INT8)
    plain = dequantized(module)
    with torch.no_grad():
        packed = pack_sequence([torch.randn(n, 13) for n in lengths], enforce_sorted=False)
        same(module(packed), plain(packed))
        hx = states(module, len(lengths))
        mine, theirs = module(packed, hx), plain(packed, hx)
        same(mine, theirs)
        assert torch.equal(mine[0].batch_sizes, theirs[0].batch_sizes)


def step(net: type[nn.Module], x: Tensor, state: Any, module: Any) -> Any:
    """One step of the first layer, each product by the reference kernel."""
    w_ih, w_hh, b_ih, b_hh = (module.get_parameter(f"{n}_l0") for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    if net is nn.LSTM:
        i, f, g, o = (reference.linear(x, w_ih, b_ih) + reference.linear(state[0], w_hh, b_hh)).chunk(4, 1)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c
    a, b = reference.linear(x, w_ih, b_ih), reference.linear(state, w_hh, b_hh)
    if net is nn.RNN:
        return torch.tanh(a + b)
    (r, z, n), (r2, z2, n2) = a.chunk(3, 1), b.chunk(3, 1)
    z = torch.sigmoid(z + z2)
    return (1 - z) * torch.tanh(n + torch.sigmoid(r + r2) * n2) + z * state


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("config", [DYNAMIC, STATIC(act_quant_scale=0.03), FLOAT8], ids=["dynamic", "static", "float8"])
def test_quantized_inputs_are_quantized_at_each_product(net: type[nn.Module], config: pw.AOBaseConfig) -> None:
    module = make(net, {}, 64, 48)
    x, hx = torch.randn(6, 3, 64), states(module, 3)
    exact = flat(module(x, hx))[0].detach()
    pw.quantize_(module, config)
    state = tuple(h[0] for h in hx) if isinstance(hx, tuple) else hx[0]
    with torch.no_grad():
        rows = []
        for t in range(6):
            state = step(net, x[t], state, module)
            rows.append(state[0] if net is nn.LSTM else state)
        y = flat(module(x, hx))[0]
        # a difference of rounding may move a code of the state by one
        torch.testing.assert_close(y, torch.stack(rows), atol=4e-3, rtol=1e-2)
        assert sqnr(exact, y) > 22


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("config", [INT8, DYNAMIC])
def test_the_number_of_threads_does_not_change_a_bit(net: type[nn.Module], config: pw.AOBaseConfig) -> None:
    module = make(net, {"bidirectional": True}, 100, 65)
    pw.quantize_(module, config)
    x, before, found = torch.randn(5, 33, 100), torch.get_num_threads(), []
    try:
        with torch.no_grad():
            for threads in (1, 2):
                torch.set_num_threads(threads)
                found.append(flat(module(x)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(net: type[nn.Module], dtype: torch.dtype) -> None:
    module = make(net, {"num_layers": 2}).to(dtype)
    pw.quantize_(module, INT8)
    with torch.no_grad():
        x = torch.randn(5, 3, 13, dtype=dtype)
        close = {} if dtype is torch.float64 else {"atol": 2e-2, "rtol": 2e-2}
        same(module(x), dequantized(module)(x), **close)


@pytest.mark.parametrize(("net", "variant"), [*((net, {}) for net in NETS), (nn.LSTM, {"proj_size": 5})])
def test_autocast(net: type[nn.Module], variant: dict[str, Any]) -> None:
    module, x = make(net, variant), torch.randn(5, 3, 13)
    pw.quantize_(module, INT8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        same(module(x), dequantized(module)(x), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("net", NETS)
def test_dropout_between_layers_in_training(net: type[nn.Module]) -> None:
    module = make(net, {"num_layers": 3, "dropout": 0.5}).train()
    pw.quantize_(module, INT8)
    x, plain = torch.randn(5, 3, 13), dequantized(module)
    out = []
    for each in (module, plain, module):
        torch.manual_seed(3)
        out.append(flat(each(x))[0].detach())
    assert torch.equal(out[0], out[2])
    if net is not nn.LSTM:  # oneDNN's LSTM draws other numbers
        torch.testing.assert_close(out[0], out[1])
    assert not torch.equal(out[0], flat(module.eval()(x))[0])


@pytest.mark.parametrize(("kind", "net"), [(nn.LSTMCell, nn.LSTM), (nn.GRUCell, nn.GRU), (nn.RNNCell, nn.RNN)])
def test_cells(kind: type[nn.Module], net: type[nn.Module]) -> None:
    torch.manual_seed(0)
    for more in ({}, {"bias": False}, *([{"nonlinearity": "relu"}] if net is nn.RNN else [])):
        cell: Any = kind(13, 9, **more)
        assert len(pw.quantize_(cell, INT8).quantized) == 2
        plain, x = dequantized(cell), torch.randn(4, 13)
        with torch.no_grad(), pw.kernels.strict():
            for given in (x, x[0]):
                state: Any = None
                other: Any = None
                for _ in range(3):
                    state, other = cell(given, state), plain(given, other)
                    torch.testing.assert_close(state, other)


def test_float_and_quantized_weights_side_by_side() -> None:
    module, x = make(nn.LSTM, {"num_layers": 2}), torch.randn(5, 3, 13)
    report = pw.quantize_(module, pw.FqnToConfig({"weight_hh_l1": INT8, "weight_ih_l0": DYNAMIC}))
    assert len(report.quantized) == 2
    exact = make(nn.LSTM, {"num_layers": 2})(x)[0]
    assert sqnr(exact.detach(), module(x)[0].detach()) > 35


# -- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("config", [INT8, pw.MXWeightOnlyConfig()], ids=["kernel", "dequantized"])
def test_gradients_are_those_of_dequantized_weights(net: type[nn.Module], config: pw.AOBaseConfig) -> None:
    module = make(net, {"num_layers": 2, "bidirectional": True})
    pw.quantize_(module, config)
    plain, grads = dequantized(module), []
    for each in (module, plain):
        torch.manual_seed(1)
        x, hx = torch.randn(5, 3, 13, requires_grad=True), states(module, 3)
        held = list(hx) if isinstance(hx, tuple) else [hx]
        for h in held:
            h.requires_grad_()
        sum(t.square().sum() for t in flat(each(x, hx))).backward()
        biases = [p.grad for n, p in each.named_parameters() if n.startswith("bias")]
        grads.append([x.grad, *(h.grad for h in held), *biases])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_a_quantized_weight_that_requires_grad_gets_its_gradient() -> None:
    module = make(nn.LSTM, {"proj_size": 5})
    pw.quantize_(module, INT8)
    plain, x = dequantized(module), torch.randn(5, 3, 13)
    for each in (module, plain):
        each.requires_grad_(True)
        each(x)[0].square().sum().backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad, p.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("net", [*NETS, nn.LSTMCell])
def test_quantization_aware_training(net: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module, x = net(13, 9), torch.randn(5, 13) if net is nn.LSTMCell else torch.randn(5, 3, 13)
    pw.quantize_(module, pw.QATConfig(DYNAMIC, step="prepare"))
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    hx = None
    for _ in range(2):
        hx = module(x, hx) if net is nn.LSTMCell else module(x)[1]
    flat(module(x, hx))[0].square().sum().backward()
    optimizer.step()
    assert not any(torch.equal(before[n], p) for n, p in module.named_parameters())
    if net is not nn.LSTMCell:
        for name, w in zip(module._flat_weights_names, module._flat_weights, strict=True):
            assert w is module.get_parameter(name)
    with torch.no_grad():
        trained = flat(module(x))
        pw.quantize_(module, pw.QATConfig(step="convert"))
        assert type(module) is net
        for a, b in zip(trained, flat(module(x)), strict=True):
            assert torch.equal(a, b)


# -- the module ------------------------------------------------------------------------------------------------------


def test_the_module_keeps_its_list_of_weights_in_step() -> None:
    module = make(nn.GRU, {"num_layers": 2})
    pw.quantize_(module, INT8)
    for name, w in zip(module._flat_weights_names, module._flat_weights, strict=True):
        assert w is module.get_parameter(name)
        assert isinstance(w, AffineQuantizedTensor) == name.startswith("weight")
    module.flatten_parameters()
    module.to(torch.float64)
    assert module._flat_weights[0] is module.weight_ih_l0
    assert torch._cudnn_rnn_flatten_weight(module._flat_weights, 4, 13, 3, 9, 0, 2, False, False) is None
    pw.dequantize_(module)
    assert type(module._flat_weights[0]) is nn.Parameter
    assert module._flat_weights[0] is module.weight_ih_l0


@pytest.mark.parametrize("net", [*NETS, nn.LSTMCell, nn.GRUCell])
def test_copies_and_files(net: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(net(13, 9)), torch.randn(4, 13)
    pw.quantize_(model, INT4)
    y = flat(model(x))
    pw.save(model, tmp_path / "m")
    again = {"deepcopy": copy.deepcopy(model), "pickle": pickle.loads(pickle.dumps(model))}
    for how in ("load", "state dict", "assigned"):
        again[how] = nn.Sequential(net(13, 9))
        if how == "load":
            pw.load(tmp_path / "m", again[how])
        elif how == "assigned":
            again[how].load_state_dict(model.state_dict(), assign=True)
        else:
            pw.quantize_(again[how], INT4)
            again[how].load_state_dict(model.state_dict())
    for how, other in again.items():
        assert isinstance(next(other.parameters()), AffineQuantizedTensor), how
        assert all(torch.equal(a, b) for a, b in zip(y, flat(other(x)), strict=True)), how


def test_freezing_leaves_it_alone_with_the_reason() -> None:
    model, x = nn.Sequential(make(nn.LSTM, {})), torch.randn(5, 3, 13)
    pw.quantize_(model, INT8)
    y = model(x)[0]
    report = pw.inference.freeze_(model)
    assert {r.note for r in report.rows} == {
        f"LSTM at 0.weight_{n}_l0 does more than F.linear, so it cannot be frozen" for n in ("ih", "hh")
    }
    assert torch.equal(model(x)[0], y)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_a_weight_that_a_hook_recomputes_is_refused() -> None:
    module = nn.utils.weight_norm(make(nn.LSTM, {}), "weight_hh_l0")
    rows = {r.name: r for r in pw.quantize_(module, INT8).rows}
    assert "weight_hh_l0 is computed from it before each forward" in rows["weight_hh_l0_v"].note
    assert isinstance(module.weight_ih_l0, AffineQuantizedTensor)


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        module = nn.LSTM(13, 9)
    assert len(pw.quantize_(module, INT8).quantized) == 2
    assert module(torch.randn(5, 3, 13, device="meta"))[0].shape == (5, 3, 9)


# -- calibration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", [*NETS, nn.GRUCell])
def test_calibration_sees_the_inputs_of_every_weight(net: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(net(32, 32)), [torch.randn(7, 32) for _ in range(3)]
    static = copy.deepcopy(model)
    rows = pw.quantize_(model, INT4, calibration=data, algorithm="gptq").quantized
    assert len(rows) == 2
    assert not any("no calibration data" in r.note for r in rows)
    exact = flat(static(data[0]))[0].detach()
    pw.quantize_(static, pw.calibrate(static, data, STATIC))
    assert sqnr(exact, flat(static(data[0]))[0].detach()) > 25


# -- tracing ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The tensor attributes self._flat_weights:UserWarning")  # as with float weights
@pytest.mark.parametrize("net", NETS)
def test_traced_and_transformed(net: type[nn.Module]) -> None:
    module = make(net, {"batch_first": True}).eval()
    pw.quantize_(module, INT8)
    x = torch.randn(3, 4, 13)
    with torch.no_grad():
        y = module(x)
        torch._dynamo.reset()
        same(torch.compile(module, backend="eager")(x), y)  # dynamo breaks the graph at these modules
        torch._dynamo.reset()
        with torch._dynamo.config.patch(allow_rnn=True):
            same(torch.compile(module, backend="aot_eager", fullgraph=True)(x), y)
        same(torch.export.export(module, (x,), strict=False).module()(x), y)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated, and nn.LSTM compares sizes
            traced = torch.jit.trace(module, (x,), check_trace=False)(x)
        same(traced, y)
        torch.testing.assert_close(torch.func.vmap(lambda row: module(row[None])[0][0])(x), y[0])


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_compile_without_a_break(kind: type[nn.Module]) -> None:
    cell, x = kind(13, 9), torch.randn(4, 13)
    pw.quantize_(cell, INT8)
    torch._dynamo.reset()
    with torch.no_grad():
        state = cell(x)
        torch.testing.assert_close(torch.compile(cell, backend="aot_eager", fullgraph=True)(x, state), cell(x, state))


# -- fallbacks and errors --------------------------------------------------------------------------------------------


def test_a_weight_without_a_kernel_is_dequantized_once_per_call() -> None:
    module, x = make(nn.LSTM, {"proj_size": 5}), torch.randn(8, 3, 13)
    pw.quantize_(module, pw.MXWeightOnlyConfig())
    names = {r.kernel for r in pw.quantize_(module, pw.MXWeightOnlyConfig()).quantized}
    with torch.no_grad():
        pw.reset_fallbacks()
        same(module(x), dequantized(module)(x))
    assert pw.fallbacks().get("linear/dequantize", 0) == (3 if names == {"dequantize"} else 0)


def test_a_quantized_input_is_dequantized_and_counted() -> None:
    module, x = make(nn.GRU, {}), torch.randn(5, 3, 13)
    pw.quantize_(module, INT8)
    held = AffineQuantizedTensor.from_float(x, pw.QuantSpec(pw.get_format("int8"), (-1,)))
    pw.reset_fallbacks()
    with pytest.warns(pw.FallbackWarning, match="gru on a quantized tensor"):
        y = module(held)[0]
    assert torch.equal(y, module(held.dequantize())[0])
    assert pw.fallbacks() == {"gru": 1}


def test_arguments_that_do_not_fit() -> None:
    module = make(nn.LSTM, {})
    pw.quantize_(module, INT8)
    x, h, w = torch.randn(5, 3, 13), torch.randn(1, 3, 9), module._flat_weights
    rest = (True, 1, 0.0, False, False, False)
    for args, message in (
        (((h[:, :2], h), False), r"a state of \[1, 2, 9\]; expected \[1, 3, hidden\]"),
        (((h, h[0]), False), r"a state of \[3, 9\]"),
        (((h, h.double()), False), "the state is torch.float64"),
        (((h[..., :8], h[..., :8]), False), "expected 4 times as many"),
        (((h, h), True), "3 parameters, expected 4"),
    ):
        hx, short = args
        with pytest.raises(ArgumentError, match=message):
            torch.lstm(x, hx, w[:3] if short else w, *rest)
    with pytest.raises(RuntimeError, match="at least one step"):
        module(x[:0])
    with pytest.raises(ArgumentError, match="an input of 2 axes; expected 3"):
        torch.lstm(x[0], (h, h), w, *rest)
    with pytest.raises(ArgumentError, match=r"batch_sizes \[2, 3\] do not fit the packed input \[5, 13\]"):
        torch.lstm(x[:, 0], torch.tensor([2, 3]), (h[:, :2], h[:, :2]), w, *rest[:-1])
    with pytest.raises(ArgumentError, match="does not fit the quantized weight"):
        torch.lstm(x[..., :12], (h, h), w, *rest)
    cell = nn.GRUCell(13, 9)
    pw.quantize_(cell, INT8)
    with pytest.raises(ArgumentError, match=r"gru_cell: states \[\[2, 9\]\] do not fit \[3, 13\]"):
        cell(x[0], h[0, :2])


def test_functions_of_torch_take_keywords() -> None:
    module, x, h = make(nn.GRU, {}), torch.randn(5, 3, 13), torch.zeros(1, 3, 9)
    pw.quantize_(module, INT8)
    with torch.no_grad():
        y = torch.gru(
            x, h, params=module._flat_weights, has_biases=True, num_layers=1, dropout=0.0, train=False,
            bidirectional=False, batch_first=False,
        )  # fmt: skip
        assert torch.equal(y[0], module(x)[0])
    assert set(recurrent.PRODUCTS) == {
        torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu, torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell,
        torch.rnn_relu_cell,
    }  # fmt: skip
    assert F.linear(x, module.weight_ih_l0).shape == (5, 3, 27)

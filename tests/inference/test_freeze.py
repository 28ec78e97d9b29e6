"""freeze_ and thaw_: the same numbers without the tensor class, and everything else as before."""

import copy
import io
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import pennyweight as pw
from pennyweight.core.formats import INT8
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.kernels.repack import prepare
from tests.inference.function_mode import SeenFunctions
from tests.tensors import INT8_GROUPS, INT8_GROUPS_ASYMMETRIC, INT8_STATIC, INT8_TOKEN, SPECS, UINT8_TOKEN, quantized

SCHEMES: dict[str, tuple[str, ActivationSpec | None]] = {
    **{name: (name, None) for name in SPECS},
    "int8_dynamic": ("int8_row", INT8_TOKEN),
    "int8_dynamic_tensor": ("int8_row", ActivationSpec(QuantSpec(INT8, None))),
    "int8_static": ("int8_row", INT8_STATIC),
    "int8_dynamic_int4": ("int4_group", INT8_TOKEN),
    "uint8_dynamic_int4": ("int4_bits", UINT8_TOKEN),
    "int8_groups": ("int8_row", INT8_GROUPS),
    "int8_groups_asymmetric_int4": ("int4_group", INT8_GROUPS_ASYMMETRIC),
    "float8_dynamic": ("float8_row", ActivationSpec(SPECS["float8_row"])),
}
FEW = ["int8_row", "int8_static", "torch_int4", "nf4_double", "float8_row"]  # plain, extra, packed, nested, float codes
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def net(scheme: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two quantized layers, one without a bias, and a float one between them."""
    name, act = SCHEMES[scheme]
    model = nn.Sequential(nn.Linear(96, 32), nn.LayerNorm(32), nn.Linear(32, 96, bias=False)).to(dtype)
    for layer, shape in ((model[0], (32, 96)), (model[2], (96, 32))):
        layer.weight = nn.Parameter(prepare(quantized(name, shape, dtype, act)), requires_grad=False)
    return model


def frozen(scheme: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Sequential, nn.Sequential]:
    """(a quantized model, the same frozen)"""
    model = net(scheme, dtype)
    other = copy.deepcopy(model)
    report = pw.inference.freeze_(other)
    assert len(report.quantized) == 2
    return model, other


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_same_bits(scheme: str, dtype: torch.dtype) -> None:
    model, ice = frozen(scheme, dtype)
    with torch.no_grad():
        for rows in (1, 2, 17, 33, 0, 1):
            x = torch.randn(rows, 96, dtype=dtype)
            assert torch.equal(ice(x), model(x))
        x = torch.randn(2, 3, 96, dtype=dtype)
        assert torch.equal(ice(x), model(x))
        assert torch.equal(ice(x[0, 0]), model(x[0, 0]))
        with torch.inference_mode():
            assert torch.equal(ice(x), model(x))


def test_the_tensor_class_is_not_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ice = frozen("int8_row")
    x = torch.randn(1, 96)
    with torch.no_grad():
        expected = ice(x)
        for name in ("__torch_function__", "__torch_dispatch__"):
            monkeypatch.setattr(QT, name, None)
        assert torch.equal(ice(x), expected)


def test_only_the_class_changes() -> None:
    model = net("nf4_double")
    before = [dict(module.__dict__) for module in model]
    named = [(n, id(t)) for n, t in (*model.named_parameters(), *model.named_buffers())]
    pw.inference.freeze_(model)
    assert [dict(module.__dict__) for module in model] == before
    assert [(n, id(t)) for n, t in (*model.named_parameters(), *model.named_buffers())] == named
    assert "weight=nf4, groups of 64" in repr(model)
    assert isinstance(model[0], pw.inference.FrozenLinear)


def test_inputs_that_do_not_fit_are_refused() -> None:
    _, ice = frozen("int8_row")
    with pytest.raises(ValueError, match=r"input \(2, 95\) does not fit the quantized weight \(32, 96\)"):
        ice(torch.randn(2, 95))
    ice(torch.randn(2, 96))
    with pytest.raises(ValueError, match=r"input \(2, 95\) does not fit"):
        ice(torch.randn(2, 95))


@pytest.mark.parametrize("scheme", FEW)
def test_other_dtypes_of_input_and_autocast(scheme: str) -> None:
    model, ice = frozen(scheme)
    x = torch.randn(4, 96)
    layer, cold = model[0], ice[0]
    layer.bias = cold.bias = None
    with torch.no_grad():
        for dtype in (*DTYPES, torch.float32):
            assert torch.equal(cold(x.to(dtype)), layer(x.to(dtype)))
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                y = cold(x)
                assert y.dtype is torch.bfloat16
                assert torch.equal(y, layer(x))
            assert cold(x).dtype is torch.float32


@pytest.mark.parametrize("scheme", FEW)
def test_gradients_reach_inputs_and_biases(scheme: str) -> None:
    model, ice = frozen(scheme)
    found = []
    for m in (model, ice):
        for _ in range(2):  # the first call binds, the second is bound
            m.zero_grad()
            x = torch.linspace(-1, 1, 3 * 96).reshape(3, 96).requires_grad_()
            y = m(x)
            y.square().sum().backward()
        found.append((y, x.grad, m[0].bias.grad, m[1].weight.grad))
    assert all(g is not None for g in found[1])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    x = torch.randn(3, 96)  # no gradient to x: that of the bias is there all the same
    assert ice[0](x).requires_grad
    ice.requires_grad_(False)
    assert not ice(x).requires_grad


# -- graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", FEW)
def test_compiled_and_exported(scheme: str) -> None:
    _, ice = frozen(scheme)
    x = torch.randn(5, 96)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        assert not any(isinstance(i, QT) for i in inputs)
        return graph

    with torch.no_grad():
        y = ice(x)
        assert torch.equal(torch.compile(ice, fullgraph=True, backend=aot_autograd(fw_compiler=backend))(x), y)
        targets = [n.target for n in graphs[0].graph.nodes if n.op == "call_function"]
        assert targets.count(torch.ops.pennyweight.linear.default) == 2
        exported = torch.export.export(ice, (x,))
        assert torch.equal(exported.module()(x), y)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(torch.compile(ice[0], fullgraph=True, backend="aot_eager")(x), ice[0](x))
    torch._dynamo.reset()
    x.requires_grad_()
    (expected,) = torch.autograd.grad(ice(x).sum(), x)
    (found,) = torch.autograd.grad(torch.compile(ice, fullgraph=True, backend="aot_eager")(x).sum(), x)
    torch.testing.assert_close(found, expected)


# -- modules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_thaw_undoes_it_exactly(scheme: str) -> None:
    model = net(scheme)
    before = [(n, id(p)) for n, p in model.named_parameters()]
    dicts = [set(m.__dict__) for m in model]
    assert pw.inference.freeze_(model).summary().startswith("2 parameters frozen, 0 left alone")
    assert [r.note for r in pw.inference.freeze_(model).rows] == ["already frozen"] * 2
    assert pw.inference.thaw_(model).summary().startswith("2 parameters thawed")
    assert [(n, id(p)) for n, p in model.named_parameters()] == before
    assert [set(m.__dict__) for m in model] == dicts
    assert [type(m) for m in model] == [nn.Linear, nn.LayerNorm, nn.Linear]
    assert list(model.buffers()) == []
    assert pw.inference.thaw_(model).rows == []


def test_a_lone_layer_hooks_flags_and_attributes() -> None:
    layer = net("int8_row")[0].eval()
    layer.tag = "mine"
    layer.register_buffer("extra", torch.zeros(3))
    layer.register_buffer("passing", torch.zeros(3), persistent=False)
    seen: list[str] = []
    layer.register_forward_hook(lambda *_: seen.append("after"))
    pw.inference.freeze_(layer)
    layer(torch.randn(1, 96))
    assert seen == ["after"]
    assert (layer.tag, layer.training, layer.in_features, layer.out_features) == ("mine", False, 96, 32)
    assert set(layer.state_dict()) == {"weight", "bias", "extra"}
    assert set(layer._buffers) == {"extra", "passing"}
    pw.inference.thaw_(layer)
    assert layer._non_persistent_buffers_set == {"passing"}


class Own(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class Renamed(nn.Linear):
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features


def test_what_is_left_alone_and_why() -> None:
    model = nn.ModuleDict(
        {
            "own": Own(64, 64), "renamed": Renamed(64, 64), "patched": nn.Linear(64, 64), "trained": nn.Linear(64, 64),
            "table": nn.Embedding(64, 64), "attention": nn.MultiheadAttention(64, 4), "exact": nn.Linear(64, 64),
        }
    )  # fmt: skip
    pw.quantize_(model, pw.Int8WeightOnlyConfig(), lambda m, fqn: fqn not in ("exact", ""))
    model["patched"].forward = lambda x: x
    model["trained"].weight.requires_grad_(True)
    x = torch.randn(3, 64)
    before = model["attention"](x, x, x)[0]
    report = pw.inference.freeze_(model)
    assert [r.name for r in report.quantized] == ["renamed.weight", "attention.out_proj.weight"]
    notes = {r.name: r.note for r in report.skipped}
    assert notes["own.weight"] == "Own at own.weight does more than F.linear, so it cannot be frozen"
    assert notes["trained.weight"] == "requires grad; call requires_grad_(False) first"
    assert notes.keys() == {
        "own.weight", "patched.weight", "trained.weight", "table.weight", "attention.in_proj_weight",
    }  # fmt: skip
    assert torch.equal(model["attention"](x, x, x)[0], before)  # it takes out_proj.weight and multiplies itself
    for frozen in (model["renamed"], copy.deepcopy(model["renamed"]), pickle.loads(pickle.dumps(model["renamed"]))):
        assert isinstance(frozen, (pw.inference.FrozenLinear, Renamed))  # what it can do it still can
        assert frozen.shape() == (64, 64)
        assert torch.equal(frozen(x), model["renamed"](x))
        pw.inference.thaw_(frozen)
        assert type(frozen) is Renamed


def test_a_frozen_model_is_thawed_before_it_is_quantized_and_dequantized_as_it_is() -> None:
    model, ice = frozen("int8_row")
    with pytest.raises(pw.PlanError, match=r"0 is frozen \(2 layers in all\); call thaw_\(model\) first"):
        pw.quantize_(ice, pw.Int8WeightOnlyConfig())
    values = [m.weight.dequantize() for m in (model[0], model[2])]
    report = pw.dequantize_(ice)
    assert [r.name for r in report.rows] == ["0.weight", "2.weight"]
    assert type(ice[0].weight) is nn.Parameter
    assert all(torch.equal(a, m.weight) for a, m in zip(values, (ice[0], ice[2]), strict=True))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.a, self.b = nn.Embedding(64, 32), nn.Linear(32, 64), nn.Linear(32, 64)
        self.a.weight = self.b.weight = self.table.weight
        self.again = self.a

    def forward(self, index: Tensor) -> Tensor:
        x = self.table(index)
        return self.a(x) + self.b(x) + self.again(x)


def storages(model: Tied) -> set[int]:
    return {layer.weight.parts.codes.data_ptr() for layer in (model.table, model.a, model.b)}


def test_a_table_that_only_the_head_freezes() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(96, 64), "head": nn.Linear(64, 96, bias=False)})
    model["head"].weight = model["embed"].weight
    pw.quantize_(model, "int8")
    (row,) = pw.inference.freeze_(model).rows
    assert row.note == "frozen at head.weight only; tied: head.weight"
    assert row.quantized


@torch.no_grad()  # a graph that holds a weight keeps torch from moving it
def test_tied_weights_stay_one_storage() -> None:
    model, index = Tied(), torch.tensor([3, 5])
    pw.quantize_(model, pw.Int8WeightOnlyConfig())
    y = model(index)
    (row,) = pw.inference.freeze_(model).quantized
    assert row.note.endswith("tied: a.weight, b.weight, again.weight")
    assert model.again is model.a
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.to(torch.float32)):
        assert len(storages(other)) == 1
        assert torch.equal(other(index), y)
    other = model.to(torch.bfloat16)
    assert len(storages(other)) == 1
    assert other(index).dtype is torch.bfloat16
    pw.inference.thaw_(other)
    assert other.a.weight is other.b.weight is other.table.weight


# -- moving, copying, storing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", FEW)
def test_a_change_of_dtype_means_what_it_means_for_the_tensor(scheme: str) -> None:
    model, ice = frozen(scheme)
    x = torch.randn(3, 96)
    for change in (lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.float(), lambda m: m.to("cpu")):
        dtypes = [p.dtype for p in ice[0].weight.parts if p is not None]
        change(model)
        assert change(ice) is ice
        assert [p.dtype for p in ice[0].weight.parts if p is not None] == dtypes  # scales too
        assert ice[0].weight.dtype is model[0].weight.dtype
        like = x.to(ice[0].bias.dtype)
        with torch.no_grad():
            assert torch.equal(ice(like), model(like))


def test_share_memory_and_meta() -> None:
    _, ice = frozen("nf4_double")
    ice.share_memory()
    assert all(w.is_shared() for w in ice.parameters())
    assert ice.to("meta")[0].weight.parts.codes.is_meta
    assert isinstance(ice[0], pw.inference.FrozenLinear)


@pytest.mark.parametrize("scheme", FEW)
def test_copies_and_pickles_are_frozen_and_equal(scheme: str) -> None:
    _, ice = frozen(scheme)
    x = torch.randn(3, 96)
    stream = io.BytesIO()
    torch.save(ice, stream)
    stream.seek(0)
    with torch.no_grad():
        y = ice(x)
        copies = [copy.deepcopy(ice), pickle.loads(pickle.dumps(ice)), torch.load(stream, weights_only=False)]
        for other in (*copies, nn.Sequential(*map(copy.copy, ice))):
            assert isinstance(other[0], pw.inference.FrozenLinear)
            assert other[0].weight.spec == ice[0].weight.spec
            assert torch.equal(other(x), y)
        assert copies[0][0].weight.parts.codes.data_ptr() != ice[0].weight.parts.codes.data_ptr()
        pw.inference.thaw_(copies[1])
        assert type(copies[1][0]) is nn.Linear
        assert torch.equal(copies[1](x), y)
        assert torch.equal(ice(x), y)


@pytest.mark.parametrize("scheme", FEW)
def test_the_state_dict_is_that_of_the_model_before(scheme: str, tmp_path: Path) -> None:
    model, ice = frozen(scheme)
    state = ice.state_dict()
    assert list(state) == list(model.state_dict())
    assert isinstance(state["0.weight"], QT)
    other, x = net(scheme), torch.randn(3, 96)
    _, cold = frozen(scheme)
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    state = torch.load(stream, weights_only=True)
    with torch.no_grad():
        y = ice(x)
        kept = cold[0].weight.parts.codes
        for target in (other, cold):
            assert not torch.equal(target(x), y)
            target.load_state_dict(state)
            assert torch.equal(target(x), y)
        assert cold[0].weight.parts.codes is kept  # in place
        for assign in (True, False):
            _, cold = frozen(scheme)
            cold.load_state_dict(state, assign=assign)
            assert isinstance(cold[0], pw.inference.FrozenLinear)
            assert torch.equal(cold(x), y)
        pw.save(ice, tmp_path)
        assert torch.equal(pw.load(tmp_path, net(scheme))(x), y)


def test_a_state_dict_that_does_not_fit_leaves_the_layer_frozen() -> None:
    _, ice = frozen("int8_row")
    x = torch.randn(2, 96)
    y = ice(x)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        ice[:1].load_state_dict({"0.weight": torch.zeros(3, 3), "0.bias": ice[0].bias})
    with pytest.raises(RuntimeError, match="Missing key"):
        ice.load_state_dict({})
    assert torch.equal(ice(x), y)


def test_float_weights_that_are_assigned_thaw_a_layer_and_copied_ones_are_quantized() -> None:
    model, ice = frozen("int8_row")
    state = {"weight": torch.randn(32, 96), "bias": torch.zeros(32)}
    x = torch.randn(2, 96)
    ice[0].load_state_dict(state)
    model[0].load_state_dict(state)
    assert torch.equal(ice[0](x), model[0](x))
    ice[0].load_state_dict(state, assign=True)
    assert type(ice[0]) is nn.Linear
    assert torch.equal(ice[0](x), F.linear(x, state["weight"], state["bias"]))


# -- what is replaced or changed is what is used ---------------------------------------------------------------------


def test_a_weight_that_is_written_to_or_replaced() -> None:
    _, ice = frozen("int8_row")
    x, layer = torch.randn(2, 96), ice[0]
    y = layer(x)
    layer.weight.parts.codes[0] += 1
    changed = layer(x)
    assert not torch.equal(changed, y)
    torch.testing.assert_close(changed, F.linear(x, layer.weight.dequantize(), layer.bias))
    layer.weight.data = net("int8_row")[0].weight
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight.dequantize(), layer.bias))
    layer.weight = nn.Parameter(torch.ones(32, 96))
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    pw.inference.thaw_(ice)
    assert type(layer) is nn.Linear


def replacements(model: nn.Sequential) -> dict[str, dict[str, Tensor]]:
    """State dicts to call a model with: of its own parameters, of other quantized ones, of floats, and mixed ones."""
    exact = {n: p.dequantize() * 3 if isinstance(p, QT) else p + 1 for n, p in model.state_dict().items()}
    return {
        "own": model.state_dict(), "parameters": dict(model.named_parameters()),
        "other": {n: QT.from_float(p, SPECS["tinygemm"]) if p.ndim > 1 else p for n, p in exact.items()},
        "float": exact, "mixed": {**model.state_dict(), "0.weight": exact["0.weight"], "0.bias": exact["0.bias"]},
        "one": {"2.weight": exact["2.weight"]},
    }  # fmt: skip


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", ["own", "parameters", "other", "float", "mixed", "one"])
@pytest.mark.parametrize("scheme", FEW)
def test_functional_call(scheme: str, kind: str, strict: bool) -> None:
    model, ice = frozen(scheme)
    given, x = replacements(model)[kind], torch.randn(3, 96)
    if strict and kind == "one":
        return
    y, held = ice(x), [dict(m._parameters) for m in ice]
    expected = torch.func.functional_call(model, given, x, strict=strict)
    assert torch.equal(torch.func.functional_call(ice, given, x, strict=strict), expected)
    assert torch.equal(ice(x), y)
    assert [type(m) for m in ice] == [pw.inference.FrozenLinear, nn.LayerNorm, pw.inference.FrozenLinear]
    assert all(m._parameters[n] is p for m, before in zip(ice, held, strict=True) for n, p in before.items())
    exact = copy.deepcopy(model)
    for name, value in given.items():
        setattr(exact.get_submodule(name[0]), name[2:], nn.Parameter(value, requires_grad=False))
    assert torch.equal(expected, exact(x))


def test_frozen_and_thawed_while_threads_call_it() -> None:
    model, ice = frozen("int8_row")
    x = torch.randn(1, 96)
    failed: list[Any] = []
    done = threading.Event()

    def work() -> None:
        with torch.no_grad():
            while not done.is_set():
                try:
                    if not torch.equal(ice(x), expected):
                        failed.append("another result")
                except Exception as error:
                    failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with torch.no_grad():
            expected = model(x)
        threads = [threading.Thread(target=work) for _ in range(3)]
        for t in threads:
            t.start()
        for _ in range(300):
            pw.inference.thaw_(ice)
            pw.inference.freeze_(ice)
        done.set()
        for t in threads:
            t.join()
    finally:
        done.set()
        sys.setswitchinterval(interval)
    assert not failed


def test_a_function_mode_sees_the_calls() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(64, 32), nn.Linear(64, 16)])
    pw.quantize_(layers, "int8")
    pw.inference.freeze_(layers)
    x = torch.randn(2, 64)
    with torch.no_grad():
        expected = [layer(x) for layer in layers]
        with SeenFunctions() as seen:
            found = [layers[0](x), *pw.inference.together(x, list(layers))]
    assert seen.names.count("linear") == 3
    assert all(map(torch.equal, found, [expected[0], *expected]))

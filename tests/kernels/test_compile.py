"""Compiled and exported models with quantized weights: one graph, no breaks, the numbers of eager mode."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import pennyweight as pw
from pennyweight.core.formats import INT8
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.kernels.repack import prepare
from tests.tensors import INT8_GROUPS, INT8_GROUPS_ASYMMETRIC, INT8_STATIC, INT8_TOKEN, SPECS, UINT8_TOKEN, quantized

SCHEMES: dict[str, tuple[str, ActivationSpec | None]] = {
    **{name: (name, None) for name in SPECS},
    "int8_dynamic": ("int8_row", INT8_TOKEN),
    "int8_dynamic_tensor": ("int8_row", ActivationSpec(QuantSpec(INT8, None))),
    "int8_dynamic_asymmetric": ("int8_row", ActivationSpec(QuantSpec(INT8, (-1,), zero_point=True))),
    "int8_static": ("int8_row", INT8_STATIC),
    "int8_groups": ("int8_row", INT8_GROUPS),
    "int8_groups_asymmetric_int4": ("int4_group", INT8_GROUPS_ASYMMETRIC),
    "int8_dynamic_int4": ("int4_group", INT8_TOKEN),
    "uint8_dynamic_int4": ("int4_bits", UINT8_TOKEN),
    "float8_dynamic": ("float8_row", ActivationSpec(SPECS["float8_row"])),
    "mxfp8_dynamic": ("mxfp8", ActivationSpec(SPECS["mxfp8"])),
}
BATCHES = [2, 7, 16]
# A scheme for each way that graphs take; test_one_graph_for_all_batch_sizes has the others each time
QUICK = {
    "int8_row", "int4_bits", "torch_int4", "nf4_double", "mxfp8", "nvfp4", "float8_row", "int8_dynamic",
    "int8_dynamic_asymmetric", "int8_static", "int8_groups", "uint8_dynamic_int4", "float8_dynamic", "mxfp8_dynamic",
}  # fmt: skip
SOME = [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in SCHEMES]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    pw.reset_fallbacks()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """Two quantized layers with a float one between."""

    def __init__(self, scheme: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        name, act = SCHEMES[scheme]
        self.first, self.norm, self.second = nn.Linear(96, 32), nn.LayerNorm(32), nn.Linear(32, 96, bias=False)
        self.to(dtype)
        self.first.weight = nn.Parameter(quantized(name, (32, 96), dtype, act), requires_grad=False)
        self.second.weight = nn.Parameter(quantized(name, (96, 32), dtype, act), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.silu(self.norm(self.first(x))))


def graphs() -> int:
    """How many graphs have been compiled in this test."""
    return counters["stats"]["unique_graphs"]


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_graph_for_all_batch_sizes(scheme: str) -> None:
    model = Net(scheme)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for batch in BATCHES:
            x = torch.randn(batch, 96)
            close(compiled(x), model(x))
        assert graphs() == 1
        x = torch.randn(1, 96)  # torch gives a size of one a graph of its own, in float models too
        close(compiled(x), model(x))
        assert graphs() == 2
        for batch in (1, 3, 16):
            compiled(torch.randn(batch, 96))
        assert graphs() == 2


@pytest.mark.parametrize("scheme", SOME)
def test_gradients_to_the_input(scheme: str) -> None:
    model = Net(scheme)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in BATCHES:
        x = torch.randn(batch, 96)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        mine, theirs = compiled(a), model(b)
        close(mine, theirs)
        up = torch.randn(batch, 96)
        grads = []
        for y, leaf in ((mine, a), (theirs, b)):
            model.zero_grad()
            y.backward(up)
            grads.append([leaf.grad, model.first.bias.grad, model.norm.weight.grad])
        for mine, theirs in zip(*grads, strict=True):
            close(mine, theirs)
    assert graphs() == 1


@pytest.mark.parametrize("scheme", ["int8_row", "int8_dynamic", "torch_int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inductor(scheme: str, dtype: torch.dtype) -> None:
    model = Net(scheme, dtype)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for batch in BATCHES:
            x = torch.randn(batch, 96).to(dtype)
            torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=0.1 if dtype is torch.bfloat16 else 1e-2)


@pytest.mark.parametrize("scheme", SOME)
def test_export(scheme: str) -> None:
    model = Net(scheme).eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(model, (torch.randn(4, 96),), dynamic_shapes={"x": {0: batch}})
    for size in BATCHES:
        x = torch.randn(size, 96)
        with torch.no_grad():
            close(exported.module()(x), model(x))


def test_the_graph_holds_one_op_on_plain_tensors() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    from torch._dynamo.backends.common import aot_autograd

    model = Net("int8_dynamic")
    with torch.no_grad():
        torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=keep))(torch.randn(4, 96))
    called = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert called.count(torch.ops.pennyweight.linear.default) == 2


# -- other ways to use a weight --------------------------------------------------------------------------------------


class Products(nn.Module):
    def __init__(self, w: QT) -> None:
        super().__init__()
        self.weight = nn.Parameter(w, requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w = self.weight
        return (
            x @ w.t(), torch.matmul(x, w.T), (w @ x.mT).mT, torch.einsum("bk,nk->bn", x, w),
            torch.addmm(torch.ones(32), x, w.t()), x @ w[:16].t(),
        )  # fmt: skip


class Convolution(nn.Module):
    def __init__(self, w: QT) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.conv.weight = nn.Parameter(w, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


class Transposed(nn.Module):
    def __init__(self, w: QT) -> None:
        super().__init__()
        self.weight = nn.Parameter(prepare(w, ("transposed_convolution",)), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv_transpose2d(x, self.weight, stride=2, padding=1, output_padding=1)


class Lookup(nn.Module):
    def __init__(self, w: QT) -> None:
        super().__init__()
        self.table = nn.Embedding(*w.shape)
        self.table.weight = nn.Parameter(w, requires_grad=False)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.table(index).sum(1)


def attention() -> nn.Module:
    module = nn.MultiheadAttention(32, 4, batch_first=True)
    for name, rows in (("in_proj_weight", 96), ("out_proj.weight", 32)):
        owner = module if name == "in_proj_weight" else module.out_proj
        w = QT.from_float(torch.randn(rows, 32), SPECS["int8_row"])
        setattr(owner, name.split(".")[-1], nn.Parameter(w, requires_grad=False))

    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    return SelfAttention()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "products int8": (lambda: Products(quantized("int8_row")), lambda b: torch.randn(b, 96)),
    "products int4": (lambda: Products(quantized("int4_bits")), lambda b: torch.randn(b, 96)),
    "products nvfp4": (lambda: Products(quantized("nvfp4")), lambda b: torch.randn(b, 96)),
    "convolution": (
        lambda: Convolution(QT.from_float(torch.randn(8, 4, 3, 3), SPECS["int8_row"].with_(block=(-1, -1, -1)))),
        lambda b: torch.randn(b, 4, 6, 6),
    ),
    "transposed convolution": (
        lambda: Transposed(QT.from_float(torch.randn(128, 4, 3, 3), SPECS["int8_row"].with_(block=(-1, 1, -1, -1)))),
        lambda b: torch.randn(b, 128, 6, 5),
    ),
    "embedding": (lambda: Lookup(quantized("int4_bits", (50, 64))), lambda b: torch.randint(50, (b, 3))),
    "embedding nf4": (lambda: Lookup(quantized("nf4_double", (50, 64))), lambda b: torch.randint(50, (b, 3))),
    "attention": (attention, lambda b: torch.randn(b, 5, 32)),
}


def outputs(y: Any) -> tuple[torch.Tensor, ...]:
    return y if isinstance(y, tuple) else (y,)


def float_twin(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    for module in twin.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            if isinstance(p, QT):
                setattr(module, name, nn.Parameter(p.dequantize(), requires_grad=False))
    return twin


# The ways of "products int8" and "embedding" with other formats, which test_one_graph_for_all_batch_sizes has
ALIKE = ("products int4", "products nvfp4", "embedding nf4")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.exhaustive) if n in ALIKE else n for n in MODELS])
def test_other_uses_compile(name: str) -> None:
    build, make = MODELS[name]
    model = build().eval()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    float_model = torch.compile(float_twin(model), fullgraph=True, dynamic=True, backend="aot_eager")
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            for batch in BATCHES:
                x = make(batch)
                before = graphs()
                mine, theirs = compiled(x), model(x)
                ours = graphs() - before
                for a, b in zip(outputs(mine), outputs(theirs), strict=True):
                    close(a, b)
                before = graphs()
                float_model(x)
                assert ours == graphs() - before  # a size is traced anew where torch does so for floats, only there
    if x.is_floating_point():
        torch._dynamo.reset()  # both models share the code of one forward, and with it torch's limit of graphs
        grads = []
        for fn in (compiled, model):
            leaf = x.clone().requires_grad_()
            sum(t.sum() for t in outputs(fn(leaf))).backward()
            grads.append(leaf.grad)
        close(*grads)


@pytest.mark.parametrize("name", MODELS)
def test_other_uses_export(name: str) -> None:
    build, make = MODELS[name]
    model = build().eval()
    with torch.no_grad():
        exported = torch.export.export(model, (make(4),)).module()
        x = make(4)
        mine, theirs = exported(x), model(x)
    for a, b in zip(*(y if isinstance(y, tuple) else (y,) for y in (mine, theirs)), strict=True):
        close(a, b)


# -- training, dtype, and what a graph must not forget ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8_row", "int4_bits", "nf4_double"])
def test_a_trainable_weight_gets_its_gradient(name: str) -> None:
    w = nn.Parameter(quantized(name))
    x, up = torch.randn(5, 96), torch.randn(5, 32)

    for product in (
        F.linear,
        lambda x, w: x @ w.t(),
        lambda x, w: (w @ x.t()).t(),
        lambda x, w: F.linear(x[None], w)[0],
    ):

        def loss(x: torch.Tensor, w: Any, product: Any = product) -> torch.Tensor:
            return (product(x, w) * up).sum()

        grads = []
        for fn in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
            w.grad, leaf = None, x.clone().requires_grad_()
            fn(leaf, w).backward()
            grads.append((leaf.grad, w.grad))
        for eager, compiled in zip(*grads, strict=True):
            assert type(compiled) is torch.Tensor
            close(compiled, eager)


def test_a_changed_weight_is_seen() -> None:
    model = Net("int8_row")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 96)
    with torch.no_grad():
        before = compiled(x)
        model.first.weight.data.mul_(-2)
        after = compiled(x)
        close(after, model(x))
    assert not torch.allclose(before, after)


def test_another_scheme_gets_another_graph() -> None:
    linear = torch.compile(F.linear, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(4, 96)
    with torch.no_grad():
        for i, name in enumerate(["int8_row", "int4_bits", "nf4_double"], 1):
            for w in (quantized(name), quantized(name)):  # equal specs share a graph, whatever the values
                close(linear(x, w), F.linear(x, w))
            assert graphs() == i


def test_autocast() -> None:
    model, x = Net("int8_row"), torch.randn(4, 96)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        y = compiled(x)
        assert y.dtype is torch.bfloat16
        torch.testing.assert_close(y, model(x), rtol=2e-2, atol=0.2)


def test_structure_inside_a_graph() -> None:
    """Views, casts and copies of a weight may stand in the traced function."""
    w, x = quantized("int8_group"), torch.randn(4, 96)

    def fn(x: torch.Tensor, w: Any) -> torch.Tensor:
        top, rest = w.split([8, 24])
        return F.linear(x, torch.cat([rest, top])) + F.linear(x[:, :64], w[:, :64].contiguous()) + w.dequantize().sum()

    with torch.no_grad():
        close(torch.compile(fn, fullgraph=True, backend="aot_eager")(x, w), fn(x, w))


def test_a_compiled_function_may_return_a_weight() -> None:
    w = quantized("int4_bits")
    fn = torch.compile(lambda w: (w.t(), w.detach(), w[8:16].clone()), fullgraph=True, backend="aot_eager")
    for mine, theirs in zip(fn(w), (w.t(), w, w[8:16]), strict=True):
        assert isinstance(mine, QT)
        assert (mine.spec, mine.axes, mine.shape) == (theirs.spec, theirs.axes, theirs.shape)
        assert torch.equal(mine.dequantize(), theirs.dequantize())
    part = torch.compile(lambda w: w[8:16], fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"clone\(\) a part that a compiled function returns"):
        part(w)


def test_no_warning_and_no_count_is_left_by_tracing() -> None:
    model = Net("int8_dynamic")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", pw.FallbackWarning)
        torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")(torch.randn(4, 96))
    assert pw.fallbacks() == {}

"""together(): layers with one input in one call, with the bits each has alone; and no result outlives its call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.inference import fused_linear
from pennyweight.kernels.cpu import library
from tests.inference.test_freeze import SCHEMES
from tests.tensors import quantized

pytestmark = pytest.mark.skipif(library.available() is not True, reason="no native library here")
LAYERS = {"q_proj": 48, "k_proj": 16, "v_proj": 19}
TOGETHER = [
    "int8_row", "int4_group", "tinygemm", "int8_dynamic", "int8_dynamic_int4", "uint8_dynamic_int4", "int8_groups",
    "int8_groups_asymmetric_int4",
]  # fmt: skip


def attention(scheme: str = "int8_row", dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
    torch.manual_seed(0)
    model = nn.ModuleDict()
    name, act = SCHEMES[scheme]
    for i, (child, n) in enumerate(LAYERS.items()):
        layer = nn.Linear(96, n, bias=i != 1).to(dtype)
        w = quantized(name, (n, 96), dtype, act)
        layer.weight = nn.Parameter(w.to_layout("cpu"), requires_grad=False)
        model[child] = layer.requires_grad_(False)
    return model


class Counter:
    """How many calls were of several layers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        bind = fused_linear._bind

        def counted(cases: Any) -> Any:
            run = bind(cases)
            self.calls += run is not None
            return run

        monkeypatch.setattr(fused_linear, "_bind", counted)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    return Counter(monkeypatch)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))


def alone(model: nn.ModuleDict, x: Tensor) -> list[Tensor]:
    return [layer(x) for layer in model.values()]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("isa", [*library.isas()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", TOGETHER)
def test_the_bits_that_each_has_alone(
    scheme: str, dtype: torch.dtype, isa: str, threads: int, counter: Counter
) -> None:
    model = attention(scheme, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    library.use_isa(isa)
    shapes = [(1, 96), (16, 96), (2, 3, 96), (96,), (0, 96), (3, 96)]
    try:
        inputs = [torch.randn(shape, dtype=dtype) for shape in shapes]
        inputs.append(torch.randn(5, 200, dtype=dtype)[:, 7:103])  # rows apart
        for i, x in enumerate(inputs):
            assert same(pw.inference.together(x, list(model.values())), alone(model, x))
            assert counter.calls == i + 1
        pw.inference.freeze_(model)
        assert same(pw.inference.together(x, list(model.values())), alone(model, x))
        assert counter.calls == len(inputs) + 1
    finally:
        torch.set_num_threads(before)
        library.use_isa("")


def hooked(model: nn.ModuleDict) -> None:
    model["k_proj"].register_forward_hook(lambda module, args, y: y * 2)


def patched(model: nn.ModuleDict) -> None:
    model["v_proj"].forward = lambda x: x * 2


def trained(model: nn.ModuleDict) -> None:
    model["q_proj"].bias.requires_grad_(True)


def exact(model: nn.ModuleDict) -> None:
    model["q_proj"] = nn.Linear(96, 48)


def wide(model: nn.ModuleDict) -> None:
    model["k_proj"].weight = nn.Parameter(quantized("int4_group", (16, 96)).to_layout("cpu"), requires_grad=False)


@pytest.mark.parametrize("change", [hooked, patched, trained, exact, wide])
def test_layers_that_cannot_be_one_call_go_alone(change: Callable[[nn.ModuleDict], None], counter: Counter) -> None:
    model, x = attention(), torch.randn(2, 96)
    change(model)
    assert same(pw.inference.together(x, list(model.values())), alone(model, x))
    assert counter.calls == 0


def test_inputs_that_go_alone(counter: Counter) -> None:
    model = attention()
    layers = list(model.values())
    for x in (torch.randn(17, 96), torch.randn(1, 96, requires_grad=True)):
        assert same(pw.inference.together(x, layers), alone(model, x))
    with torch.autocast("cpu", torch.bfloat16):
        assert same(pw.inference.together(x, layers), alone(model, x))
    assert same(pw.inference.together(x, layers[:1]), [layers[0](x)])
    static = attention("int8_static")
    assert same(pw.inference.together(x.detach(), list(static.values())), alone(static, x.detach()))
    assert counter.calls == 0
    with pytest.raises(ValueError, match=r"input \(2, 95\)"):
        pw.inference.together(torch.randn(2, 95), layers)


def test_a_gradient_reaches_the_input() -> None:
    model, x = attention(), torch.ones(1, 96, requires_grad=True)
    (found,) = torch.autograd.grad(sum(y.sum() for y in pw.inference.together(x, list(model.values()))), x)
    (expected,) = torch.autograd.grad(sum(y.sum() for y in alone(model, x)), x)
    assert torch.equal(found, expected)


def test_it_compiles_without_a_break() -> None:
    model, x = attention(), torch.randn(1, 96)

    def run(x: Tensor) -> list[Tensor]:
        return pw.inference.together(x, list(model.values()))

    assert same(torch.compile(run, fullgraph=True, backend="aot_eager")(x), alone(model, x))


# -- nothing of a call is kept for another ---------------------------------------------------------------------------

WRITES: dict[str, Callable[[nn.ModuleDict, Tensor], object]] = {
    "weight": lambda m, x: m["k_proj"].weight.mul_(2),
    "weight.data": lambda m, x: setattr(m["k_proj"].weight, "data", quantized("int8_row", (16, 96)).to_layout("cpu")),
    "codes.data": lambda m, x: m["k_proj"].weight.parts.codes.data.add_(1),
    "scale through numpy": lambda m, x: m["k_proj"].weight.parts.scale.numpy().__imul__(2),
    "a new weight": lambda m, x: setattr(m["k_proj"], "weight", nn.Parameter(torch.ones(16, 96))),
    "bias.data": lambda m, x: m["v_proj"].bias.data.add_(1),
    "bias through numpy": lambda m, x: m["v_proj"].bias.numpy().__iadd__(1),
    "input": lambda m, x: x.mul_(2),
    "input.data": lambda m, x: x.data.mul_(2),
    "input through numpy": lambda m, x: x.numpy().__imul__(2),
    "input under inference mode": lambda m, x: torch.inference_mode()(x.mul_)(2),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_what_is_changed_between_the_calls_of_frozen_siblings_is_seen(write: str, inference: bool) -> None:
    model = attention()
    pw.inference.freeze_(model)
    with torch.inference_mode() if inference else torch.no_grad():
        x = torch.randn(1, 96)
        for _ in range(3):  # q, k and v were seen to share an input
            alone(model, x)
            pw.inference.together(x, list(model.values()))
        model["q_proj"](x)
        WRITES[write](model, x)
        for name in ("k_proj", "v_proj"):
            layer = model[name]
            expected = torch.nn.functional.linear(x, layer.weight.clone(), layer.bias)
            assert torch.equal(layer(x), expected)
        assert same(pw.inference.together(x, list(model.values())), alone(model, x))

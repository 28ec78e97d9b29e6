"""Tracers, modes and transforms see a product with a quantized weight as they see one with a float weight."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import pennyweight as pw
from pennyweight.planning.configs.by_name import by_name

# torch deprecates what it itself uses for forward-mode differentiation
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")
CONFIGS = ["int8", "int8-dynamic", "int4", "nf4", "float8-dynamic"]
LOOSE = {"int8-dynamic": 0.05, "float8-dynamic": 0.1}  # inputs are rounded; elsewhere only the order of sums differs


def pair(name: str, frozen: bool = False) -> tuple[nn.Module, nn.Module, Tensor]:
    """A quantized model, a float model of the same values, an input."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 48), nn.GELU(), nn.Linear(48, 64, bias=False)).requires_grad_(False)
    twin = nn.Sequential(nn.Linear(128, 48), nn.GELU(), nn.Linear(48, 64, bias=False)).requires_grad_(False)
    pw.quantize_(model, by_name(name))
    for mine, theirs in zip(model, twin, strict=True):
        if isinstance(mine, nn.Linear):
            theirs.weight.copy_(mine.weight.dequantize())
            if mine.bias is not None:
                theirs.bias.copy_(mine.bias)
    if frozen:
        pw.inference.freeze_(model)
    return model, twin, torch.randn(5, 128)


def near(a: Tensor, b: Tensor, name: str) -> bool:
    return bool((a - b).norm() <= LOOSE.get(name, 1e-4) * b.norm())


def total(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().sum()


def tangent(model: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.cos()))).tangent
        assert out is not None
        return out


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "grad": lambda m, x: torch.func.grad(total(m))(x),
    "vjp": lambda m, x: torch.func.vjp(m, x)[1](torch.ones(5, 64))[0],
    "jvp": lambda m, x: torch.func.jvp(m, (x,), (x.cos(),))[1],
    "vmap": lambda m, x: torch.vmap(m)(x),
    "vmap of rows": lambda m, x: torch.vmap(m, in_dims=1, out_dims=1)(x.unsqueeze(2).expand(5, 128, 3).mT),
    "vmap of grad": lambda m, x: torch.vmap(torch.func.grad(total(m)))(x),
    "jacrev": lambda m, x: torch.func.jacrev(m)(x[0]),
    "jacfwd": lambda m, x: torch.func.jacfwd(m)(x[0]),
    "hessian": lambda m, x: torch.func.hessian(total(m))(x[0, :16].repeat(8)),
    "forward mode": tangent,
    "functional_call": lambda m, x: torch.func.functional_call(m, dict(m.named_parameters()), (x,)),
    "matmul under grad": lambda m, x: torch.func.grad(lambda y: (y @ m[0].weight.t()).square().sum())(x),
    "matmul under jvp": lambda m, x: torch.func.jvp(lambda y: y @ m[0].weight.t(), (x,), (x.cos(),))[1],
    "matmul under vmap": lambda m, x: torch.vmap(lambda y: m[0].weight @ y)(x),
}


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_give_what_float_gives(transform: str, name: str, frozen: bool) -> None:
    model, twin, x = pair(name, frozen)
    run = TRANSFORMS[transform]
    with torch.no_grad():
        model(x)  # so that the kernels are bound
    assert near(run(model, x), run(twin, x), name)


def test_bias_over_which_vmap_runs() -> None:
    model, twin, x = pair("int8")
    biases = torch.randn(5, 48)
    w, v = model[0].weight, twin[0].weight
    got, due = (torch.vmap(lambda y, b, w=w: F.linear(y, w, b))(x, biases) for w in (w, v))
    assert near(got, due, "int8")


def test_a_transform_around_a_trained_weight_says_what_to_do() -> None:
    model, _, x = pair("int8")
    model[0].weight.requires_grad_(True)
    with pytest.raises(NotImplementedError, match=r"requires_grad_\(False\)"):
        torch.func.grad(total(model))(x)


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_jit_trace_holds_the_op(name: str, frozen: bool) -> None:
    model, _, x = pair(name, frozen)
    traced = torch.jit.trace(model, x)
    other = torch.randn(3, 128)
    assert torch.equal(traced(other), model(other))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", CONFIGS)
def test_make_fx_holds_the_op(name: str, mode: str) -> None:
    model, _, x = pair(name)
    graph = make_fx(model, tracing_mode=mode, _allow_non_fake_inputs=True)(x)
    assert "pennyweight.linear" in str([node.target for node in graph.graph.nodes])
    other = torch.randn(5, 128)
    assert torch.equal(graph(other), model(other))


@pytest.mark.parametrize("name", CONFIGS)
def test_fake_tensors(name: str) -> None:
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(128, 64))
        pw.quantize_(model, by_name(name))
        y = model(torch.randn(3, 128))
        assert type(y).__name__ == "FakeTensor"
        assert y.shape == (3, 64)


@pytest.mark.parametrize("name", CONFIGS)
def test_flops_are_counted(name: str) -> None:
    model, twin, x = pair(name)
    counted = []
    for m in (model, twin):
        with FlopCounterMode(display=False) as counter:
            m(x)
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] == 2 * 5 * (128 * 48 + 48 * 64)


def test_a_negated_view() -> None:
    model, _, x = pair("int4")
    assert torch.equal(model(torch._neg_view(x)), model(-x))
    z = torch.complex(torch.randn(5, 128), x)
    assert torch.equal(model(z.conj().imag), model(-x))


@pytest.mark.parametrize("spec", ["int8", "nf4"])
def test_one_axis_that_is_not_contiguous(spec: str) -> None:
    plain = pair(spec)[0][0].weight.spec.with_(layout="plain")
    x = torch.randn(256)[::2]
    got = pw.AffineQuantizedTensor.from_float(x, plain)
    assert torch.equal(got.dequantize(), pw.AffineQuantizedTensor.from_float(x.contiguous(), plain).dequantize())


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("config", ["int8", "int8-dynamic", "int4"])
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d])
def test_tracing_a_convolution_is_refused_and_the_next_trace_works(kind: type[nn.Module], config: str) -> None:
    net = nn.Sequential(kind(8, 8, 3)).eval().requires_grad_(False)
    pw.quantize_(net, config, lambda module, name: isinstance(module, kind))
    with pytest.raises(RuntimeError, match=r"convolution in layer '0' .*torch\.export"):
        torch.jit.trace(
            net, torch.ones(1, *net[0].weight.shape[1:2], *(6,) * (net[0].weight.ndim - 2)), check_trace=False
        )
    x, recurrent = torch.randn(2, 3, 8), nn.GRU(8, 8, batch_first=True).eval()
    assert torch.equal(torch.jit.trace(recurrent, (x,), check_trace=False)(x)[0], recurrent(x)[0])

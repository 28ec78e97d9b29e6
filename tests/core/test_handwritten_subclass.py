"""A tensor subclass written by hand, with __torch_dispatch__ alone, lives beside ours in one model."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

import pennyweight as pw
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from tests.tensors import SPECS

HANDLERS: dict[Any, Callable[..., Any]] = {}


def register_op(ops: list[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        HANDLERS.update(dict.fromkeys(ops, fn))
        return fn

    return add


def int8_symmetric_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale a row: max|x| / 127.5; codes by the reciprocal, nearest, ties to even."""
    scale = torch.maximum(-x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)) / 127.5
    return (x * (1.0 / scale)).round().clamp(-128, 127).to(torch.int8), scale


class Int8SymmetricTensor(torch.Tensor):
    @staticmethod
    @torch._dynamo.disable
    def __new__(cls: Any, int_data: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, int_data.shape, strides=int_data.stride(), storage_offset=int_data.storage_offset(),
            dtype=scale.dtype, device=int_data.device,
        )  # fmt: skip

    @torch._dynamo.disable
    def __init__(self, int_data: torch.Tensor, scale: torch.Tensor) -> None:
        self.int_data, self.scale = int_data, scale

    def __tensor_flatten__(self) -> Any:
        return ["int_data", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: Any, outer_size: Any = None, outer_stride: Any = None) -> Any:
        return Int8SymmetricTensor(parts["int_data"], parts["scale"])

    def _stable_hash_for_caching(self) -> str:
        return "Int8SymmetricTensor"

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Int8SymmetricTensor(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in HANDLERS:
            raise AssertionError(f"Int8SymmetricTensor does not yet support op: {func}")
        return HANDLERS[func](func, *args, **(kwargs or {}))


@register_op([torch.ops.aten.mm.default])
def _mm(func: Any, x: torch.Tensor, w: Any) -> torch.Tensor:
    return torch.mm(x, w.int_data.to(x.dtype)) * w.scale


@register_op([torch.ops.aten.detach.default, torch.ops.aten.t.default])
def _view(func: Any, w: Any) -> Any:
    return return_and_correct_aliasing(func, (w,), {}, Int8SymmetricTensor(func(w.int_data), func(w.scale)))


class QuantizedLinear(nn.Linear):
    """Module swapping, the other way to the same numbers."""

    int_data: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def from_float(cls, layer: nn.Linear) -> "QuantizedLinear":
        new = cls(layer.in_features, layer.out_features, bias=layer.bias is not None)
        new.weight, new.bias = layer.weight, layer.bias
        new.int_data, new.scale = int8_symmetric_quantize(layer.weight.detach())
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.int_data.t().to(x.dtype) * self.scale.t()
        return y if self.bias is None else y + self.bias


def toy() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 32, bias=False)).eval()


def swapped(model: nn.Module) -> nn.Module:
    new = copy.deepcopy(model)
    for name, child in list(new.named_children()):
        if isinstance(child, nn.Linear):
            setattr(new, name, QuantizedLinear.from_float(child))
    return new


def side_by_side(model: Any) -> Any:
    """The first layer by hand, the second by ours."""
    new = copy.deepcopy(model)
    new[0].weight = nn.Parameter(Int8SymmetricTensor(*int8_symmetric_quantize(new[0].weight.detach())))
    new[2].weight = nn.Parameter(QT.from_float(new[2].weight, SPECS["int8_row"]), requires_grad=False)
    return new


def test_both_take_the_same_codes() -> None:
    x = torch.randn(32, 64)
    codes, scale = int8_symmetric_quantize(x)
    ours = QT.from_float(x, SPECS["int8_row"])
    assert torch.equal(ours.codes, codes)
    assert torch.equal(ours.scale, scale)


@pytest.mark.parametrize("shape", [(64, 64), (1, 64)], ids=str)
def test_side_by_side_equals_module_swapping(shape: tuple[int, ...]) -> None:
    model, x = toy(), torch.randn(*shape)
    expected = swapped(model)(x)
    both = side_by_side(model)
    with torch.no_grad(), pw.kernels.strict():
        torch.testing.assert_close(both(x), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(copy.deepcopy(both[2])(torch.relu(both[0](x))), expected, rtol=1e-5, atol=1e-5)
    state = both.state_dict()
    assert [type(w) for w in state.values()] == [Int8SymmetricTensor, QT]


def test_side_by_side_compiles() -> None:
    model, x = toy(), torch.randn(16, 64)
    both = side_by_side(model)
    with torch.no_grad():
        expected = both(x)
        compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.compile(both, fullgraph=True)(x), expected, rtol=1e-5, atol=1e-5)


def test_an_op_between_the_two_is_left_to_the_other() -> None:
    """Neither class swallows what it does not know: the hand-written one says so itself."""
    ours = QT.from_float(torch.randn(64, 64), SPECS["int8_row"])
    other = Int8SymmetricTensor(*int8_symmetric_quantize(torch.randn(64, 64)))
    with pytest.raises((AssertionError, NotImplementedError, TypeError)):
        torch.add(other, ours)


class Wrapped(torch.Tensor):
    """A wrapper without memory of its own, as DTensor and logging tensors are; unwraps, calls, wraps."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        return tree_map(lambda o: Wrapped(o) if isinstance(o, torch.Tensor) else o, out)


def unwrap(x: Any) -> Any:
    return x.inner if isinstance(x, Wrapped) else x


class Opaque(Wrapped):
    """As Wrapped, but it knows no op."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


@pytest.mark.parametrize("freeze", [False, True], ids=["quantized", "frozen"])
@pytest.mark.parametrize(
    "config",
    [pw.Int8WeightOnlyConfig(), pw.Int8DynamicActivationInt8WeightConfig(), pw.Int4WeightOnlyConfig(32),
     pw.Float8WeightOnlyConfig()],
    ids=lambda c: type(c).__name__,
)  # fmt: skip
def test_a_wrapper_as_input_is_asked_first(config: pw.AOBaseConfig, freeze: bool) -> None:
    """Kernels read memory, and a wrapper has none."""
    layer, x = nn.Linear(64, 32), torch.randn(3, 64)
    pw.quantize_(layer, config)
    expected = layer(x)
    if freeze:
        pw.inference.freeze_(layer)
    for _ in range(2):  # the first call binds a kernel
        y: Any = layer(Wrapped(x))
        torch.testing.assert_close(unwrap(y), expected)
        assert torch.equal(layer(x), expected)
    w = layer.weight
    wrapped: Any = F.linear(x, w, Wrapped(layer.bias.detach()))
    torch.testing.assert_close(unwrap(wrapped), expected)
    for product in (layer.weight @ Wrapped(x.t()), (Wrapped(x) @ layer.weight.t()).t()):
        torch.testing.assert_close(unwrap(product).t(), expected - layer.bias, rtol=1e-4, atol=1e-4)


def test_a_wrapper_that_knows_no_op_is_an_error() -> None:
    w = QT.from_float(torch.randn(32, 64), SPECS["int8_row"])
    for call in (lambda x: F.linear(x, w), lambda x: w @ x.t(), lambda x: torch.add(w, x)):
        with pytest.raises(TypeError, match="NotImplemented"):
            call(Opaque(torch.randn(32, 64)))

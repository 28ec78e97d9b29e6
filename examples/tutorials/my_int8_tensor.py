"""Two ways to quantize by hand, a module swap and a tensor subclass, and the same result with Pennyweight.

python examples/tutorials/my_int8_tensor.py
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

import pennyweight as pw

aten = torch.ops.aten


class ToyModel(nn.Module):
    def __init__(self, m: int = 64, n: int = 128, k: int = 32) -> None:
        super().__init__()
        self.linear1 = nn.Linear(m, n, bias=False)
        self.linear2 = nn.Linear(n, k, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(torch.relu(self.linear1(x)))


def int8_symmetric_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, N] -> int8 codes [M, N], scale [M, 1]: one scale per row, max|x| / 127.5, codes rounded to nearest."""
    low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
    scale = torch.maximum(-low, high) / ((127 - -128) / 2)
    return torch.clamp(torch.round(x * (1.0 / scale)), -128, 127).to(torch.int8), scale


# -- the first way: a module with codes ---------------------------------------------------------------------------


class QuantizedLinear(nn.Linear):
    """A linear layer with int8 codes next to its weight. Each kind of module and each scheme needs such a class."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.int8_weight.t().to(x.dtype) * self.scale.t()

    @classmethod
    def from_float(cls, layer: nn.Linear) -> "QuantizedLinear":
        new = cls(layer.in_features, layer.out_features, bias=False)
        new.weight = layer.weight
        new.int8_weight, new.scale = int8_symmetric_quantize(layer.weight.detach())
        return new


def swap_linear_(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, QuantizedLinear.from_float(child))
        else:
            swap_linear_(child)


# -- the second way: a tensor with codes ---------------------------------------------------------------------------


class Int8SymmetricTensor(Tensor):
    """Looks like a float matrix and stores int8 codes and one scale per row. Modules do not change."""

    @staticmethod
    @torch._dynamo.disable
    def __new__(cls, int_data: Tensor, scale: Tensor) -> "Int8SymmetricTensor":
        return Tensor._make_wrapper_subclass(
            cls, int_data.shape, strides=int_data.stride(), storage_offset=int_data.storage_offset(),
            dtype=scale.dtype, device=int_data.device,
        )  # fmt: skip

    @torch._dynamo.disable
    def __init__(self, int_data: Tensor, scale: Tensor) -> None:
        assert int_data.dtype is torch.int8
        assert int_data.ndim == 2
        assert scale.ndim == 2
        self.int_data, self.scale = int_data, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Names of the inner tensors, and other data needed to rebuild the tensor: here none."""
        return ["int_data", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: Any, outer_size: Any = None, outer_stride: Any = None) -> Tensor:
        assert context is None
        return Int8SymmetricTensor(parts["int_data"], parts["scale"])

    def _stable_hash_for_caching(self) -> str:
        """The static data of this tensor, except its parts, for torch.compile's cache: only its class."""
        return type(self).__name__

    def __repr__(self) -> str:
        return f"Int8SymmetricTensor(shape={tuple(self.shape)}, scale of {tuple(self.scale.shape)})"

    @staticmethod
    def from_float(x: Tensor) -> "Int8SymmetricTensor":
        return Int8SymmetricTensor(*int8_symmetric_quantize(x))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in OPS:
            raise AssertionError(f"Int8SymmetricTensor does not yet support op: {func}")
        return OPS[func](func, args, kwargs or {})


OPS: dict[Any, Callable[..., Any]] = {}


def register_op(ops: list[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        OPS.update(dict.fromkeys(ops, fn))
        return fn

    return add


@register_op([aten.mm.default])
def int8_mm(func: Any, args: Any, kwargs: Any) -> Tensor:
    x, w = args  # F.linear transposes the weight first, so w.scale is [1, N] here
    return torch.mm(x, w.int_data.to(x.dtype)) * w.scale


@register_op([aten.detach.default, aten.t.default])
def int8_view(func: Any, args: Any, kwargs: Any) -> Tensor:
    w = args[0]
    out = Int8SymmetricTensor(func(w.int_data), func(w.scale))
    return return_and_correct_aliasing(func, args, kwargs, out)  # the new tensor is a view of the old one


@register_op([aten.clone.default])
def int8_clone(func: Any, args: Any, kwargs: Any) -> Tensor:
    return Int8SymmetricTensor(args[0].int_data.clone(), args[0].scale.clone())


@register_op([aten.view.default, aten._unsafe_view.default])
def int8_reshape(func: Any, args: Any, kwargs: Any) -> Tensor:
    w, size = args
    assert tuple(size) == tuple(w.shape), "a matrix with one scale per row keeps its shape"
    return return_and_correct_aliasing(func, args, kwargs, Int8SymmetricTensor(w.int_data, w.scale))


def insert_(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    for child in module.modules():
        if isinstance(child, nn.Linear):
            child.weight = nn.Parameter(make(child.weight.detach()), requires_grad=True)


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    model, x = ToyModel().eval(), torch.randn(64, 64, 64)
    y = model(x)

    swapped = copy.deepcopy(model)
    swap_linear_(swapped)
    by_module = swapped(x)
    print(f"module swap      {type(swapped.linear1).__name__}: {float((by_module - y).abs().max()):.5f} from float")

    subclassed = copy.deepcopy(model)
    insert_(subclassed, Int8SymmetricTensor.from_float)
    by_tensor = subclassed(x)
    assert torch.allclose(by_tensor, by_module)
    print(f"tensor subclass  {subclassed.linear1.weight!r}: equal to the swapped module")

    compiled = torch.compile(subclassed, fullgraph=True)
    assert torch.allclose(compiled(x), by_module, atol=1e-6)
    print("compiled         equal to eager")

    # The same scheme with a config. The codes are identical; the kernel adds in another order.
    ours = copy.deepcopy(model)
    report = pw.quantize_(ours, pw.Int8WeightOnlyConfig())
    for mine, theirs in (
        (ours.linear1.weight, subclassed.linear1.weight),
        (ours.linear2.weight, subclassed.linear2.weight),
    ):
        assert torch.equal(mine.codes, theirs.int_data)
        assert torch.equal(mine.scale, theirs.scale)
    torch.testing.assert_close(ours(x), by_module, rtol=1e-5, atol=1e-5)
    print(f"Pennyweight      {report.summary()}: the same codes and scales")

    # The handwritten class raises an error for unregistered ops; Pennyweight's supports every op.
    try:
        subclassed.linear1.weight + 1
    except AssertionError as error:
        print(f"by hand, w + 1:  {error}")
    else:
        raise AssertionError("an op that is not registered ran")

    # Both in one model: the first layer by hand, the second with quantize_.
    both = copy.deepcopy(model)
    both.linear1.weight = nn.Parameter(Int8SymmetricTensor.from_float(model.linear1.weight.detach()))
    pw.quantize_(both, pw.Int8WeightOnlyConfig(), filter_fn=lambda module, name: name == "linear2")
    torch.testing.assert_close(both(x), by_module, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.compile(both, fullgraph=True)(x), by_module, rtol=1e-5, atol=1e-5)
    held = {name: type(value).__name__ for name, value in both.state_dict().items()}
    assert held == {"linear1.weight": "Int8SymmetricTensor", "linear2.weight": "AffineQuantizedTensor"}
    twin = copy.deepcopy(both)
    assert isinstance(twin.linear1.weight, Int8SymmetricTensor)
    assert isinstance(twin.linear1.weight, nn.Parameter)
    assert torch.equal(twin(x), both(x))
    fresh = ToyModel()
    fresh.load_state_dict(both.state_dict(), assign=True)
    assert torch.equal(fresh(x), both(x))
    print(f"both             {held}: the same outputs, also compiled, copied and loaded")


if __name__ == "__main__":
    main()

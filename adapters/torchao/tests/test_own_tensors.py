"""Tensors as the field's tutorials write them: a new dtype of both eras, one that trains, a hand-written wrapper."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import return_and_correct_aliasing

from pennyweight_torchao.dtypes.utils import Layout, PlainLayout
from pennyweight_torchao.quantization.quant_primitives import (
    MappingType,
    choose_qparams_affine,
    dequantize_affine,
    quantize_affine,
)
from pennyweight_torchao.utils import TorchAOBaseTensor, benchmark_model, unwrap_tensor_subclass

aten = torch.ops.aten
INT16 = (torch.int16, -(2**15), 2**15 - 1)


class Int16Tensor(TorchAOBaseTensor):
    """int16 with a scale per row, every method written by hand, the context of flattening a list."""

    def __new__(
        cls, int_data: Any, scale: Any, transposed: bool = False, dtype: Any = None, requires_grad: bool = False
    ) -> Any:
        shape = tuple(reversed(int_data.shape)) if transposed else int_data.shape
        return torch.Tensor._make_wrapper_subclass(
            cls, shape, device=int_data.device, dtype=dtype or scale.dtype, requires_grad=requires_grad
        )

    def __init__(
        self, int_data: Any, scale: Any, transposed: bool = False, dtype: Any = None, requires_grad: bool = False
    ) -> None:
        self.int_data, self.scale, self.transposed = int_data, scale, transposed

    def __tensor_flatten__(self) -> Any:
        return ["int_data", "scale"], [self.transposed, self.dtype, self.requires_grad]

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, outer_size: Any = None, outer_stride: Any = None) -> Any:
        return cls(inner["int_data"], inner["scale"], *context)

    @classmethod
    def from_float(cls, x: torch.Tensor) -> Any:
        block = (1, x.shape[-1])
        scale, zero_point = choose_qparams_affine(x, MappingType.SYMMETRIC, block, *INT16, None, x.dtype)
        return cls(quantize_affine(x, block, scale, zero_point, *INT16), scale)

    def dequantize(self) -> torch.Tensor:
        zero_point = torch.zeros_like(self.scale, dtype=torch.int32)
        x = dequantize_affine(
            self.int_data, (1, self.int_data.shape[-1]), self.scale, zero_point, *INT16, output_dtype=self.dtype
        )
        return x.t() if self.transposed else x

    def _apply_fn_to_data(self, fn: Any) -> Any:
        return type(self)(fn(self.int_data), fn(self.scale), self.transposed, self.dtype)


@Int16Tensor.implements([aten.detach.default, aten.clone.default])
def _copies(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return return_and_correct_aliasing(func, args, kwargs, args[0]._apply_fn_to_data(lambda x: func(x, **kwargs)))


@Int16Tensor.implements(F.linear)  # as the founding era wrote it, where one decorator served both kinds
def _linear(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    x, w, *bias = args
    return func(x, w.dequantize() if isinstance(w, Int16Tensor) else w, *bias, **kwargs)


torch.serialization.add_safe_globals([Int16Tensor])


def test_a_new_dtype(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 32)).eval()
    plain, x = copy.deepcopy(model), torch.randn(3, 64)
    for linear in model:
        linear.weight = nn.Parameter(Int16Tensor.from_float(linear.weight), requires_grad=False)
    with torch.no_grad():
        got = model(x)
        torch.testing.assert_close(got, plain(x), rtol=1e-3, atol=1e-3)
        assert not torch.equal(got, plain(x))
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), got)
        assert torch.equal(copy.deepcopy(model)(x), got)
        torch.save(model.state_dict(), tmp_path / "m.pt")
        plain.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True), assign=True)
        assert torch.equal(plain(x), got)
        assert benchmark_model(model, 2, (x,)) > 0
        exported = torch.export.export(unwrap_tensor_subclass(model), (x,))
        torch.testing.assert_close(exported.module()(x), got)


# -- one that trains ---------------------------------------------------------------------------------------------------


class _Quantize(torch.autograd.Function):
    """A differentiable constructor: the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return TrainableTensor.from_float(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: Any) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return F.linear(x, w.dequantize())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.dequantize(), grad.flatten(0, -2).t() @ x.flatten(0, -2)


class TrainableTensor(Int16Tensor):
    """Also adds in place, requantizing."""


@TrainableTensor.implements_torch_function(F.linear)
def _trainable_linear(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return _Linear.apply(args[0], args[1])


@TrainableTensor.implements(aten.add_.Tensor)
def _add_(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    w, other = args
    new = TrainableTensor.from_float(w.dequantize().add(other, **kwargs))
    w.int_data.copy_(new.int_data)
    w.scale.copy_(new.scale)
    return w


@TrainableTensor.implements(aten.add.Tensor)
def _add(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return func(*(x.dequantize() if isinstance(x, TrainableTensor) else x for x in args), **kwargs)


def test_one_that_trains_as_the_float_weight_does() -> None:
    teacher = nn.Linear(16, 8, bias=False)
    student, plain = nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)
    plain.load_state_dict(student.state_dict())
    student.weight = nn.Parameter(_Quantize.apply(student.weight.detach()), requires_grad=True)
    assert type(student.weight) is TrainableTensor
    held = student.weight.int_data.data_ptr()
    losses = []
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-5) for m in (student, plain)]
    for _ in range(40):
        x = torch.randn(32, 16)
        for model, optimizer in zip((student, plain), optimizers, strict=True):
            loss = F.mse_loss(model(x), teacher(x).detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-2] < 0.03 * losses[0]
    torch.testing.assert_close(student.weight.dequantize(), plain.weight.detach(), rtol=0, atol=2e-3)
    assert student.weight.int_data.data_ptr() == held
    with pytest.raises(NotImplementedError, match=r"aten\.zeros_like"):  # for the moments
        torch.optim.AdamW(student.parameters()).step()


def test_compiled_training_is_eager_training() -> None:
    model = nn.Sequential(nn.Linear(16, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))
    for linear in (model[0], model[2]):
        linear.weight = nn.Parameter(_Quantize.apply(linear.weight.detach()), requires_grad=True)
    compiled = torch.compile(model, fullgraph=True)
    for rows in (5, 9):
        x = torch.randn(rows, 16)
        model(x).sum().backward()
        want = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        compiled(x).sum().backward()
        for p, grad in zip(model.parameters(), want, strict=True):
            torch.testing.assert_close(p.grad, grad)
        model.zero_grad()


def test_the_constructor_passes_gradients_on() -> None:
    x = torch.randn(8, 16, requires_grad=True)
    F.linear(torch.ones(1, 16), _Quantize.apply(x)).sum().backward()
    assert torch.equal(x.grad, torch.ones(8, 16))


# -- the founding era --------------------------------------------------------------------------------------------------


class OldTensor(TorchAOBaseTensor):
    """One that leaves the storage to an implementation chosen by a layout."""

    def __new__(cls, impl: Any, shape: Any, dtype: Any = None, requires_grad: bool = False) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, requires_grad=requires_grad)

    def __init__(self, impl: Any, shape: Any, dtype: Any = None, requires_grad: bool = False) -> None:
        self.tensor_impl = impl

    def __tensor_flatten__(self) -> Any:
        return ["tensor_impl"], [self.shape, self.dtype, self.requires_grad]

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, outer_size: Any, outer_stride: Any) -> Any:
        return cls(inner["tensor_impl"], *context)

    @classmethod
    def from_float(cls, x: torch.Tensor, _layout: Layout) -> Any:
        made = Int16Tensor.from_float(x)
        return cls(cls.get_tensor_impl_constructor(type(_layout))(made.int_data, made.scale, _layout), x.shape, x.dtype)

    def dequantize(self) -> torch.Tensor:
        return Int16Tensor(*self.tensor_impl.get_plain()).dequantize()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = self._get_to_kwargs(*args, **kwargs)
        impl = self.tensor_impl.to(kwargs.pop("device"))
        return type(self)(impl, self.shape, **kwargs)  # what is left are arguments of the constructor

    def _apply_fn_to_data(self, fn: Any) -> Any:
        return type(self)(fn(self.tensor_impl), self.shape, self.dtype)


@OldTensor.register_layout(PlainLayout)
class OldImpl(TorchAOBaseTensor):
    """Its storage, which has the lists."""

    tensor_data_names = ["int_data", "scale"]  # noqa: RUF012
    tensor_attribute_names = ["_layout"]  # noqa: RUF012

    def __new__(cls, int_data: Any, scale: Any, _layout: Layout) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, int_data.shape, dtype=int_data.dtype)

    def __init__(self, int_data: Any, scale: Any, _layout: Layout) -> None:
        self.int_data, self.scale, self._layout = int_data, scale, _layout

    @classmethod
    def from_plain(cls, int_data: Any, scale: Any, _layout: Layout) -> Any:
        return cls(int_data, scale, _layout)

    def get_plain(self) -> Any:
        return self.int_data, self.scale


@OldTensor.implements([aten.detach.default, aten.clone.default, F.linear])
def _old(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    if func is F.linear:
        return func(args[0], args[1].dequantize(), *args[2:])
    return return_and_correct_aliasing(func, args, kwargs, args[0]._apply_fn_to_data(lambda impl: func(impl, **kwargs)))


torch.serialization.add_safe_globals([OldTensor])


def test_a_dtype_of_the_founding_era(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(64, 32)), torch.randn(3, 64)
    want = Int16Tensor.from_float(model[0].weight.detach())
    model[0].weight = nn.Parameter(OldTensor.from_float(model[0].weight.detach(), PlainLayout()), requires_grad=False)
    w = model[0].weight
    assert type(w.tensor_impl) is OldImpl
    assert w.tensor_impl.get_layout() == PlainLayout()
    got = model(x)
    assert torch.equal(got, F.linear(x, want.dequantize(), model[0].bias))
    assert w.to("meta").tensor_impl.int_data.device.type == "meta"
    assert w.to(torch.float16).dtype is torch.float16
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), got)
    torch.save(model.state_dict(), tmp_path / "m.pt")
    state = torch.load(tmp_path / "m.pt", weights_only=True)
    assert torch.equal(state["0.weight"].dequantize(), want.dequantize())
    with torch.no_grad():
        exported = torch.export.export(unwrap_tensor_subclass(model), (x,))
    torch.testing.assert_close(exported.module()(x), got)


# -- a wrapper with no base of ours ------------------------------------------------------------------------------------


class Symmetric(torch.Tensor):
    """As the first tutorial has it: a plain subclass of torch.Tensor."""

    @staticmethod
    def __new__(cls: Any, int_data: Any, scale: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, int_data.shape, dtype=scale.dtype)

    def __init__(self, int_data: Any, scale: Any) -> None:
        self.int_data, self.scale = int_data, scale

    def __tensor_flatten__(self) -> Any:
        return ["int_data", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, outer_size: Any = None, outer_stride: Any = None) -> Any:
        return cls(inner["int_data"], inner["scale"])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Symmetric({self.int_data}, {self.scale})"

    def _stable_hash_for_caching(self) -> str:
        return f"Symmetric{tuple(self.shape)}{self.scale.dtype}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.t.default):
            new = cls(func(args[0].int_data), func(args[0].scale))
            return return_and_correct_aliasing(func, args, kwargs or {}, new)
        assert func is aten.mm.default, f"Symmetric has no {func}"
        x, w = args
        return func(x, w.int_data.to(x.dtype)) * w.scale


def test_a_plain_wrapper_lives_beside_them() -> None:
    model, x = nn.Sequential(nn.Linear(16, 8, bias=False)), torch.randn(4, 16)
    weight = model[0].weight.detach()
    scale = weight.abs().amax(1, keepdim=True) / 127.5
    codes = torch.clamp(torch.round(weight / scale), -128, 127).to(torch.int8)
    model[0].weight = nn.Parameter(Symmetric(codes, scale), requires_grad=True)
    with torch.no_grad():
        got = model(x)
        torch.testing.assert_close(got, x @ (codes * scale).t())
        torch.testing.assert_close(torch.compile(model)(x), got)
        assert type(model.state_dict()["0.weight"]) is Symmetric
        torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), got)
        unwrap_tensor_subclass(model)
        assert torch.equal(model(x), got)

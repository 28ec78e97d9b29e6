# ruff: noqa: RUF012 (the lists are given as torchao's users give them)
"""TorchAOBaseTensor: what a class derived from it has without writing it, and what it must write."""

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import return_and_correct_aliasing

from pennyweight import AffineQuantizedTensor, Int8WeightOnlyConfig, quantize_
from pennyweight_torchao.base_tensor import TorchAOBaseTensor

aten = torch.ops.aten


class Plain(TorchAOBaseTensor):
    """Names its members, writes no op."""

    tensor_data_names = ["qdata"]
    tensor_attribute_names = ["attr", "device"]
    optional_tensor_data_names = ["zero_point"]
    optional_tensor_attribute_names = ["note"]

    def __new__(cls, qdata: Any, attr: str, device: Any = None, zero_point: Any = None, note: Any = None) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, qdata.shape, device=device or qdata.device, dtype=qdata.dtype)

    def __init__(self, qdata: Any, attr: str, device: Any = None, zero_point: Any = None, note: Any = None) -> None:
        self.qdata, self.attr, self.zero_point, self.note = qdata, attr, zero_point, note


class Rows(TorchAOBaseTensor):
    """int8 rows, the dtype shown to the world kept as an attribute."""

    tensor_data_names = ["codes", "scale"]
    tensor_attribute_names = ["dtype"]

    def __new__(cls, codes: Any, scale: Any, dtype: torch.dtype) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device, dtype=dtype)

    def __init__(self, codes: Any, scale: Any, dtype: torch.dtype) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def from_float(cls, x: Any) -> Any:
        scale = (x.abs().amax(1, keepdim=True) / 127).clamp(min=1e-8)
        return cls(torch.clamp(torch.round(x / scale), -127, 127).to(torch.int8), scale.float(), x.dtype)

    def dequantize(self) -> Any:
        return (self.codes * self.scale).to(self.dtype)


@Rows.implements_torch_function(F.linear)
def _linear(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    x, w, *bias = args
    return F.linear(x, w.dequantize(), *bias)


@Rows.implements(aten.t.default)
def _t(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    w = args[0]
    return return_and_correct_aliasing(func, args, kwargs, Rows(w.codes.t(), w.scale.t(), w.dtype))


torch.serialization.add_safe_globals([Plain, Rows])


def rows(n: int = 5, k: int = 8, dtype: torch.dtype = torch.float32) -> Any:
    return Rows.from_float(torch.randn(n, k, dtype=dtype))


def same(a: Any, b: Any) -> bool:
    names, context = a.__tensor_flatten__()
    return (names, context) == b.__tensor_flatten__() and all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in names
    )


# -- what is made ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_point", [None, torch.ones(2, 3)], ids=["without", "with"])
@pytest.mark.parametrize("note", [None, "n"])
def test_flatten_and_back(zero_point: Any, note: Any) -> None:
    w = Plain(torch.randn(2, 3), "a", None, zero_point, note)
    names, context = w.__tensor_flatten__()
    assert names == ["qdata", "zero_point"][: 1 if zero_point is None else 2]
    assert context == {"attr": "a", "device": torch.device("cpu"), "note": note}
    again = Plain.__tensor_unflatten__({n: getattr(w, n) for n in names}, context, w.size(), w.stride())
    assert same(w, again)
    assert again.zero_point is zero_point
    del context["note"]  # flattened by a release that did not know it
    assert Plain.__tensor_unflatten__({"qdata": w.qdata}, context, None, None).note is None


def test_repr_names_every_member() -> None:
    text = repr(Plain(torch.tensor([[1.5]]), "a", None, None, "n"))
    assert text == "Plain(qdata=tensor([[1.5000]]), attr=a, device=cpu, zero_point=None, note=n)"


@pytest.mark.parametrize("op", [torch.Tensor.clone, torch.Tensor.detach, aten.alias, copy.deepcopy, copy.copy])
def test_copies(op: Any) -> None:
    for w in (Plain(torch.randn(2, 3), "a", None, torch.zeros(2, 3)), rows()):
        got = op(w)
        assert type(got) is type(w)
        assert same(w, got)
        data = w.__tensor_flatten__()[0][0]
        shared = getattr(got, data).data_ptr() == getattr(w, data).data_ptr()
        assert shared == (op not in (torch.Tensor.clone, copy.deepcopy))


def test_contiguous_looks_at_the_data_and_keeps_the_gradient() -> None:
    w = Plain(torch.randn(3, 2).t(), "a", None, torch.randn(3, 2).t()).requires_grad_()
    assert w.is_contiguous()
    got = w.contiguous()
    assert got.qdata.is_contiguous()
    assert got.zero_point.is_contiguous()
    assert torch.equal(got.qdata, w.qdata)
    assert got.grad_fn is not None
    assert got.contiguous() is got


def test_copy_takes_the_numbers() -> None:
    w, v = rows(), rows()
    codes = w.codes
    assert w.copy_(v) is w
    assert same(w, v)
    assert w.codes is codes
    assert w._same_metadata(v)
    x = torch.empty(5, 8)
    assert torch.equal(x.copy_(v), v.dequantize())
    half = Rows(v.codes, v.scale.half(), torch.float16)
    assert w.copy_(half).dtype is torch.float32


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: torch.randn(2, 3), "Tensor is not a Plain"),
        (lambda: Plain(torch.randn(2, 4), "a"), r"shape \(2, 4\) is not \(2, 3\)"),
        (lambda: Plain(torch.randn(2, 3), "b"), "attr is b, not a"),
        (lambda: Plain(torch.randn(2, 3), "a", None, torch.ones(2, 3)), "it holds .*zero_point"),
        (lambda: Plain(torch.ones(2, 3, dtype=torch.int8), "a"), "qdata is torch.int8, not torch.float32"),
    ],
)
def test_copy_of_something_else_is_refused(other: Any, words: str) -> None:
    w, before = Plain(torch.randn(2, 3), "a"), None
    before = w.qdata.clone()
    with pytest.raises(ValueError, match=words):
        w.copy_(other())
    assert not w._same_metadata(other())
    assert torch.equal(w.qdata, before)


# -- to ---------------------------------------------------------------------------------------------------------------


def test_a_dtype_attribute_takes_the_new_dtype_and_the_data_keep_theirs() -> None:
    w = rows()
    for got in (w.to(torch.bfloat16), w.bfloat16(), w.to("cpu", torch.bfloat16), w.to(torch.ones(1).bfloat16())):
        assert got.dtype is torch.bfloat16
        assert (got.codes.dtype, got.scale.dtype) == (torch.int8, torch.float32)
        assert torch.equal(got.dequantize(), w.dequantize().bfloat16())
    assert w.to(torch.float32) is w
    copied = w.to(torch.float32, copy=True)
    assert copied.codes.data_ptr() != w.codes.data_ptr()
    model = nn.Linear(8, 5)
    model.weight = nn.Parameter(w, requires_grad=False)
    x = torch.randn(3, 8).half()
    assert torch.equal(model.half()(x), F.linear(x, w.dequantize().half(), model.bias))


def test_data_in_the_dtype_of_the_wrapper_follow() -> None:
    class FromScale(TorchAOBaseTensor):
        tensor_data_names = ["codes", "scale"]
        tensor_attribute_names: list[str] = []

        def __new__(cls, codes: Any, scale: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

        def __init__(self, codes: Any, scale: Any) -> None:
            self.codes, self.scale = codes, scale

    w = FromScale(torch.ones(2, 2, dtype=torch.int8), torch.ones(2, 1)).to(torch.float16)
    assert (w.dtype, w.codes.dtype, w.scale.dtype) == (torch.float16, torch.int8, torch.float16)


def test_a_dtype_that_cannot_follow_is_said_once() -> None:
    class Deaf(TorchAOBaseTensor):
        tensor_data_names = ["scale"]
        tensor_attribute_names: list[str] = []

        def __new__(cls, scale: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, scale.shape)

        def __init__(self, scale: Any) -> None:
            self.scale = scale

    w = Deaf(torch.ones(2, 2))
    with pytest.warns(UserWarning, match="Deaf reports a dtype independent of its data"):
        got = w.to(torch.float16)
    assert (got.dtype, got.scale.dtype) == (torch.float32, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        w.to(torch.float16)


def test_to_another_device_takes_the_device_attribute_along() -> None:
    w = Plain(torch.randn(2, 3), "a", None, torch.ones(2, 3)).to("meta")
    assert (w.device.type, w.qdata.device.type, w.zero_point.device.type) == ("meta",) * 3
    w = Plain(torch.randn(2, 3), "a")._apply_fn_to_data(lambda part: part.to("meta"))
    assert w.device.type == "meta"
    with torch.inference_mode():
        w = rows()
        assert w.to(torch.float16).dtype is torch.float16
        assert w.to("meta").scale.device.type == "meta"


def test_arguments_of_to() -> None:
    w = Plain(torch.randn(2, 3), "a")
    assert w._get_to_kwargs(torch.strided, device="meta") == {"device": torch.device("meta"), "dtype": torch.float32}
    assert w._get_to_kwargs(torch.float16, layout=torch.strided)["dtype"] is torch.float16
    assert w._get_to_kwargs(device="cpu")["non_blocking"] is False
    assert "non_blocking" not in w._get_to_kwargs(device="cpu", non_blocking=False)
    assert w._get_to_kwargs(device="cpu", non_blocking=True)["non_blocking"] is True
    with pytest.raises(KeyError):
        w._get_to_kwargs()["copy"]


# -- with torch --------------------------------------------------------------------------------------------------------


def model_with(w: Any, requires_grad: bool = False) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 5))
    model[0].weight = nn.Parameter(w, requires_grad=requires_grad)
    return model


def test_parameter_state_dict_and_deepcopy() -> None:
    model, other, x = model_with(rows()), model_with(rows()), torch.randn(3, 8)
    assert type(model[0].weight) is Rows
    assert isinstance(model[0].weight, nn.Parameter)
    assert not torch.equal(model(x), other(x))
    assert other.load_state_dict(model.state_dict()).missing_keys == []
    assert torch.equal(model(x), other(x))
    meta = copy.deepcopy(model).to("meta")
    meta.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(model(x), meta(x))
    twin = copy.deepcopy(model)
    assert isinstance(twin[0].weight, nn.Parameter)
    assert torch.equal(twin(x), model(x))
    twin[0].weight.codes.zero_()
    assert bool(model[0].weight.codes.any())


@pytest.mark.parametrize("weights_only", [True, False])
def test_save_and_load(tmp_path: Path, weights_only: bool) -> None:
    model = model_with(rows(dtype=torch.bfloat16)).bfloat16()
    torch.save(model.state_dict(), tmp_path / "m.pt")
    state = torch.load(tmp_path / "m.pt", weights_only=weights_only)
    assert same(state["0.weight"], model[0].weight)
    assert state["0.weight"].dtype is torch.bfloat16


def test_shared_memory() -> None:
    model = model_with(Plain(rows(), "a"))
    want = model[0].weight.qdata.codes.clone()
    assert not model[0].weight.is_shared()
    model.share_memory()
    assert model[0].weight.is_shared()
    assert model[0].weight.qdata.codes.is_shared()
    assert torch.equal(model[0].weight.qdata.codes, want)


def test_a_pickle_without_an_optional_member_loads() -> None:
    w = Plain(torch.randn(2, 3), "a")
    del w.zero_point, w.note
    again = pickle.loads(pickle.dumps(w))
    assert (again.zero_point, again.note, again.attr) == (None, None, "a")
    assert torch.equal(again.qdata, w.qdata)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_compiled_is_eager(mode: Any) -> None:
    model, x = model_with(rows()), torch.randn(3, 8)
    with mode():
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), model(x))


def test_compiled_functions_take_and_give_them() -> None:
    w = rows()
    got = torch.compile(lambda w: w.to(torch.bfloat16).contiguous(), fullgraph=True)(w)
    assert type(got) is Rows
    assert same(got, w.to(torch.bfloat16))
    got = torch.compile(lambda x: Rows.from_float(x).detach(), fullgraph=True)(x := torch.randn(4, 8))
    assert same(got, Rows.from_float(x))
    asked = torch.compile(lambda w: w.dequantize() if isinstance(w, TorchAOBaseTensor) else w, fullgraph=True)
    assert type(asked(w)) is torch.Tensor


def test_gradients_reach_the_input() -> None:
    model, x = model_with(rows()), torch.randn(3, 8, requires_grad=True)
    model(x).sum().backward()
    torch.testing.assert_close(x.grad, model[0].weight.dequantize().sum(0).expand(3, 8))


def test_the_hash_for_the_compiler_tells_all_but_the_numbers() -> None:
    w = rows()
    assert w._stable_hash_for_caching() == rows()._stable_hash_for_caching()
    others = [rows(6), w.to(torch.float16), w.t(), Rows(w.codes, w.scale.half(), torch.float32)]
    others.append(Plain(torch.randn(5, 8), "a"))
    nested = [Plain(rows(), "a"), Plain(rows(dtype=torch.float16), "a"), Plain(model_with(rows())[0].weight, "a")]
    hashes = [x._stable_hash_for_caching() for x in [w, *others, *nested]]
    assert len({*hashes}) == len(hashes) - 1  # a parameter is hashed as a tensor
    quantized = nn.Sequential(nn.Linear(8, 8))
    quantize_(quantized, Int8WeightOnlyConfig())
    assert Plain(quantized[0].weight, "a")._stable_hash_for_caching() not in hashes


# -- operators ---------------------------------------------------------------------------------------------------------


def test_an_op_without_a_handler_is_named() -> None:
    with pytest.raises(NotImplementedError, match=r"Plain .*aten\.relu\.default.*Plain\.implements.*arg_types"):
        torch.relu(Plain(torch.randn(2, 3), "a"))


def test_a_class_without_lists_writes_its_ops() -> None:
    class Bare(TorchAOBaseTensor):
        def __new__(cls, data: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, data.shape)

        def __init__(self, data: Any) -> None:
            self.held = data

    w = Bare(torch.randn(2, 3))
    with pytest.raises(NotImplementedError, match=r"aten\.detach\.default"):
        nn.Parameter(w)
    for call in (w.__tensor_flatten__, lambda: w._apply_fn_to_data(torch.clone)):
        with pytest.raises(NotImplementedError, match=r"Bare must implement .* tensor_data_names"):
            call()
    with pytest.raises(NotImplementedError, match="Bare must implement __tensor_unflatten__"):
        Bare.__tensor_unflatten__({}, {}, None, None)
    assert repr(w) == "Bare(shape=(2, 3), dtype=torch.float32, device=cpu)"
    assert w.get_layout() is None

    @Bare.implements([aten.detach.default])
    def _(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return return_and_correct_aliasing(func, args, kwargs, Bare(func(args[0].held)))

    assert type(nn.Parameter(w)) is Bare


def make(base: Any = TorchAOBaseTensor, *more: Any) -> Any:
    """A class and a function that makes one of its tensors."""

    class Made(base, *more):  # type: ignore[misc]
        tensor_data_names = ["held"]
        tensor_attribute_names: list[str] = []

        def __new__(cls, held: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, held.shape)

        def __init__(self, held: Any) -> None:
            self.held = held

    return Made


LINEAR, RELU, MUL, PARENT, CHILD, A, B = range(7)


def says(number: int) -> Any:
    """A handler known by its result."""
    return lambda func, types, args, kwargs: torch.tensor(number)


@pytest.mark.parametrize("listed", [False, True])
def test_a_function_given_to_either_decorator_is_used(listed: bool) -> None:
    for decorate in (lambda cls: cls.implements, lambda cls: cls.implements_torch_function):
        cls = make()
        decorate(cls)([F.linear, torch.Tensor.t] if listed else F.linear)(says(LINEAR))
        decorate(cls)([aten.relu.default] if listed else aten.relu.default)(says(RELU))
        decorate(cls)(aten.mul)(says(MUL))
        w = cls(torch.randn(2, 3))
        assert F.linear(torch.randn(1, 3), w) == LINEAR
        assert torch.relu(w) == RELU
        assert aten.relu.default(w) == RELU
        assert w * w == aten.mul.Tensor(w, w) == MUL
        if listed:
            assert w.t() == LINEAR


def test_both_decorators_on_one_function_and_what_they_return() -> None:
    cls, calls = make(), []

    @cls.implements([aten.neg.default])
    @cls.implements_torch_function([F.linear])
    def handler(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        calls.append((func, kwargs))

    w = cls(torch.randn(2, 3))
    F.linear(torch.randn(1, 3), w, bias=None)
    aten.neg.default(w)
    assert calls == [(F.linear, {"bias": None}), (aten.neg.default, {})]
    assert callable(handler)


def test_a_subclass_starts_with_its_parents_handlers() -> None:
    parent = make()
    parent.implements(aten.neg.default)(says(PARENT))
    parent.implements(F.linear)(says(LINEAR))
    child = make(parent)
    assert torch.neg(child(torch.randn(2))) == PARENT
    assert F.linear(torch.randn(1, 2), child(torch.randn(2, 2))) == LINEAR
    child.implements(aten.neg.default)(says(CHILD))
    parent.implements(aten.relu.default)(says(B))
    assert torch.neg(parent(torch.randn(2))) == PARENT
    assert torch.neg(child(torch.randn(2))) == CHILD
    with pytest.raises(NotImplementedError, match=r"aten\.relu\.default"):
        torch.relu(child(torch.randn(2)))
    assert set(child._ATEN_OP_TABLE[child]) == {aten.neg.default}
    assert set(parent._TORCH_FN_TABLE[parent]) == {F.linear}


def test_of_two_parents_the_later_one_counts_and_none_loses_to_a_common_op() -> None:
    a, b = make(), make()
    a.implements(aten.neg.default)(says(A))
    b.implements(aten.neg.default)(says(B))
    a.implements(aten.clone.default)(says(A))
    both = make(a, b)
    w = both(torch.randn(2))
    assert torch.neg(w) == B
    assert w.clone() == A


def test_a_class_of_ones_own_can_use_the_tables_alone() -> None:
    from pennyweight_torchao import dispatch

    class Alone(torch.Tensor):
        implements = classmethod(dispatch._implements)
        __torch_function__ = classmethod(dispatch._dispatch__torch_function__)
        __torch_dispatch__ = classmethod(dispatch._dispatch__torch_dispatch__)

        def __new__(cls, held: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, held.shape)

    class Below(Alone):
        pass

    with pytest.raises(NotImplementedError):
        torch.neg(Below(torch.randn(2)))
    Alone.implements([aten.neg.default, F.linear])(says(A))
    assert torch.neg(Below(torch.randn(2))) == F.linear(torch.randn(1, 2), Below(torch.randn(1, 2))) == A
    Below.implements(aten.relu.default)(says(B))
    assert torch.neg(Below(torch.randn(2))) == A
    with pytest.raises(NotImplementedError):
        torch.relu(Alone(torch.randn(2)))


def test_an_op_made_of_others_is_taken_apart_in_inference_mode() -> None:
    cls = make()

    @cls.implements(aten.t.default)
    def _(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return return_and_correct_aliasing(func, args, kwargs, cls(func(args[0].held)))

    @cls.implements([aten.mm.default, aten.addmm.default])
    def _(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return func(*(x.held if isinstance(x, cls) else x for x in args), **kwargs)

    w, x, bias = torch.randn(4, 3), torch.randn(2, 3), torch.randn(4)
    with torch.inference_mode():
        torch.testing.assert_close(aten.linear.default(x, cls(w), bias), F.linear(x, w, bias))


def test_layouts_of_the_founding_era() -> None:
    class PlainLayout:
        pass

    class OtherLayout:
        pass

    cls = make()
    with pytest.raises(ValueError, match="PlainLayout; it has: none"):
        cls.get_tensor_impl_constructor(PlainLayout)

    @cls.register_layout(PlainLayout)
    class Impl(TorchAOBaseTensor):
        @classmethod
        def from_plain(cls, data: Any, layout: Any) -> Any:
            return data, layout

    child = make(cls)
    assert child.get_tensor_impl_constructor(PlainLayout)(1, 2) == (1, 2)
    child.register_layout(OtherLayout)(Impl)
    with pytest.raises(ValueError, match="OtherLayout; it has: PlainLayout"):
        cls.get_tensor_impl_constructor(OtherLayout)
    w = cls(torch.randn(2))
    w._layout = PlainLayout()
    assert w.get_layout() is w._layout


# -- who is one --------------------------------------------------------------------------------------------------------


def test_our_own_tensor_is_one() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    quantize_(model, Int8WeightOnlyConfig())
    assert isinstance(model[0].weight, TorchAOBaseTensor)
    assert issubclass(AffineQuantizedTensor, TorchAOBaseTensor)
    assert not isinstance(model[0].weight, Plain)
    assert not isinstance(model[0].bias, TorchAOBaseTensor)
    assert not isinstance(3, TorchAOBaseTensor)
    assert isinstance(rows(), TorchAOBaseTensor)
    assert issubclass(Rows, torch.Tensor)
    assert not issubclass(torch.Tensor, TorchAOBaseTensor)

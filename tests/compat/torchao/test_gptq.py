"""GPTQ by torchao's names: the observer tensor, the two-call flow, the quantizers; SmoothQuant by module swap."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.compat.torchao.algorithms.gptq import (
    GPTQConfig,
    GPTQObserverTensor,
    gptq_quantize,
    gptq_quantize_3d,
)
from pennyweight.compat.torchao.algorithms.gptq_quantizers import (
    GPTQQuantizer,
    Int4WeightOnlyGPTQQuantizer,
    Int8DynActInt4WeightGPTQQuantizer,
    _MultiInput,
)
from pennyweight.compat.torchao.algorithms.multi_tensor import (
    MultiTensor,
    MultiTensorInputRecorder,
    StateDictManager,
    batches_of,
    remove_multitensors_from_buffers_and_params,
    replace_buffers_and_params_with_multitensors,
)
from pennyweight.compat.torchao.algorithms.smooth_linear import (
    SmoothFakeDynamicallyQuantizedLinear,
    SmoothFakeDynQuantMixin,
    get_scale,
    set_smooth_fq_attribute,
    smooth_fq_linear_to_inference,
    swap_linear_with_smooth_fq_linear,
)
from pennyweight.compat.torchao.linear_modules import (
    Int8DynActInt4WeightLinear,
    Int8DynActInt4WeightQuantizer,
    WeightOnlyInt4Linear,
    _check_linear_int4_k,
    _replace_linear_8da4w,
    _replace_linear_int4,
)
from pennyweight.compat.torchao.quant_api import quantize_
from pennyweight.core.tensor import AffineQuantizedTensor

INT4 = pw.Int4WeightOnlyConfig(group_size=32)


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 16, bias=False)).requires_grad_(False)


@pytest.fixture
def x() -> Tensor:
    g = torch.Generator().manual_seed(3)
    low_rank = torch.randn(96, 24, generator=g) @ torch.randn(24, 64, generator=g)
    return (low_rank + 0.2 * torch.randn(96, 64, generator=g)).reshape(4, 24, 64)


def error(q: nn.Module, model: nn.Module, x: Tensor) -> float:
    return (q(x) - model(x)).pow(2).mean().item()


# -- the observer ------------------------------------------------------------------------------------------------------


def test_the_hessian_is_a_running_mean(x: Tensor) -> None:
    w = torch.randn(8, 64)
    observer = GPTQObserverTensor.from_hp(w)
    bias = torch.ones(8)
    assert torch.equal(F.linear(x[:3], observer, bias), F.linear(x[:3], w, bias))
    F.linear(x[3], observer)  # one batch
    flat = x.reshape(-1, 64)
    torch.testing.assert_close(observer.hessian, 2 / 4 * flat.t() @ flat, rtol=1e-4, atol=1e-3)
    assert observer.total_batches.tolist() == [4]
    with torch.inference_mode():
        torch.ops.aten.linear.default(x[3], observer)
    assert observer.total_batches.tolist() == [5]
    assert observer.detach().hessian.shape == (64, 64)
    with pytest.raises(ValueError, match="2 or 3 axes"):
        GPTQObserverTensor.from_hp(torch.ones(3))


def test_experts_are_observed_one_by_one() -> None:
    g = torch.Generator().manual_seed(1)
    w, x = torch.randn(3, 8, 16, generator=g), torch.randn(3, 5, 16, generator=g)
    bmm = GPTQObserverTensor.from_hp(w)
    assert torch.equal(torch.bmm(x, bmm.transpose(-2, -1)), torch.bmm(x, w.transpose(-2, -1)))
    torch.testing.assert_close(bmm.hessian, 2 * x.transpose(1, 2) @ x)
    grouped = GPTQObserverTensor.from_hp(w)
    grouped.update_3d_with_offs(x.reshape(15, 16), torch.tensor([5, 5, 15]))
    assert grouped.total_batches.tolist() == [1, 0, 1]
    torch.testing.assert_close(grouped.hessian[0], 2 * x[0].t() @ x[0])
    assert not grouped.hessian[1].any()
    with pytest.raises(NotImplementedError, match="last two axes"):
        grouped.transpose(0, 1)


# -- the config --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [INT4, pw.Int8WeightOnlyConfig(), pw.Int8DynamicActivationInt4WeightConfig(16)])
def test_the_two_calls_are_better_than_rounding(base: Any, model: nn.Sequential, x: Tensor) -> None:
    rounded, q = copy.deepcopy(model), copy.deepcopy(model)
    quantize_(rounded, base)
    quantize_(q, GPTQConfig("observe", base))
    assert isinstance(q[0].weight, GPTQObserverTensor)
    assert torch.equal(q(x), model(x))
    quantize_(q, GPTQConfig("convert", base, percdamp=0.02))
    for i in (0, 2):
        w: Any = q[i].weight
        assert type(w) is AffineQuantizedTensor
        assert (w.spec, w.act) == (rounded[i].weight.spec, rounded[i].weight.act)  # type: ignore[union-attr]
        assert torch.equal(w.scale, rounded[i].weight.scale)  # type: ignore[union-attr]
    assert error(q, model, x) < 0.9 * error(rounded, model, x)


def test_gptq_quantize_is_our_solver_in_the_order_of_the_columns(model: nn.Sequential, x: Tensor) -> None:
    flat = x.reshape(-1, 64)
    h = flat.t() @ flat
    made = gptq_quantize(h, model[0].weight, GPTQConfig("convert", INT4))
    assert torch.equal(
        made.dequantize(), gptq_quantize(2 * h, model[0].weight, GPTQConfig("convert", INT4)).dequantize()
    )
    ours = copy.deepcopy(model[:1])
    solver = {"gptq": {"activation_order": False, "damping": 0.01}}
    pw.quantize_(ours, INT4, calibration=[x], algorithm=solver)
    assert torch.equal(made.dequantize(), ours[0].weight.dequantize())  # type: ignore[operator]
    both = gptq_quantize_3d(torch.stack([h, h]), torch.stack([model[0].weight] * 2), GPTQConfig("convert", INT4))
    assert both.shape == (2, 48, 64)
    assert torch.equal(both.dequantize()[1], made.dequantize())
    with pytest.raises(AssertionError, match="H must be"):
        gptq_quantize(h[:3], model[0].weight, GPTQConfig("convert", INT4))


def test_wrong_steps(model: nn.Sequential) -> None:
    with pytest.raises(ValueError, match="base_config is required"):
        GPTQConfig()
    with pytest.raises(ValueError, match="must be a config such as"):
        GPTQConfig("observe", "int4")
    with pytest.raises(ValueError, match="Invalid step 'prepare'"):
        quantize_(copy.deepcopy(model), GPTQConfig("prepare", INT4))
    with pytest.raises(ValueError, match="Expected weight to be GPTQObserverTensor"):
        quantize_(copy.deepcopy(model), GPTQConfig("convert", INT4))
    quantize_(model, GPTQConfig("observe", INT4))
    with pytest.raises(ValueError, match=r"No observations recorded for weight: total_batches is \[0\]"):
        quantize_(model, GPTQConfig("convert", INT4))


# -- quantizers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["multi", "list", "keywords"])
def test_int4_quantizer(kind: str, model: nn.Sequential, x: Tensor) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = copy.deepcopy(model)

        def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
            return self.layers(x * factor)

    q, rounded = Model(), copy.deepcopy(model)
    quantize_(rounded, INT4)
    quantizer = Int4WeightOnlyGPTQQuantizer(group_size=32)
    if kind == "multi":
        assert quantizer.quantize(q, MultiTensor(list(x))) is q
    elif kind == "list":
        quantizer.quantize(q, [_MultiInput(list(x)), 1.0])
    else:
        quantizer.quantize(q, MultiTensor(list(x)), factor=1.0)
    assert type(q.layers[0]) is nn.Linear
    assert error(q.layers, model, x) < error(rounded, model, x)


def test_arguments_of_both_releases() -> None:
    old = Int4WeightOnlyGPTQQuantizer(64, 0.05, 32)
    assert (old.blocksize, old.percdamp, old.group_size) == (64, 0.05, 32)
    new = Int4WeightOnlyGPTQQuantizer(128, 64, 0.02, device="cpu")
    assert (new.group_size, new.blocksize, new.percdamp) == (128, 64, 0.02)
    assert Int4WeightOnlyGPTQQuantizer(groupsize=32).group_size == 32
    with pytest.raises(NotImplementedError, match=r"define config\(\)"):
        GPTQQuantizer().quantize(nn.Linear(2, 2), torch.ones(1, 2))


def test_8da4w_quantizer_gives_executorchs_layers(model: nn.Sequential, x: Tensor) -> None:
    q, plain = copy.deepcopy(model), copy.deepcopy(model)
    Int8DynActInt4WeightGPTQQuantizer(groupsize=16).quantize(q, [_MultiInput(list(x))])
    Int8DynActInt4WeightQuantizer(groupsize=16).quantize(plain)
    assert type(q[0]) is Int8DynActInt4WeightLinear
    assert list(q.state_dict()) == list(plain.state_dict())
    assert q[0].weight.dtype is torch.int8
    assert torch.equal(q[0].bias, model[0].bias)
    assert error(q, model, x) < error(plain, model, x)
    with pytest.raises(ValueError, match="0: 64 inputs are not whole groups of 48"):
        Int8DynActInt4WeightGPTQQuantizer(groupsize=48).quantize(copy.deepcopy(model), [_MultiInput(list(x))])
    part = Int8DynActInt4WeightGPTQQuantizer(groupsize=48, padding_allowed=False)
    part.quantize(model, [_MultiInput(list(x))])
    assert [type(m) for m in model] == [nn.Linear, nn.ReLU, Int8DynActInt4WeightLinear]


# -- MultiTensor -------------------------------------------------------------------------------------------------------


def test_functions_of_a_multi_tensor(model: nn.Sequential, x: Tensor) -> None:
    many = MultiTensor(list(x))
    assert (many.count, many.shape) == (4, (24, 64))
    y: Any = model(many)
    assert all(torch.equal(a, model(b)) for a, b in zip(y.values, x, strict=True))
    both: Any = torch.cat([many, MultiTensor(x[0])], 1)
    assert [tuple(v.shape) for v in both.values] == [(24, 128)] * 4
    parts: Any = many.chunk(2, -1)
    assert torch.equal(parts[1].values[2], x[2, :, 32:])
    assert many.size(-1) == 64
    with pytest.raises(ValueError, match="must be the same for all"):
        many.sum().item()
    with pytest.raises(AssertionError, match="holds tensors"):
        many.append(3)  # type: ignore[arg-type]


def test_in_place_functions_keep_one_value_per_batch() -> None:
    cache: Any = MultiTensor(torch.zeros(3))
    cache[1:] = MultiTensor([torch.ones(2), 2 * torch.ones(2)])
    assert [v.tolist() for v in cache.values] == [[0, 1, 1], [0, 2, 2]]
    assert cache.add_(1) is cache
    assert [v.tolist() for v in cache.values] == [[1, 2, 2], [1, 3, 3]]
    cache.unpad(1)
    assert cache.count == 2
    cache.unpad(1, force=True)
    assert cache.count == 1
    assert cache.pad_to_length(3, pad_in_place=False).count == 3
    assert cache.count == 1
    assert cache.pad_to_length(2).values[1] is not cache.values[0]


def test_the_recorder() -> None:
    recorder = MultiTensorInputRecorder()
    with pytest.raises(AssertionError, match="no inputs have been recorded"):
        recorder.get_recorded_inputs()
    recorder(torch.zeros(2), 5)
    recorder(torch.ones(2), 5)
    tensors, five = recorder.get_recorded_inputs()
    assert [v.tolist() for v in tensors.values] == [[0, 0], [1, 1]]
    assert five == 5
    for wrong in ((torch.ones(2), 6), (torch.ones(2, dtype=torch.int64), 5), (torch.ones(2),)):
        with pytest.raises(AssertionError):
            recorder(*wrong)
    named = MultiTensorInputRecorder()
    named(x=torch.zeros(2))
    with pytest.raises(AssertionError, match="get_recorded_args_and_kwargs"):
        named.get_recorded_inputs()
    args, kwargs = named.get_recorded_args_and_kwargs()
    assert args == ()
    assert kwargs["x"].count == 1
    assert [(a, k) for a, k in batches_of((MultiTensor([torch.ones(1)]), 3), {"y": _MultiInput([1, 2])})] == [
        ((torch.ones(1), 3), {"y": 1}), ((torch.ones(1), 3), {"y": 2}),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="has 2 tensors, another 3"):
        batches_of((_MultiInput([1, 2]), _MultiInput([1, 2, 3])))


def test_parameters_as_multi_tensors_and_the_manager(model: nn.Sequential, x: Tensor) -> None:
    y = model(x[0])
    manager = StateDictManager.get_instance()
    assert manager is StateDictManager.get_instance()
    manager.set_state_dict(model)
    assert manager.get_name_for_param(model[2].weight) == "2.weight"
    assert manager.get_name_for_param(torch.ones(1)) is None
    manager.update_param("0.bias", MultiTensor([torch.ones(48)]))
    assert manager.get_state_dict()["0.bias"].sum() == 48
    with pytest.raises(KeyError, match="Parameter z not found"):
        manager.update_param("z", torch.ones(1))
    replace_buffers_and_params_with_multitensors(model[0])
    assert isinstance(model[0].weight, MultiTensor)
    assert torch.equal(model[0](x[0]).values[0], F.linear(x[0], model[0].weight.values[0], model[0].bias.values[0]))
    remove_multitensors_from_buffers_and_params(model[0])
    assert torch.equal(model(x[0]), y)


# -- SmoothQuant by module swap ----------------------------------------------------------------------------------------


def test_smooth_linear(model: nn.Sequential, x: Tensor) -> None:
    x = x * torch.linspace(0.1, 8, 64)
    q = nn.Sequential(copy.deepcopy(model))
    swap_linear_with_smooth_fq_linear(q, skip_fqn_list=["0.2"], alpha=0.4)
    layer: Any = q[0][0]
    assert type(layer) is SmoothFakeDynamicallyQuantizedLinear
    assert type(q[0][2]) is nn.Linear
    with pytest.raises(AssertionError, match="no calibration data found"):
        smooth_fq_linear_to_inference(q)
    assert torch.equal(q(x), model(x))
    smooth_fq_linear_to_inference(q)
    assert list(layer.state_dict()) == ["bias", "smooth_scale", "W_int_repr"]
    most = x.abs().reshape(-1, 64).amax(0)
    scale = most**0.4 / model[0].weight.abs().amax(0) ** 0.6
    torch.testing.assert_close(layer.smooth_scale, scale)
    assert torch.equal(get_scale(torch.tensor([4.0]), torch.tensor([9.0])), torch.tensor([2 / 3]))
    smoothed = pw.Int8DynamicActivationInt8WeightConfig()
    plain = copy.deepcopy(model[:1])
    quantize_(plain, smoothed)
    assert error(q[0][:1], model[:1], x) < error(plain, model[:1], x)


def test_smooth_attributes(model: nn.Sequential, x: Tensor) -> None:
    codes = {}
    for transposed in (False, True):
        q = copy.deepcopy(model)
        swap_linear_with_smooth_fq_linear(q)
        set_smooth_fq_attribute(q, "store_w_int_repr_t", transposed)
        set_smooth_fq_attribute(q, "no_such_attribute", 1)
        smooth_fq_linear_to_inference(q, debug_skip_calibration=True)
        assert torch.equal(q[0].smooth_scale, torch.ones(64))  # type: ignore[arg-type]
        codes[transposed] = q[0].W_int_repr, q(x)
    assert torch.equal(codes[True][0].t(), codes[False][0])  # type: ignore[operator]
    assert torch.equal(codes[True][1], codes[False][1])
    assert not hasattr(q[0], "no_such_attribute")
    with pytest.raises(NotImplementedError, match="must define to_inference"):
        SmoothFakeDynQuantMixin().to_inference()


# -- replacing linear layers -------------------------------------------------------------------------------------------


def test_replaced_linear_layers(model: nn.Sequential) -> None:
    assert _check_linear_int4_k(256, 32, 8)
    assert not _check_linear_int4_k(192, 32, 8)
    assert not _check_linear_int4_k(48, 32)
    q = copy.deepcopy(model)
    _replace_linear_8da4w(q, 32, False, torch.float32, torch.float32, Int8DynActInt4WeightLinear)
    assert [type(m) for m in q] == [Int8DynActInt4WeightLinear, nn.ReLU, nn.Linear]

    class Own(nn.Linear):
        def __init__(self, i: int, o: int, bias: bool, device: Any, groupsize: int, **kwargs: Any) -> None:
            super().__init__(i, o, bias, device)
            self.groupsize = groupsize

    q = copy.deepcopy(model)
    _replace_linear_8da4w(q, 16, False, torch.float32, torch.float32, Own, copy_weights=True)
    assert q[0].groupsize == 16
    assert torch.equal(q[2].weight, model[2].weight)
    q = copy.deepcopy(model)
    _replace_linear_int4(q, 16, None, True, linear_class=Own, copy_weights=True)
    assert [type(m) for m in q] == [nn.Linear, nn.ReLU, Own]  # the first has a bias
    wide = nn.Sequential(nn.Linear(128, 16, bias=False), nn.Linear(48, 16, bias=False))
    _replace_linear_int4(wide, 32, 8, False)
    assert [type(m) for m in wide] == [WeightOnlyInt4Linear, nn.Linear]

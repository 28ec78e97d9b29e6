"""GPTQ by torchao's names: the observer tensor, the two-call flow, the quantizers; SmoothQuant by module swap."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight_torchao.algorithms.gptq import (
    GPTQConfig,
    GPTQObserverTensor,
    gptq_quantize,
    gptq_quantize_3d,
)
from pennyweight_torchao.linear_modules import (
    Int8DynActInt4WeightLinear,
    WeightOnlyInt4Linear,
    _check_linear_int4_k,
    _replace_linear_8da4w,
    _replace_linear_int4,
)
from pennyweight_torchao.quant_api import quantize_

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
    solver = {"gptq": {"activation_order": False, "damping": 0.01, "shrinkage": 0.0}}
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


# -- MultiTensor -------------------------------------------------------------------------------------------------------


# -- SmoothQuant by module swap ----------------------------------------------------------------------------------------


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

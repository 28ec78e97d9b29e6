"""Observers and fake quantizers: ranges, parameters, gradients, states."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pennyweight_torchao.graph_mode import code_range, fake_quantize, passive_observers
from pennyweight_torchao.graph_mode import range_observers as ranges
from pennyweight_torchao.graph_mode.histogram_observer import HistogramObserver
from pennyweight_torchao.graph_mode.observer_base import PartialWrapper


def test_affine_parameters_contain_zero() -> None:
    m = ranges.MinMaxObserver(dtype=torch.uint8)
    m(torch.tensor([1.0, 3.0]))
    m(torch.tensor([2.0, 5.1]))
    scale, zero_point = m.calculate_qparams()
    torch.testing.assert_close(scale, torch.tensor([5.1 / 255]))
    assert zero_point.tolist() == [0]
    m(torch.tensor([-5.1]))
    assert m.calculate_qparams()[1].tolist() == [128]  # 0 - round(-5.1 / 0.04)
    m.reset_min_max_vals()
    assert m.min_val == torch.inf


@pytest.mark.parametrize(
    ("dtype", "codes", "zero_point"),
    [(torch.int8, {}, 0), (torch.uint8, {}, 128), (torch.uint8, {"quant_min": 0, "quant_max": 127}, 63)],
)
def test_symmetric_parameters(dtype: torch.dtype, codes: dict[str, int], zero_point: int) -> None:
    m = ranges.MinMaxObserver(dtype=dtype, qscheme=torch.per_tensor_symmetric, **codes)
    m(torch.tensor([-3.0, 1.0]))
    scale, found = m.calculate_qparams()
    assert scale.tolist() == [torch.tensor(3.0).div((m.quant_max - m.quant_min) / 2).item()]
    assert found.tolist() == [zero_point]


def test_the_scale_is_at_least_eps() -> None:
    m = ranges.MinMaxObserver(dtype=torch.int8, eps=0.25)
    m(torch.zeros(3))
    assert m.calculate_qparams()[0].tolist() == [0.25]


def test_moving_average() -> None:
    m = ranges.MovingAverageMinMaxObserver(averaging_constant=0.5, dtype=torch.int8)
    for high in (2.0, 4.0, 1.0):
        m(torch.tensor([-high, high]))
    assert m.max_val.item() == 2.0  # (2 + 4) / 2 = 3, (3 + 1) / 2
    assert m.min_val.item() == -2.0
    with pytest.raises(NotImplementedError, match="must be 1"):
        ranges.MovingAverageMinMaxObserver(is_dynamic=True)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_per_channel(axis: int) -> None:
    m = ranges.PerChannelMinMaxObserver(ch_axis=axis, dtype=torch.int8, qscheme=torch.per_channel_symmetric)
    x = torch.randn(3, 4, 5)
    m(x)
    m(x * 2)
    others = [d for d in range(3) if d != axis]
    assert torch.equal(m.max_val, (2 * x).amax(others))
    assert torch.equal(m.min_val, (2 * x).amin(others))
    again = ranges.PerChannelMinMaxObserver(ch_axis=axis, dtype=torch.int8, qscheme=torch.per_channel_symmetric)
    again.load_state_dict(m.state_dict())
    assert torch.equal(again.calculate_qparams()[0], m.calculate_qparams()[0])


def test_a_state_dict_of_old_names_loads() -> None:
    m = ranges.PerChannelMinMaxObserver(dtype=torch.int8)
    m(torch.randn(3, 4))
    state = m.state_dict()
    for name in ("min_val", "max_val"):
        state[f"{name}s"] = state.pop(name)
    state._metadata[""]["version"] = 2  # type: ignore[attr-defined]
    again = ranges.PerChannelMinMaxObserver(dtype=torch.int8)
    again.load_state_dict(state)
    assert torch.equal(again.min_val, m.min_val)


def test_the_histogram_clips_outliers() -> None:
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    x[0] = 10.0
    clipped, whole = HistogramObserver(dtype=torch.uint8), ranges.MinMaxObserver(dtype=torch.uint8)

    def error(m: Any) -> float:
        m(x[:400_000])
        m(x[400_000:])
        scale, zero_point = m.calculate_qparams()
        fake = torch.fake_quantize_per_tensor_affine(x, float(scale), int(zero_point), 0, 255)
        return float((fake - x).square().sum())

    assert error(clipped) < 0.9 * error(whole)  # for one value in a million
    assert clipped.histogram.sum() == pytest.approx(1_000_000)
    with pytest.warns(UserWarning, match="inf detected"):
        clipped(torch.tensor([torch.inf, 1.0]))


@pytest.mark.parametrize(
    "make", [ranges.MinMaxObserver, HistogramObserver, ranges.PerChannelMinMaxObserver], ids=lambda m: m.__name__
)
def test_without_data_there_is_a_warning(make: Callable[..., Any]) -> None:
    with pytest.warns(UserWarning, match="must run observer before"):
        scale, zero_point = make(dtype=torch.uint8).calculate_qparams()
    assert (scale.tolist(), zero_point.tolist()) == ([1.0], [0])


def test_float64_as_default_dtype_changes_nothing() -> None:
    x = torch.randn(100)
    torch.set_default_dtype(torch.float64)
    try:
        found = [m(dtype=torch.uint8) for m in (ranges.MinMaxObserver, HistogramObserver)]
    finally:
        torch.set_default_dtype(torch.float32)
    for m in found:
        plain = type(m)(dtype=torch.uint8)
        m(x), plain(x)
        assert torch.equal(m.calculate_qparams()[0], plain.calculate_qparams()[0])


def test_factories() -> None:
    make = ranges.MinMaxObserver.with_args(dtype=torch.int8).with_args(quant_min=-127, quant_max=127)
    assert isinstance(make, PartialWrapper)
    assert (make().quant_min, make().dtype) == (-127, torch.int8)
    calls = iter(range(9))
    counted = ranges.MinMaxObserver.with_callable_args(eps=lambda: next(calls))
    assert [counted(dtype=torch.int8).eps.item() for _ in range(2)] == [0, 1]


def test_codes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(AssertionError, match="must include 0"):
        ranges.MinMaxObserver(dtype=torch.int8, quant_min=1, quant_max=5)
    with pytest.raises(AssertionError, match="at most 256 codes"):
        ranges.MinMaxObserver(dtype=torch.int8, quant_min=-200, quant_max=200)
    with pytest.raises(NotImplementedError, match="per-tensor"):
        ranges.MinMaxObserver(qscheme=torch.per_channel_affine)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert code_range.calculate_qmin_qmax(0, 255, True, torch.uint8, True) == (0, 127)


def test_fixed_and_derived() -> None:
    fixed = passive_observers.FixedQParamsObserver(1 / 256, 3)
    assert fixed.calculate_qparams()[0].item() == 1 / 256
    derived = passive_observers.DerivedObserverOrFakeQuantize(
        torch.int32,
        [fixed],
        lambda seen: (seen[0].calculate_qparams()[0] * 2, torch.tensor([0])),  # type: ignore[operator]
    )
    assert derived.calculate_qparams()[0].item() == 2 / 256


def test_fake_quantize_rounds_and_passes_gradients() -> None:
    m = fake_quantize.FakeQuantize(
        observer=ranges.MovingAverageMinMaxObserver, quant_min=0, quant_max=255, averaging_constant=1.0
    )
    m(torch.tensor([0.0, 2.55]))
    m.disable_observer()
    x = torch.tensor([1.004, 5.0], requires_grad=True)
    y = m(x)
    y.sum().backward()
    torch.testing.assert_close(y.detach(), torch.tensor([1.0, 2.55]))
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 0.0]  # 5 is clamped
    m.apply(fake_quantize.disable_fake_quant)
    assert torch.equal(m(x), x)
    again = copy.deepcopy(m)
    again.load_state_dict(m.state_dict())
    assert again.scale == m.scale


def test_the_fused_fake_quantizer_equals_the_plain_one() -> None:
    x = [torch.randn(4, 6) for _ in range(3)]
    args: dict[str, Any] = {
        "dtype": torch.qint8,
        "qscheme": torch.per_tensor_affine,
        "quant_min": -128,
        "quant_max": 127,
    }
    kinds = (fake_quantize.FakeQuantize, fake_quantize.FusedMovingAvgObsFakeQuantize)
    plain, fused = (kind(observer=ranges.MovingAverageMinMaxObserver, **args) for kind in kinds)
    for batch in x:
        torch.testing.assert_close(plain(batch), fused(batch))
    torch.testing.assert_close(plain.calculate_qparams()[0], fused.calculate_qparams()[0])

"""autoquant: the first call decides, manual runs, the cache, min_sqnr, compiled models; the classes."""

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pennyweight.compat.torchao.algorithms import autoquant as module
from pennyweight.compat.torchao.algorithms.autoquant import (
    AUTOQUANT_CACHE,
    AutoQuantizableLinearWeight,
    _change_autoquantizable_to_quantized,
    _change_linears_to_autoquantizable,
    autoquant,
    autoquant_v2,
)
from pennyweight.compat.torchao.algorithms.autoquant_classes import (
    ALL_AUTOQUANT_CLASS_LIST,
    DEFAULT_AUTOQUANT_CLASS_LIST,
    DEFAULT_SPARSE_AUTOQUANT_CLASS_LIST,
    AQBFloat16LinearWeight,
    AQDefaultLinearWeight,
    AQInt4G64WeightOnlyQuantizedLinearWeight,
    AQInt8DynamicallyQuantizedLinearWeight,
    AQInt8WeightOnlyQuantizedLinearWeight,
    Float32Tensor,
)
from pennyweight.core.tensor import AffineQuantizedTensor


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "SECONDS", 0.001)
    kept = dict(AUTOQUANT_CACHE)
    AUTOQUANT_CACHE.clear()
    yield
    AUTOQUANT_CACHE.clear()
    AUTOQUANT_CACHE.update(kept)


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 16, bias=False)).requires_grad_(False)


X = torch.randn(4, 128, generator=torch.Generator().manual_seed(2))


def prefer(cls: Any, w: Tensor, milliseconds: float, x: Tensor = X, bias: bool = True) -> None:
    key = (x.shape, w.shape, w.shape[:1] if bias else None, x.dtype)
    AUTOQUANT_CACHE[(cls, *key)] = milliseconds


def test_the_first_call_decides(model: nn.Sequential) -> None:
    y = model(X)
    prefer(AQDefaultLinearWeight, model[0].weight, 2.0)
    prefer(AQInt8WeightOnlyQuantizedLinearWeight, model[0].weight, 1.0)
    prefer(AQInt8DynamicallyQuantizedLinearWeight, model[0].weight, 3.0)
    classes = [AQDefaultLinearWeight, AQInt8WeightOnlyQuantizedLinearWeight, AQInt8DynamicallyQuantizedLinearWeight]
    assert autoquant(model, qtensor_class_list=classes) is model
    assert isinstance(model[0].weight, AutoQuantizableLinearWeight)
    assert "AQInt8WeightOnly" in repr(model[0].weight)
    out = model(X)
    assert isinstance(model[0].weight, AQInt8WeightOnlyQuantizedLinearWeight)
    assert not isinstance(model[0].weight, AQInt8DynamicallyQuantizedLinearWeight)
    assert not isinstance(model[2].weight, AutoQuantizableLinearWeight)
    assert not hasattr(model, "finalize_autoquant")
    torch.testing.assert_close(out, y, atol=0.05, rtol=0.1)
    assert torch.equal(model(X), out)
    measured = [key for key, value in AUTOQUANT_CACHE.items() if key[2] == (16, 64)]
    assert len(measured) == 3
    assert all(AUTOQUANT_CACHE[key] > 0 for key in measured)  # type: ignore[operator]


def test_manual_runs_add_up(model: nn.Sequential) -> None:
    one = X[:1]
    for cls, at_four, at_one in ((AQDefaultLinearWeight, 1.0, 5.0), (AQInt8DynamicallyQuantizedLinearWeight, 2.0, 1.0)):
        prefer(cls, model[0].weight, at_four)
        prefer(cls, model[0].weight, at_one, one)
    classes = [AQDefaultLinearWeight, AQInt8DynamicallyQuantizedLinearWeight]
    few, many = copy.deepcopy(model), copy.deepcopy(model)
    for q, times in ((few, 1), (many, 5)):
        autoquant(q, qtensor_class_list=classes, manual=True)
        for _ in range(times):
            assert torch.equal(q(X), model(X))
        q(one)
        assert sorted(q[0].weight.logged_data.values()) == sorted([times, 1])  # type: ignore[union-attr, operator]
        q.finalize_autoquant()  # type: ignore[operator]
    assert isinstance(few[0].weight, AffineQuantizedTensor)  # 6 against 3 ms
    assert type(many[0].weight) is nn.Parameter  # 10 against 11 ms


def test_an_example_input_runs_it_and_a_filter_selects(model: nn.Sequential) -> None:
    prefer(AQInt8DynamicallyQuantizedLinearWeight, model[0].weight, 1e-9)
    last = model[2].weight
    autoquant_v2(model, (X,), filter_fn=lambda m, name: name == "0")
    assert isinstance(model[0].weight, AQInt8DynamicallyQuantizedLinearWeight)
    assert model[2].weight is last


def test_min_sqnr_is_checked_for_each_weight(model: nn.Sequential) -> None:
    for w, bias in ((model[0].weight, True), (model[2].weight, False)):
        x = X if bias else X[:, :64]
        prefer(AQInt4G64WeightOnlyQuantizedLinearWeight, w, 1e-9, x, bias)
        prefer(AQInt8WeightOnlyQuantizedLinearWeight, w, 1e-8, x, bias)
    classes = [AQDefaultLinearWeight, AQInt8WeightOnlyQuantizedLinearWeight, AQInt4G64WeightOnlyQuantizedLinearWeight]
    kinds = {None: AQInt4G64WeightOnlyQuantizedLinearWeight, 35: AQInt8WeightOnlyQuantizedLinearWeight}
    for least, kind in kinds.items():
        q = autoquant(copy.deepcopy(model), X, classes, min_sqnr=least)
        assert isinstance(q[0].weight, kind)  # type: ignore[index]
    q = autoquant(copy.deepcopy(model), X, classes, min_sqnr=200)
    assert type(q[0].weight) is nn.Parameter  # type: ignore[index]
    assert torch.equal(q(X), model(X))


def test_layers_without_inputs(model: nn.Sequential) -> None:
    model.add_module("unused", nn.Linear(3, 3))
    forward = nn.Sequential(model[0]).forward
    model.forward = forward  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="must run module normally"):
        autoquant(copy.deepcopy(model), X)
    q = autoquant(model, X, error_on_unseen=False)
    assert type(q.unused.weight) is nn.Parameter  # type: ignore[union-attr]


def test_candidates_that_fail_are_logged(model: nn.Sequential, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        q = autoquant(copy.deepcopy(model), X, DEFAULT_SPARSE_AUTOQUANT_CLASS_LIST)
    assert "MarlinSparseLinearWeight failed" in caplog.text
    assert "half of them to zero" in caplog.text
    assert torch.equal(q(X), model(X))


@pytest.mark.parametrize("manual", [False, True])
def test_a_compiled_model_is_measured_before_it_compiles(model: nn.Sequential, manual: bool) -> None:
    prefer(AQInt8DynamicallyQuantizedLinearWeight, model[0].weight, 1e-9)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled: Any = autoquant(torch.compile(model, backend=backend), manual=manual)
    y = compiled(X)
    if manual:
        assert graphs == []
        compiled.finalize_autoquant()
        y = compiled(X)
    assert isinstance(model[0].weight, AQInt8DynamicallyQuantizedLinearWeight)
    assert len(graphs) == 1
    torch.testing.assert_close(y, model(X))


@pytest.mark.parametrize("cls", ALL_AUTOQUANT_CLASS_LIST)
def test_every_class(cls: Any) -> None:
    w = torch.randn(16, 128, generator=torch.Generator().manual_seed(5))
    q = cls.from_float(w)
    wanted = F.linear(X, w)
    got = cls._quantized_linear_op(X, q, None)
    assert got.dtype is torch.float32
    assert (got - wanted).norm() / wanted.norm() < 0.2
    assert torch.equal(F.linear(X, q), got)
    if cls is not AQDefaultLinearWeight:
        assert isinstance(q, cls)
        assert not isinstance(w, cls)
    assert cls._autoquant_test(X, w, None, float("inf"), ["relu", None]) > 0


def test_float_classes_cast_the_input() -> None:
    w = torch.randn(16, 128, generator=torch.Generator().manual_seed(5))
    q = AQBFloat16LinearWeight.from_float(w)
    assert q.weight.dtype is torch.bfloat16
    assert q.dtype is torch.float32
    wanted = F.linear(X.bfloat16(), w.bfloat16(), torch.ones(16).bfloat16()).float()
    assert torch.equal(F.linear(X, q, torch.ones(16)), wanted)
    kept = Float32Tensor(w.bfloat16(), skip_weight_conversion=True)
    assert kept.weight.dtype is torch.bfloat16


def test_the_two_steps_by_hand(model: nn.Sequential) -> None:
    _change_linears_to_autoquantizable(model)
    assert [c.__name__ for c in model[0].weight.qtensor_class_list] == [  # type: ignore[union-attr, operator]
        c.__name__ for c in DEFAULT_AUTOQUANT_CLASS_LIST
    ]
    model(X)
    copied = copy.deepcopy(model)
    _change_autoquantizable_to_quantized(copied)
    assert not any(isinstance(p, AutoQuantizableLinearWeight) for p in copied.parameters())
    assert isinstance(model[0].weight, AutoQuantizableLinearWeight)

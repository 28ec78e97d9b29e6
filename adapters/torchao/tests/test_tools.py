"""torchao.utils: measuring, sizes, questions about the machine, unwrapping."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight_torchao import hardware, tools
from pennyweight_torchao.base_tensor import TorchAOBaseTensor

# -- measuring ---------------------------------------------------------------------------------------------------------


def test_benchmark_model_counts_milliseconds_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 3.0])
    monkeypatch.setattr(tools.time, "perf_counter", lambda: next(clock))
    calls = []

    class Model(nn.Module):
        def forward(self, x: int, y: int = 0) -> None:
            calls.append((x, y))

    assert tools.benchmark_model(Model(), 4, (1,), {"y": 2}) == 500.0
    assert calls == [(1, 2)] * 4


def test_benchmark_model_refuses() -> None:
    with pytest.raises(TypeError, match="pass device_type"):
        tools.benchmark_model(lambda: None, 1)
    assert tools.benchmark_model(lambda: None, 1, device_type="cpu") >= 0
    with pytest.raises(ValueError, match="at least 1"):
        tools.benchmark_model(nn.Identity(), 0, (1,))
    two = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
    with pytest.raises(AssertionError, match="meta"):
        tools.benchmark_model(two, 1)
    assert tools._assert_and_get_unique_device(nn.Identity()) is None


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_model_size() -> None:
    linear = nn.Linear(64, 32)
    assert tools.get_model_size_in_bytes(linear) == 4 * (64 * 32 + 32)
    model = nn.Sequential(nn.Embedding(10, 64), linear, nn.Linear(32, 10), nn.BatchNorm1d(10))
    model[0].register_buffer("table", torch.zeros(3, dtype=torch.int8))
    rest = 4 * (64 * 32 + 32 + 32 * 10 + 10 + 4 * 10) + 8
    assert tools.get_model_size_in_bytes(model) == rest + 4 * 640 + 3
    assert tools.get_model_size_in_bytes(model, ignore_embeddings=True) == rest


def test_model_size_counts_what_is_stored_once() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    assert tools.get_model_size_in_bytes(model) == 4 * 64 * 64
    pw.quantize_(model, pw.Int8WeightOnlyConfig())
    assert tools.get_model_size_in_bytes(model) == 64 * 64 + 4 * 64
    nf4 = nn.Sequential(nn.Linear(256, 64, bias=False))
    pw.quantize_(nf4, pw.NF4WeightOnlyConfig())
    assert tools.get_model_size_in_bytes(nf4) == nf4[0].weight.nbytes


def test_small_arithmetic() -> None:
    for n in range(40):
        for args in ((), (4,), (4, 6), (5, 1)):
            want = next(m for m in range(n, n + 100) if all(m % a == 0 for a in args))
            assert tools.find_multiple(n, *args) == want
        assert tools.ceil_div(n, 7) == math.ceil(n / 7)
        assert tools.round_up(n, 7) == 7 * math.ceil(n / 7)


# -- the machine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("torch_version", "asked", "want"),
    [
        ("2.5.0a0+git9f17037", "2.5.0", False),
        ("2.5.0a0+git9f17037", "2.4.0", True),
        ("2.5.0.dev20240708+cu121", "2.5.0", False),
        ("2.5.0.dev20240708+cu121", "2.4.0", True),
        ("2.5.0rc1", "2.5.0", False),
        ("2.5.0+cu121", "2.5.0", True),
        ("2.10.0", "2.9.1", True),
        ("2.4.0", "2.5.0", False),
    ],
)
def test_versions_are_compared_as_numbers(torch_version: str, asked: str, want: bool) -> None:
    with patch("torch.__version__", torch_version):
        assert hardware.torch_version_at_least(asked) is want


def test_versions() -> None:
    assert hardware.parse_version("2.5.0.dev20240708+cu121") == [2, 5, -1]
    assert hardware.parse_version("2.5.1") == [2, 5, 1]
    with pytest.raises(ValueError, match="expected a version such as"):
        hardware.parse_version("unknown")
    assert [hardware.compare_versions("2.5.0", v) for v in ("2.10.0", "2.5.0", "2.4.9")] == [-1, 0, 1]
    names = [name for name in hardware.__all__ if name.startswith("TORCH_VERSION")]
    assert len(names) == 11
    assert all(getattr(hardware, name) is True for name in names)


# -- unwrapping --------------------------------------------------------------------------------------------------------


class Halves(TorchAOBaseTensor):
    """A tensor stored as two others, which may themselves be subclasses: x = a + b."""

    tensor_data_names = ["a", "b"]  # noqa: RUF012
    tensor_attribute_names = ["word"]  # noqa: RUF012

    def __new__(cls, a: Any, b: Any, word: str) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)

    def __init__(self, a: Any, b: Any, word: str) -> None:
        self.a, self.b, self.word = a, b, word

    def dequantize(self) -> torch.Tensor:
        a, b = (part.dequantize() if isinstance(part, Halves) else part for part in (self.a, self.b))
        return a + b


@Halves.implements_torch_function(nn.functional.linear)
def _(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0], args[1].dequantize(), *args[2:], **kwargs)


def nested() -> Halves:
    inner = Halves(torch.randn(4, 8), torch.randn(4, 8), "inner")
    return Halves(Halves(inner, torch.randn(4, 8), "middle"), Halves(torch.randn(4, 8), inner, "right"), "outer")


def test_nested_subclasses_come_back() -> None:
    w, parametrization = nested(), tools.UnwrapTensorSubclass()
    plain = parametrization.right_inverse(w)
    assert [type(x) for x in plain] == [torch.Tensor] * 6
    again = parametrization(*plain)
    assert type(again) is Halves
    assert (again.word, again.a.word, again.b.word, again.a.a.word) == ("outer", "middle", "right", "inner")
    assert torch.equal(again.dequantize(), w.dequantize())
    with pytest.raises(TypeError, match="got Tensor"):
        parametrization.right_inverse(torch.randn(2))


CONFIGS = [
    pw.Int8WeightOnlyConfig(),
    pw.Int8DynamicActivationInt8WeightConfig(),
    pw.Int4WeightOnlyConfig(group_size=32),
    pw.IntxWeightOnlyConfig(torch.int4, pw.PerGroup(32)),
    pw.NF4WeightOnlyConfig(),
    pw.Float8WeightOnlyConfig(),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
def test_unwrapped_models_compute_the_same_and_export(config: pw.AOBaseConfig) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32)).eval()
    pw.quantize_(model, config)
    x = torch.randn(3, 64)
    want = model(x)
    assert tools.unwrap_tensor_subclass(model) is model
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert torch.equal(model(x), want)
    with torch.no_grad():
        exported = torch.export.export(model, (x,))
    torch.testing.assert_close(exported.module()(x), want)
    assert all(type(value) in (torch.Tensor, nn.Parameter) for value in exported.state_dict.values())


def test_unwrapping_reaches_the_root_and_obeys_the_filter() -> None:
    root = nn.Linear(8, 4)
    root.weight = nn.Parameter(nested(), requires_grad=True)
    x = torch.randn(2, 8)
    want = root(x)
    tools.unwrap_tensor_subclass(root)
    assert type(root.parametrizations.weight.original0) is nn.Parameter
    assert torch.equal(root(x), want)
    tools.unwrap_tensor_subclass(root)  # what is unwrapped stays as it is
    assert torch.equal(root(x), want)
    exported = torch.export.export(root, (x,))
    torch.testing.assert_close(exported.module()(x), want)

    seen = []
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(8, 4))
    for linear in model:
        linear.weight = nn.Parameter(nested(), requires_grad=False)
    tools.unwrap_tensor_subclass(model, lambda module, fqn: seen.append(fqn) or fqn == "1")
    assert seen == ["", "0", "1"]
    assert [hasattr(linear, "parametrizations") for linear in model] == [False, True]

"""Log the operations that a model calls, before and after it is quantized.

python examples/tutorials/logging_tensor.py
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import pennyweight as pw


class FunctionLog(TorchFunctionMode):
    """Logs each public torch function that the model calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            shapes = ", ".join(str(list(a.shape)) for a in args if isinstance(a, Tensor))
            self.calls.append(f"{resolve_name(func) or func.__name__}({shapes}) -> {list(out.shape)}")
        return out


class OperatorLog(TorchDispatchMode):
    """Logs each aten operator that is dispatched, below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


class LoggingTensor(Tensor):
    """A tensor that logs the operators called on it: a mode covers a region of code, this tensor follows one value."""

    calls: list[str] = []  # noqa: RUF012 - one list for all instances, because results are instances too
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> "LoggingTensor":
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"LoggingTensor({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(f"{func}({', '.join(describe(a) for a in args)})")
        args, kwargs = tree_map(unwrap, (args, kwargs or {}))
        return tree_map(lambda out: LoggingTensor(out) if isinstance(out, Tensor) else out, func(*args, **kwargs))


def unwrap(value: Any) -> Any:
    return value.inner if isinstance(value, LoggingTensor) else value


def describe(value: Any) -> str:
    if isinstance(value, pw.AffineQuantizedTensor):
        return f"{value.spec.format} {list(value.shape)}"
    return f"{type(value).__name__} {list(value.shape)}" if isinstance(value, Tensor) else str(value)


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64)).eval()


def show(title: str, lines: Any) -> None:
    print(f"{title}:")
    for line in lines:
        print(f"  {line}")


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    model, x = block(), torch.randn(3, 64)

    with FunctionLog() as functions, OperatorLog() as ran:
        y = model(x)
    show("float: functions that the model calls", functions.calls)
    show("float: operators that run", ran.calls)
    assert ran.calls["aten.addmm.default"] == 2

    pw.quantize_(model, pw.Int8WeightOnlyConfig())
    with FunctionLog() as functions_again, OperatorLog() as ran_again:
        z = model(x)
    assert functions_again.calls == functions.calls  # the model calls the same functions: only the weights differ
    assert "aten.addmm.default" not in ran_again.calls  # a kernel of the table runs F.linear
    assert (z - y).norm() < 0.02 * y.norm()
    show("int8: operators that run for the same calls", ran_again.calls)

    # A quantized weight defers to tensor subclasses that it does not know, so the log of a logging input is complete.
    LoggingTensor.calls.clear()
    logged = model(LoggingTensor(x))
    show("int8: operators called on a logging input", LoggingTensor.calls)
    assert sum(call.startswith("aten.addmm") and "int8" in call for call in LoggingTensor.calls) == 2
    torch.testing.assert_close(logged.inner, z)

    # An op without a kernel for codes runs on a dequantized copy. The fallback is counted, and an error under strict().
    pw.reset_fallbacks()
    with pw.kernels.strict():
        model(x)  # no such op in this model
        try:
            model[0].weight.softmax(0)
        except pw.FallbackError as error:
            print(f"strict: {error}")
        else:
            raise AssertionError("softmax of a quantized weight ran under strict()")
    assert all(name.endswith("/dequantize") for name in pw.fallbacks())


if __name__ == "__main__":
    main()

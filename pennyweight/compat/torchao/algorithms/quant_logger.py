"""torchao.prototype.quant_logger: statistics of parameters and of the inputs of linear layers, as the model runs.

Every entry goes through the custom op ``quant_logger::log_tensor``, which users redefine; the default prints.
``pennyweight.compare`` and the report page show errors layer by layer instead.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

__all__ = [
    "ActivationLoggingTensor", "add_activation_loggers", "counter", "enable_log_stats_to_file",
    "enable_log_tensor_save_tensors_to_disk", "get_default_stats", "log_parameter_info", "log_tensor", "reset_counter",
]  # fmt: skip

counter = [0]  # entries so far
OP = "quant_logger::log_tensor"


def reset_counter() -> None:
    """Count entries from zero again."""
    counter[0] = 0


def get_default_stats(x: Tensor) -> tuple[float, float, float]:
    """(largest magnitude, mean, standard deviation) of x; zeros for an empty tensor."""
    if x.numel() == 0:
        return 0.0, 0.0, 0.0
    x = x.detach()
    return x.abs().max().item(), x.mean().item(), x.std(correction=0).item()


def _next() -> int:
    counter[0] += 1
    return counter[0] - 1


def _print(x: Tensor, fqn: str, op: str, tag: str, extra: str | None = None) -> None:
    """Print one entry: its tag, number, name, op and statistics.

    x is declared as mutated, although it is not, so that compilers keep the call.
    """
    most, mean, std = get_default_stats(x)
    more = "" if extra is None else f"{extra=}, "
    print(f"t={tag}, c={_next()}, {fqn=}, {op=}, {more}max_abs={most:.2f}, avg={mean:.2f}, std={std:.2f}")


def _define(function: Any) -> Any:
    """Make a function with the arguments of :func:`log_tensor` its implementation."""
    made = torch.library.custom_op(OP, function, mutates_args=("x",))
    made.register_fake(lambda x, fqn, op, tag, extra=None: None)
    return made


log_tensor = _define(_print)


def enable_log_tensor_save_tensors_to_disk(save_dir: Any) -> None:
    """From now on save each tensor as ``FQN_OP_TAG.pt`` in a folder, which is created; a later one replaces it."""
    folder = Path(save_dir)
    folder.mkdir(parents=True, exist_ok=True)

    def save(x: Tensor, fqn: str, op: str, tag: str, extra: str | None = None) -> None:
        name = f"{fqn}_{op}_{tag}.pt".replace("/", "_").replace(":", "_")
        torch.save(x.detach().clone(), folder / name)

    _define(save)


def enable_log_stats_to_file(filename: Any) -> None:
    """From now on append each entry to a CSV file, which is started with its header."""
    path = Path(filename)

    def write(mode: str, row: list[Any]) -> None:
        with path.open(mode, encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(row)

    write("w", ["tag", "counter_val", "fqn", "op", "max_abs", "avg", "std", "extra"])

    def append(x: Tensor, fqn: str, op: str, tag: str, extra: str | None = None) -> None:
        write("a", [tag, _next(), fqn, op, *get_default_stats(x), extra or ""])

    _define(append)


class ActivationLoggingTensor(Tensor):
    """A weight whose inputs are logged when F.linear uses it; in other operations it is the weight itself."""

    original_weight_tensor: Tensor
    fqn: str

    @staticmethod
    def __new__(cls: Any, original_weight_tensor: Tensor, fqn: str) -> ActivationLoggingTensor:
        w = original_weight_tensor
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[return-value]
            cls, w.shape, dtype=w.dtype, device=w.device, requires_grad=False
        )

    def __init__(self, original_weight_tensor: Tensor, fqn: str) -> None:
        self.original_weight_tensor, self.fqn = original_weight_tensor, fqn

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ActivationLoggingTensor(fqn={self.fqn}, shape={self.shape})"

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, str]]:
        return ["original_weight_tensor"], {"fqn": self.fqn}

    @staticmethod
    def __tensor_unflatten__(inner: Any, metadata: Any, outer_size: Any, outer_stride: Any) -> ActivationLoggingTensor:
        return ActivationLoggingTensor(inner["original_weight_tensor"], metadata["fqn"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            x, w = given["input"], given["weight"]
            if isinstance(w, ActivationLoggingTensor):
                n, k = w.shape
                rows = x.numel() // k if k else 0
                torch.ops.quant_logger.log_tensor(x, w.fqn, "linear", "act", f"MKN={rows}|{k}|{n}")
                return func(x, w.original_weight_tensor, given.get("bias"))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return ActivationLoggingTensor(args[0].original_weight_tensor.detach(), args[0].fqn)

        def inside(x: Any) -> Any:
            return x.original_weight_tensor if isinstance(x, ActivationLoggingTensor) else x

        return func(*tree_map(inside, args), **tree_map(inside, kwargs or {}))


def add_activation_loggers(model: nn.Module) -> None:
    """Log the inputs of all linear layers, in place. Quantized weights work too: wrap after quantizing."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not isinstance(module.weight, ActivationLoggingTensor):
            fqn = f"{name}.weight" if name else "weight"
            wrapped = ActivationLoggingTensor(module.weight.detach(), fqn)
            module.weight = nn.Parameter(wrapped, requires_grad=False)


def log_parameter_info(model: nn.Module) -> None:
    """Log each parameter, with the tag "param"; quantized ones by their values."""
    for fqn, parameter in model.named_parameters():
        x = getattr(parameter, "original_weight_tensor", parameter)
        x = x.dequantize() if hasattr(x, "tensor_impl") else x
        torch.ops.quant_logger.log_tensor(x.detach(), fqn, "", "param", None)

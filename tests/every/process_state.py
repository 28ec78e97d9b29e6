"""A digest of what the library computes, under a state of the process.

    python -m tests.every.process_state STATE

prints JSON: the SHA-256 of each result under the state, set before pennyweight computes anything, and again after the
state was reset. Every input names its dtype, device and generator, so nothing but the library can differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import pennyweight as pw
from pennyweight import optim
from pennyweight.core.spec import SPECS
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.kernels.repack import prepare
from pennyweight.planning.configs.by_name import CONFIGS, by_name


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def both() -> Iterator[None]:
    with default_dtype(torch.bfloat16), Dispatched():
        yield


STATES: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "deterministic": deterministic,
    "one thread": lambda: threads(1),
    "three threads": lambda: threads(3),
    "function mode": Functions,
    "dispatch mode": Dispatched,
    "bfloat16, dispatch mode": both,
}


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    seed = torch.Generator(device="cpu").manual_seed(sum((i + 1) * n for i, n in enumerate(shape)))
    return torch.randn(shape, generator=seed, dtype=torch.float32, device="cpu").to(dtype)


def layer(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(128, 48, device="cpu", dtype=dtype))
    model[0].weight = nn.Parameter(normal(48, 128, dtype=dtype))
    model[0].bias = nn.Parameter(normal(48, dtype=dtype))
    return model


def of_config(name: str) -> Iterator[tuple[str, torch.Tensor]]:
    for dtype in (torch.float32, torch.bfloat16):
        model = layer(dtype)
        pw.quantize_(model, by_name(name))
        w, x = model[0].weight, normal(5, 128, dtype=dtype)
        yield f"{dtype} value", w.dequantize()
        yield f"{dtype} linear", model(x)
        yield f"{dtype} matmul", w @ x.t()
        buffer = io.BytesIO()
        torch.save(w, buffer)
        buffer.seek(0)
        yield f"{dtype} pickled", torch.load(buffer, weights_only=True).dequantize()
    if not torch.is_inference_mode_enabled():
        with torch.enable_grad():
            model = layer()
            pw.quantize_(model, by_name(name))
            y = normal(5, 128).requires_grad_()
            model(y).square().sum().backward()
            yield "gradient", y.grad  # type: ignore[misc]


def of_spec(name: str) -> Iterator[tuple[str, torch.Tensor]]:
    spec = SPECS[name]
    w = QT.from_float(normal(16, 256), spec)
    yield "value", w.dequantize()
    yield "packed", prepare(w).dequantize()
    yield "rows", F.embedding(torch.tensor([3, 0, 3], dtype=torch.int64, device="cpu"), prepare(w, ("embedding",)))
    yield "in place", w.clone().mul_(0.5).dequantize()


def of_optimizer(name: str) -> Iterator[tuple[str, torch.Tensor]]:
    p = nn.Parameter(normal(64, 128))
    optimizer = getattr(optim, name)([p], lr=0.1)
    for step in range(3):
        p.grad = normal(64, 128 + 0 * step) * (step + 1)
        optimizer.step()
    yield "parameter", p.detach()


def battery() -> Iterator[tuple[str, Callable[[], Iterator[tuple[str, torch.Tensor]]]]]:
    for name in CONFIGS:
        yield f"config {name}", lambda name=name: of_config(name)
    for name in SPECS:
        yield f"spec {name}", lambda name=name: of_spec(name)
    for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
        yield f"optimizer {name}", lambda name=name: of_optimizer(name)


def digests() -> dict[str, str]:
    found = {}
    for name, run in battery():
        try:
            for label, t in run():
                data = t.detach().float().contiguous().numpy().tobytes()
                found[f"{name}: {label}"] = hashlib.sha256(data).hexdigest()
        except Exception as error:
            found[f"{name}: raises"] = f"{type(error).__name__}: {error}"[:300]
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with STATES[sys.argv[1]]():
        under = digests()
    print(json.dumps([under, digests()]))

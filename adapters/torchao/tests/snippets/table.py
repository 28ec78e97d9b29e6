"""The table of snippets, and what they share: deterministic tensors, a model, caught errors.

A snippet is a function that does one thing as a user of torchao does it, importing torchao inside, and returns what it
got by name: tensors, numbers, strings, lists. ``tests/golden/make_torchao_snippets.py`` runs each in the real library,
``test_snippets.py`` through ours. These files import torch only.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Snippet:
    """run      the function
    release  of torchao whose results are recorded
    approx   name of a result -> tolerance, relative to the largest absolute value; all others are equal in every bit
    differs  name of a result -> why ours is another one
    """

    run: Callable[[], dict[str, Any]]
    release: str
    approx: dict[str, float] = field(default_factory=dict)
    differs: dict[str, str] = field(default_factory=dict)


SNIPPETS: dict[str, Snippet] = {}
Run = Callable[[], dict[str, Any]]


def snippet(
    release: str = "0.18", approx: dict[str, float] | None = None, differs: dict[str, str] | None = None
) -> Callable[[Run], Run]:
    """Add the decorated function to the table, under "file.function"."""

    def add(run: Run) -> Run:
        name = f"{run.__module__.rpartition('.')[2]}.{run.__name__}"
        assert name not in SNIPPETS, name
        SNIPPETS[name] = Snippet(run, release, approx or {}, differs or {})
        return run

    return add


def load() -> dict[str, Snippet]:
    """All snippets of this folder."""
    for file in sorted(Path(__file__).parent.glob("*.py")):
        importlib.import_module(f"adapters.torchao.tests.snippets.{file.stem}")
    return SNIPPETS


def run(name: str) -> dict[str, Any]:
    """The results of a snippet, in the form that is compared."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations differ from release to release
        torch.manual_seed(0)
        return {role: plain(value) for role, value in SNIPPETS[name].run().items()}


def plain(value: Any) -> Any:
    """A tensor as usual strides on the CPU; a list for a tuple; the name of a dtype."""
    if isinstance(value, Tensor):
        assert type(value) in (Tensor, nn.Parameter), type(value)
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    assert value is None or type(value) in (bool, int, float, str), (value, type(value))
    return value


# -- what snippets use -------------------------------------------------------------------------------------------------

Y = {"y": 2e-6}  # sums of products of float32 in another order


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """About N(0, 1), the same bits on every machine: sums of integers, and one multiplication."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.randint(0, 1 << 14, (12, *shape), generator=generator).sum(0) - 6 * (1 << 14)
    return (total.float() * (1.0037 / (1 << 14))).to(dtype)


def filled(model: nn.Module) -> nn.Module:
    """The model with deterministic parameters."""
    with torch.no_grad():
        for seed, p in enumerate(model.parameters(), 1):
            p.copy_(normal(*p.shape, seed=seed) * 0.1)
    return model


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """64 -> 32 -> 16, the first layer with a bias."""
    return filled(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16, bias=False))).to(dtype).eval()


def inputs(rows: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    return normal(rows, 64, seed=99, dtype=dtype)


def raised(call: Callable[[], Any]) -> str:
    """The builtin type of the exception that the call raises; "nothing" for none."""
    try:
        call()
    except Exception as error:
        return next(c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins")
    return "nothing"


def sqnr(reference: Tensor, got: Tensor) -> float:
    """Signal to noise in dB."""
    reference, got = reference.float(), got.float()
    return float(20 * torch.log10(reference.norm() / (reference - got).norm()))

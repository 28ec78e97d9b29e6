"""torch itself, eager and compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from . import subjects, transformers_llama
from .base import Call, Case, Inputs, Loaded, Way
from .cases import CONVOLUTIONAL, TRANSFORMERS
from .transformers_llama import Sequences

FORWARD = (*TRANSFORMERS, *CONVOLUTIONAL)


def versions() -> dict[str, str]:
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


def call(net: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> Call:
    """A module with inputs, floats in the dtype."""
    ready = tuple(t.to(dtype) if t.is_floating_point() else t for t in inputs)
    return Call(lambda: net(*ready), lambda y: y.float())


def _eager(dtype: torch.dtype):
    def load(folder: Path, threads: int) -> Loaded:
        net, inputs = subjects.read(folder).to(dtype), Inputs(folder)
        nbytes = sum(p.nbytes for p in net.parameters())
        return Loaded(lambda case: call(net, inputs.of(case), dtype), nbytes)

    return load


def _compiled(folder: Path, threads: int) -> Loaded:
    """One graph for each case, weights packed as its constants."""
    net, inputs = subjects.read(folder), Inputs(folder)
    return Loaded(lambda case: call(frozen_graph(net), inputs.of(case), torch.float32))


def frozen_graph(net: nn.Module) -> nn.Module:
    import torch._inductor.config

    torch._inductor.config.freezing = True  # this process only
    torch._dynamo.reset()
    return torch.compile(net, dynamic=False)


def _llama(dtype: torch.dtype = torch.bfloat16) -> Callable[[Path, int], Loaded]:
    def load(folder: Path, threads: int) -> Loaded:
        model = transformers_llama.load(folder, dtype)
        nbytes = sum(p.nbytes for p in model.parameters())
        return Loaded(lambda case: transformers_llama.bind(Sequences(model), case), nbytes)

    return load


def _compiled_llama(folder: Path, threads: int) -> Loaded:
    """Through a cache of fixed size, without which each token would be compiled anew."""
    from transformers import StaticCache

    model = transformers_llama.load(folder)

    def bind(case: Case):
        torch._dynamo.reset()
        compiled = copy.copy(model)
        compiled.forward = torch.compile(model.forward, dynamic=False)
        make = lambda batch, most: StaticCache(config=model.config, max_cache_len=most)  # noqa: E731
        return transformers_llama.bind(Sequences(compiled, make), case)

    return Loaded(bind)


def _plain(case: Case) -> bool | str:
    if case.task in ("first token", "file to file"):
        return "there is no quantized file"
    return case.cache == "plain" or "transformers' own caches are float, without further packages"


def ways() -> list[Way]:
    return [
        Way("torch fp32", "torch", 32, 32, "fp32", 1e-5, FORWARD, _eager(torch.float32)),
        Way("torch bf16", "torch", 16, 16, "bf16", 0.2, FORWARD, _eager(torch.bfloat16)),
        Way("torch bf16", "torch", 16, 16, "bf16", 1e-5, ("llama",), _llama(), _plain),
        Way("torch fp32", "torch", 32, 32, "fp32", 1e-5, ("smollm2",), _llama(torch.float32), _plain),
        Way("torch bf16", "torch", 16, 16, "bf16", 0.2, ("smollm2",), _llama(), _plain),
    ]


def compiled_ways() -> list[Way]:
    return [
        Way("torch.compile fp32", "compile", 32, 32, "fp32", 1e-3, FORWARD, _compiled),
        Way("torch.compile bf16", "compile", 16, 16, "bf16", 0.05, ("llama",), _compiled_llama, _plain),
    ]

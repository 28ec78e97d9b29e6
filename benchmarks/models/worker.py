"""A process that holds the models of one family; see peers/worker.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.worker import serve

from . import base, hf, llamacpp
from .base import Loaded, Way

FAMILIES = {
    "torch": hf.torch_ways,
    "pennyweight": hf.pennyweight_ways,
    "torchao": hf.torchao_ways,
    "llamacpp": llamacpp.ways,
}


class Worker:
    def __init__(self, family: str, threads: int) -> None:
        self.threads = threads
        self.ways: dict[str, Way] = {w.name: w for w in FAMILIES[family]()}
        self.loaded: dict[str, Loaded] = {}

    def describe(self) -> dict[str, Any]:
        fields = ("bits", "stored_bits", "arithmetic", "bound")
        table = {name: {f: getattr(w, f) for f in fields} for name, w in self.ways.items()}
        return {"versions": {}, "competitors": table}

    def write(self, folder: str) -> None:
        """The bf16 model that all start from."""
        hf.write_model(Path(folder))

    def build(self, name: str, folder: str) -> tuple[int, dict[str, float]]:
        """Load and quantize; bytes, and seconds by name."""
        self.loaded[name] = got = self.ways[name].load(Path(folder), self.threads)
        return got.nbytes, got.costs

    def check(self, name: str) -> list[torch.Tensor]:
        """Logits after the prompt, and after three tokens more."""
        model, numbers = self.loaded[name].model, base.tokens(base.PROMPT + 3)
        first = model.prompt(numbers[: base.PROMPT])
        for number in numbers[base.PROMPT :]:
            last = model.step(number)
        return [first.float().clone(), last.float().clone()]

    def visit(self, name: str) -> tuple[float, float]:
        return base.visit(self.loaded[name].model)


def main(connection: Any, family: str, threads: int) -> None:
    torch.set_num_threads(threads)
    serve(connection, lambda: Worker(family, threads))

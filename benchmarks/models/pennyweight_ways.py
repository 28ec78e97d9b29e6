"""Pennyweight through its public interface: `quantize_`, then `fuse_` (or, where there is none, `freeze_`), a call."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pennyweight as pw

from . import llama, subjects, transformers_llama
from .base import Case, Inputs, Loaded, Way
from .cases import CONVOLUTIONAL, TRANSFORMERS
from .torch_ways import call, frozen_graph
from .transformers_llama import FileToFile, FirstToken, Sequences


def versions() -> dict[str, str]:
    return {"pennyweight": pw.__version__}


def finish(model: Any, grouped: bool = False) -> str:
    """Make it ready for inference; what was done. The older way, with grouped attention for a language model, stays for
    comparisons with older versions."""
    if hasattr(pw, "fuse_"):
        pw.fuse_(model)
        return "fuse_"
    pw.inference.freeze_(model)
    if grouped:
        from pennyweight.integrations.attention import use_grouped_attention

        use_grouped_attention(model)
        return "freeze_, grouped attention"
    return "freeze_"


def _convolutions(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d)


def _quantize_folded(net: nn.Module, config: Any, data: list[torch.Tensor], **options: Any) -> None:
    """Batch norms become part of the weights, as in the peers' graphs, unless that changes the outputs."""
    try:
        pw.quantize_(net, config, calibration=data, algorithm=["fold", "nearest"], **options)
    except pw.PlanError:
        pw.quantize_(net, config, **options)


def _static(net: nn.Module, inputs: Inputs) -> None:
    data = [batch for (batch,) in inputs.calibration]
    config = pw.calibrate(net, data, pw.Int8StaticActivationInt8WeightConfig, filter_fn=_convolutions)
    _quantize_folded(net, config, data)


def _dynamic(net: nn.Module, inputs: Inputs) -> None:
    pw.quantize_(subjects.core(net), pw.Int8DynamicActivationInt8WeightConfig())


def _grouped(net: nn.Module, inputs: Inputs) -> None:
    pw.quantize_(subjects.core(net), "int8-dynamic-grouped")


def _dynamic_convolutions(net: nn.Module, inputs: Inputs) -> None:
    data = [batch for (batch,) in inputs.calibration]
    config = pw.Int8DynamicActivationInt8WeightConfig()
    _quantize_folded(net, config, data, filter_fn=_convolutions)


def _forward(quantize: Callable[[nn.Module, Inputs], None], compiled: bool = False) -> Callable[[Path, int], Loaded]:
    def load(folder: Path, threads: int) -> Loaded:
        net, inputs = subjects.read(folder), Inputs(folder)
        quantize(net, inputs)
        nbytes = sum(p.nbytes for p in net.parameters())
        if compiled:
            return Loaded(lambda case: call(frozen_graph(net), inputs.of(case), torch.float32), nbytes)
        done = finish(subjects.core(net))
        return Loaded(lambda case: call(net, inputs.of(case), torch.float32), nbytes, done)

    return load


@dataclass
class Language:
    """The quantized model in memory; a case that is about files writes them first, once."""

    name: str
    config: Any
    folder: Path
    model: Any

    @property
    def saved(self) -> Path:
        return self.folder / self.name.replace(" ", "-")

    def save(self) -> None:
        """From the float file to the quantized one."""
        shutil.rmtree(self.saved, ignore_errors=True)
        model = transformers_llama.load(self.folder)
        pw.quantize_(model, self.config)
        model.save_pretrained(self.saved)

    def open(self) -> Sequences:
        model = transformers_llama.load(self.saved)
        finish(model, grouped=True)
        return Sequences(model)

    def bind(self, case: Case) -> Any:
        if case.task == "first token":
            self.save()
            return FirstToken(self.open)
        if case.task == "file to file":
            return FileToFile(self.save, sorted(self.folder.glob("*.safetensors")), self.saved, self.open)
        make = None
        if case.cache == "int8":
            from pennyweight.inference.kv_cache import QuantizedCache

            make = lambda batch, most: QuantizedCache(self.model.config, bits=8)  # noqa: E731
        return transformers_llama.bind(Sequences(self.model, make), case)


def _language(name: str, config: Any) -> Callable[[Path, int], Loaded]:
    def load(folder: Path, threads: int) -> Loaded:
        model = transformers_llama.load(folder)
        pw.quantize_(model, config)
        nbytes = sum(p.nbytes for p in model.parameters())
        done = finish(model, grouped=True)
        return Loaded(Language(name, config, folder, model).bind, nbytes, done)

    return load


def _with_embeddings(config: Any, embeddings: Any) -> Any:
    return pw.FqnToConfig({"_default": config, "_embeddings": embeddings})


def _file(folder: Path, threads: int) -> Loaded:
    """The GGUF file as it is, without conversion."""
    from transformers import LlamaForCausalLM

    from pennyweight.integrations.transformers import load_pretrained

    def open() -> Sequences:
        model = load_pretrained(LlamaForCausalLM, folder / llama.GGUF, dtype=torch.bfloat16)
        finish(model)
        return Sequences(model)

    sequences = open()
    nbytes = sum(p.nbytes for p in sequences.model.parameters())

    def bind(case: Case) -> Any:
        return FirstToken(open) if case.task == "first token" else transformers_llama.bind(sequences, case)

    return Loaded(bind, nbytes, "fuse_")


def ways() -> list[Way]:
    symmetric = pw.Int8DynamicActivationIntxWeightConfig(
        torch.int4, pw.PerGroup(32), act_mapping_type=pw.MappingType.SYMMETRIC
    )
    language = (
        ("int4 g128", 4, 4.25, "bf16", 0.6, pw.Int4WeightOnlyConfig(group_size=128)),
        ("int8-symmetric-int4 g32", 4, 4.5, "int8", 0.6, symmetric),
        ("int8-dynamic", 8, 8, "int8", 0.12, pw.Int8DynamicActivationInt8WeightConfig()),
        ("int8-dynamic-grouped", 8, 8.125, "int8", 0.12, "int8-dynamic-grouped"),
        ("int8 weight-only", 8, 8, "bf16", 0.12, pw.Int8WeightOnlyConfig()),
    )
    int8 = pw.Int8WeightOnlyConfig()  # also of the embeddings, with which the head is tied
    int4 = _with_embeddings(pw.Int4WeightOnlyConfig(group_size=64), int8)
    small = (
        ("int4 g64, embeddings int8", 4, 5.65, "bf16", 0.6, int4),
        ("int8", 8, 8.05, "bf16", 0.2, _with_embeddings(int8, int8)),
        ("int8-dynamic, embeddings int8", 8, 8.05, "int8", 0.3,
         _with_embeddings(pw.Int8DynamicActivationInt8WeightConfig(), int8)),
    )  # fmt: skip
    name, family = "pennyweight int8-dynamic", "pennyweight"
    return [
        Way(name, family, 8, 8, "int8", 0.3, TRANSFORMERS, _forward(_dynamic)),
        Way(f"{name}-grouped", family, 8, 8.125, "int8", 0.3, TRANSFORMERS, _forward(_grouped)),
        Way(name, family, 8, 8, "int8", 0.5, CONVOLUTIONAL, _forward(_dynamic_convolutions)),
        Way("pennyweight int8-static", family, 8, 8, "int8", 0.5, CONVOLUTIONAL, _forward(_static)),
        *(
            Way(f"pennyweight {n}", family, *fields, ("llama",), _language(n, config))
            for n, *fields, config in language
        ),
        Way("pennyweight Q4_1 file", family, 4, llama.FILE_BITS, "bf16", 0.2, ("smollm2",), _file),
        *(Way(f"pennyweight {n}", family, *fields, ("smollm2",), _language(n, config)) for n, *fields, config in small),
    ]


def compiled_ways() -> list[Way]:
    name = "pennyweight int8-dynamic, torch.compile"
    return [Way(name, "compile", 8, 8, "int8", 0.3, TRANSFORMERS, _forward(_dynamic, compiled=True))]

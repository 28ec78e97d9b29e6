"""SmolLM2 through OpenVINO GenAI, which reads the GGUF file: 4-bit codes, scales and offsets in groups of 32.

Inputs are quantized in such groups, keys and values to int8, as is the CPU plugin's default. Its pipeline generates and
loads; logits and single tokens are those of the graph that it makes of the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as op
import openvino_genai
import torch
from torch import Tensor

from . import llama, transformers_llama
from .base import Case, Loaded, Way


def versions() -> dict[str, str]:
    return {"openvino-genai": openvino_genai.__version__}


def _options(threads: int) -> dict[str, Any]:
    return {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}


def _pipeline(folder: Path, threads: int, **more: Any) -> Any:
    return openvino_genai.LLMPipeline(folder / llama.GGUF, "CPU", **_options(threads), **more)


def _last_logits_only(model: Any) -> None:
    """The head for the last token of each sequence, as the pipeline has it."""
    found = model.output("logits").get_node().input_value(0).get_node()
    while found.get_type_name() != "MatMul":
        found = found.input_value(0).get_node()
    rows = found.input_value(0)
    last = op.gather(rows, op.constant(np.array([-1], np.int64)), op.constant(np.array(1, np.int64)))
    found.input(0).replace_source_output(last.output(0))
    model.validate_nodes_and_infer_types()


def _generate(pipeline: Any, numbers: list[int], count: int) -> list[int]:
    config = openvino_genai.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False)
    return list(pipeline.generate(ov.Tensor(np.array([numbers])), config).tokens[0])


class Sequences:
    """Sequences of equal length in one request, which keeps their keys and values."""

    def __init__(self, compiled: Any, pipeline: Any = None) -> None:
        self.request, self.pipeline, self.past = compiled.create_infer_request(), pipeline, 0

    def prompt(self, numbers: list[list[int]]) -> Tensor:
        self.request.reset_state()
        self.past = 0
        return self._run(np.array(numbers))

    def token(self, numbers: list[int]) -> Tensor:
        return self._run(np.array(numbers)[:, None])

    def generate(self, numbers: list[int], count: int) -> list[int]:
        return _generate(self.pipeline, numbers, count)

    def _run(self, ids: np.ndarray) -> Tensor:
        batch, n = ids.shape
        inputs = {
            "input_ids": ids, "attention_mask": np.ones((batch, self.past + n), np.int64),
            "position_ids": np.tile(np.arange(self.past, self.past + n), (batch, 1)),
            "beam_idx": np.arange(batch, dtype=np.int32),
        }  # fmt: skip
        self.request.infer(inputs)
        self.past += n
        return torch.from_numpy(self.request.get_tensor("logits").data[:, -1].copy())


class _FirstToken:
    """The pipeline, from the file to its first token; the output is the graph's."""

    def __init__(self, folder: Path, threads: int, sequences: Sequences) -> None:
        self.folder, self.threads, self.sequences = folder, threads, sequences

    def step(self) -> None:
        _generate(_pipeline(self.folder, self.threads), llama.tokens(1, 1)[0], 1)

    def output(self) -> Tensor:
        return self.sequences.prompt(llama.tokens(1, 1)).float()


def _load(folder: Path, threads: int) -> Loaded:
    pipeline = _pipeline(folder, threads, enable_save_ov_model=True)
    model = ov.Core().read_model(folder / "openvino_model.xml")
    _last_logits_only(model)
    compiled = ov.Core().compile_model(model, "CPU", _options(threads))

    def bind(case: Case) -> Any:
        sequences = Sequences(compiled, pipeline)
        if case.task == "first token":
            return _FirstToken(folder, threads, sequences)
        return transformers_llama.bind(sequences, case)

    precision = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    return Loaded(bind, (folder / llama.GGUF).stat().st_size, f"float computed as {precision}")


def ways() -> list[Way]:
    return [Way("openvino genai, Q4_1 file", "openvino_genai", 4, llama.FILE_BITS, "int8", 0.3, ("smollm2",), _load)]

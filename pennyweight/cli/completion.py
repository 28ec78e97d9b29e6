"""Values of options that a shell completes. Where nothing is offered, bash, zsh and fish complete paths.

Imports no torch, so that the tab key does not wait for it. The tuples repeat what the registries say
(``algorithms.ALGORITHMS``, ``io.convert_checkpoint.formats``, ``planning.engines.ENGINES``, ``io.gguf.mixes``); a test
compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..planning.config_names import CONFIGS

ALGORITHMS = (
    "auto", "awq", "bias", "distill", "fold", "gptaq", "gptq", "hqq", "imatrix", "kmeans", "mse", "nearest",
    "reconstruct", "rotate", "smooth", "tune",
)  # fmt: skip
FORMATS = (
    "pennyweight", "float", "gguf", "compressed-tensors", "gptq", "gptq_v2", "awq", "bitsandbytes", "fp8", "mxfp4",
)  # fmt: skip
ENGINES = ("vllm", "vllm-gpu", "transformers", "llama.cpp", "onnxruntime", "openvino")
CONVERTED_FOR = ENGINES[:4]  # those with a format that convert writes
GGUF_TYPES = (
    "Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S",
    "Q5_K_M", "Q6_K", "Q2_K_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4_MOE", "F32", "F16", "Q3_K", "Q4_K",
    "Q5_K", "F64", "BF16", "MXFP4", "NVFP4",
)  # fmt: skip
DTYPES = ("float32", "float16", "bfloat16", "float64")
INPUT_DTYPES = ("float32", "bfloat16", "float16")  # of explain
ON_INDIVISIBLE = ("pad", "largest_divisor", "skip", "error")
ONNX_STYLES = ("auto", "matmulnbits", "qdq")

Complete = Callable[[str], list[str]]


def one_of(values: Iterable[str]) -> Complete:
    """Completes one of the values."""
    known = tuple(values)

    def complete(incomplete: str) -> list[str]:
        return [value for value in known if value.startswith(incomplete)]

    return complete


config = one_of(CONFIGS)


def algorithm(incomplete: str) -> list[str]:
    """Completes the last step of a recipe such as ``smooth+gptq``."""
    before, plus, last = incomplete.rpartition("+")
    return [f"{before}{plus}{name}" for name in ALGORITHMS if name.startswith(last)]


def gguf_type(incomplete: str) -> list[str]:
    """Completes types and mixes of llama.cpp, in the case that was begun."""
    names = GGUF_TYPES if incomplete.isupper() or not incomplete else tuple(name.lower() for name in GGUF_TYPES)
    return [name for name in names if name.startswith(incomplete)]

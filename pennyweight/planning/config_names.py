"""Short names of configs ("int4", "int8-dynamic") as data. Imports no torch: ``pennyweight --help`` lists them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Name:
    """A config by its class name and arguments, which ``configs.by_name.by_name`` turns into the config.

    group     the argument that a group size sets: the name of an integer field, or of a granularity ("...granularity")
    no_group  the reason if there is none
    algorithm the algorithm that belongs to the name, a recipe for ``quantize_``; it needs calibration data
    """

    text: str
    config: str
    args: dict[str, Any] = field(default_factory=dict)
    group: str | None = None
    no_group: str = ""
    algorithm: str = ""


_PER_ROW = "it has one scale per output channel"
_MX = "the OCP MX standard fixes blocks of 32"
_GGUF = "the GGUF type fixes groups of 32"

CONFIGS = {
    "int8": Name("int8 weights, one scale per output channel", "Int8WeightOnlyConfig", group="group_size"),
    "int8-dynamic": Name(
        "int8 weights and inputs, one scale per channel and per token", "Int8DynamicActivationInt8WeightConfig",
        no_group=_PER_ROW,
    ),
    "int8-dynamic-grouped": Name(
        "int8 weights in groups of 128, int8 inputs in the same groups with zero points",
        "Int8DynamicActivationInt8WeightConfig",
        {"granularity": 128, "act_mapping_type": "asymmetric"}, group="granularity",
    ),
    "int4": Name("4-bit weights in groups of 128", "Int4WeightOnlyConfig", group="group_size"),
    "8da4w": Name(
        "int4 weights in groups of 32, int8 inputs per token", "Int8DynamicActivationInt4WeightConfig",
        group="group_size",
    ),
    **{
        f"int{n}": Name(
            f"int{n} weights in groups of 64", "IntxWeightOnlyConfig", {"weight_dtype": f"int{n}", "granularity": 64},
            group="granularity",
        )
        for n in (2, 3, 5, 6, 7)
    },
    **{
        f"uint{n}": Name(
            f"uint{n} weights in groups of 64, with a zero point", "UIntXWeightOnlyConfig", {"dtype": f"uint{n}"},
            group="group_size",
        )
        for n in (2, 3, 4)
    },
    "float8": Name("e4m3 weights, one scale per output channel", "Float8WeightOnlyConfig", no_group=_PER_ROW),
    "float8-dynamic": Name(
        "e4m3 weights and inputs, one scale per tensor", "Float8DynamicActivationFloat8WeightConfig",
        no_group="it has one scale per tensor",
    ),
    "float8-int4": Name(
        "int4 weights in groups of 128, e4m3 inputs per row", "Float8DynamicActivationInt4WeightConfig",
        group="group_size",
    ),
    "fp6": Name("e3m2 weights, one scale per output channel", "FPXWeightOnlyConfig", no_group=_PER_ROW),
    "nf4": Name("NF4 (QLoRA's 4-bit NormalFloat) in blocks of 64", "NF4WeightOnlyConfig", group="block_size"),
    "mxfp8": Name("OCP MX e4m3 weights", "MXWeightOnlyConfig", {"weight_dtype": "e4m3"}, no_group=_MX),
    "mxfp6": Name("OCP MX e3m2 weights", "MXWeightOnlyConfig", {"weight_dtype": "e3m2"}, no_group=_MX),
    "mxfp4": Name("OCP MX e2m1 weights", "MXWeightOnlyConfig", {"weight_dtype": "e2m1"}, no_group=_MX),
    "mxfp8-dynamic": Name(
        "OCP MX e4m3 weights and inputs", "MXDynamicActivationMXWeightConfig",
        {"weight_dtype": "e4m3", "activation_dtype": "e4m3"}, no_group=_MX,
    ),
    "mxfp4-dynamic": Name(
        "OCP MX e2m1 weights and inputs", "MXDynamicActivationMXWeightConfig",
        {"weight_dtype": "e2m1", "activation_dtype": "e2m1"}, no_group=_MX,
    ),
    "nvfp4": Name(
        "e2m1 weights in blocks of 16 with e4m3 scales", "NVFP4WeightOnlyConfig",
        no_group="the format fixes blocks of 16",
    ),
    "nvfp4-dynamic": Name(
        "NVFP4 weights and inputs", "NVFP4DynamicActivationNVFP4WeightConfig", no_group="the format fixes blocks of 16"
    ),
    # names that inference engines use
    "w4a16": Name(
        "int4 weights in groups of 128, symmetric: W4A16 of vLLM, GPTQ and compressed-tensors", "IntxWeightOnlyConfig",
        {"weight_dtype": "int4", "granularity": 128}, group="granularity",
    ),
    "w4a16-awq": Name(
        "uint4 weights in groups of 128, a zero point and a float16 scale each, with algorithm awq: W4A16 of AWQ",
        "UIntXWeightOnlyConfig", {"group_size": 128, "scale_dtype": "float16"}, group="group_size",
        algorithm="awq",
    ),
    "w8a8": Name(
        "int8 weights and inputs, as int8-dynamic: W8A8 of vLLM and compressed-tensors",
        "Int8DynamicActivationInt8WeightConfig", no_group=_PER_ROW,
    ),
    "fp8": Name(
        "e4m3 weights and inputs, one scale per channel and per token: FP8 of vLLM and compressed-tensors",
        "Float8DynamicActivationFloat8WeightConfig", {"granularity": "per_row"}, no_group=_PER_ROW,
    ),
    "q4_0": Name(
        "4-bit weights in groups of 32, symmetric, float16 scales: Q4_0 of llama.cpp", "IntxWeightOnlyConfig",
        {"weight_dtype": "int4", "granularity": 32, "scale_dtype": "float16"}, no_group=_GGUF,
    ),
    "q8_0": Name(
        "int8 weights in groups of 32, float16 scales: Q8_0 of llama.cpp", "IntxWeightOnlyConfig",
        {"weight_dtype": "int8", "granularity": 32, "scale_dtype": "float16"}, no_group=_GGUF,
    ),
}  # fmt: skip


def algorithm_of(config: Any) -> str:
    """The algorithm that belongs to a config given by its short name ("w4a16-awq": "awq"); "" if there is none."""
    entry = CONFIGS.get(config.lower()) if isinstance(config, str) else None
    return "" if entry is None else entry.algorithm

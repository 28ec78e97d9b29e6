"""Short names of configs for the command line and model folders ("int4", "int8-dynamic")."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.arguments import check_number, did_you_mean
from ..granularity import MappingType, PerGroup, PerRow
from . import floating, integer
from .base import AOBaseConfig


@dataclass(frozen=True)
class Name:
    """A config by its class name and arguments.

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
        {"granularity": 128, "act_mapping_type": MappingType.ASYMMETRIC}, group="granularity",
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
    # names that inference engines use
    "w4a16": Name(
        "int4 weights in groups of 128, symmetric: W4A16 of vLLM, GPTQ and compressed-tensors", "IntxWeightOnlyConfig",
        {"weight_dtype": "int4", "granularity": 128}, group="granularity",
    ),
    "w4a16-awq": Name(
        "uint4 weights in groups of 128, a zero point and a float16 scale each, with algorithm awq: W4A16 of AWQ",
        "UIntXWeightOnlyConfig", {"group_size": 128, "scale_dtype": torch.float16}, group="group_size",
        algorithm="awq",
    ),
    "w8a8": Name(
        "int8 weights and inputs, as int8-dynamic: W8A8 of vLLM and compressed-tensors",
        "Int8DynamicActivationInt8WeightConfig", no_group=_PER_ROW,
    ),
    "fp8": Name(
        "e4m3 weights and inputs, one scale per channel and per token: FP8 of vLLM and compressed-tensors",
        "Float8DynamicActivationFloat8WeightConfig", {"granularity": PerRow()}, no_group=_PER_ROW,
    ),
    "q4_0": Name(
        "4-bit weights in groups of 32, symmetric, float16 scales: Q4_0 of llama.cpp", "IntxWeightOnlyConfig",
        {"weight_dtype": "int4", "granularity": 32, "scale_dtype": torch.float16}, no_group=_GGUF,
    ),
    "q8_0": Name(
        "int8 weights in groups of 32, float16 scales: Q8_0 of llama.cpp", "IntxWeightOnlyConfig",
        {"weight_dtype": "int8", "granularity": 32, "scale_dtype": torch.float16}, no_group=_GGUF,
    ),
}  # fmt: skip


# The default candidates where speed counts: configs with a fast kernel on common CPUs
FASTEST: tuple[AOBaseConfig, ...] = (
    integer.Int8DynamicActivationInt8WeightConfig(),
    integer.Int8DynamicActivationInt8WeightConfig(MappingType.ASYMMETRIC, granularity=PerGroup(128)),
    integer.Int8WeightOnlyConfig(),
    integer.Int4WeightOnlyConfig(128),
    integer.Int4WeightOnlyConfig(32),
    integer.Int8DynamicActivationInt4WeightConfig(),
)


def by_name(name: str, group_size: int | None = None) -> AOBaseConfig:
    """The config of a short name, with another group size if given. Raises ValueError with the names that are valid."""
    entry = CONFIGS.get(name)
    if entry is None:
        if hasattr(integer, name) or hasattr(floating, name):
            raise ValueError(f"config {name!r} is a class, not a short name; pass an instance, pw.{name}()")
        raise ValueError(f"unknown config {name!r}{did_you_mean(name, CONFIGS)}. Known: {', '.join(CONFIGS)}")
    args = dict(entry.args)
    if group_size is not None:
        if entry.group is None:
            grouped = ", ".join(n for n, e in CONFIGS.items() if e.group)
            raise ValueError(
                f"group_size={group_size} cannot be used with {name}: {entry.no_group}. Configs with groups: {grouped}"
            )
        check_number("group_size", group_size, integer=True, positive=True)
        args[entry.group] = group_size
    if isinstance(args.get("granularity"), int):
        args["granularity"] = PerGroup(args["granularity"])
    home = integer if hasattr(integer, entry.config) else floating  # names come from the table above, never from a file
    return getattr(home, entry.config)(**args)


def algorithm_of(config: Any) -> str:
    """The algorithm that belongs to a config given by its short name ("w4a16-awq": "awq"); "" if there is none."""
    entry = CONFIGS.get(config) if isinstance(config, str) else None
    return "" if entry is None else entry.algorithm


def named(config: Any) -> Any:
    """The config of a short name for one layer, with its group size if one is given ("int4", "int4:64"); anything else
    is returned unchanged. Raises ValueError for an unknown name, and for one that stands for an algorithm too."""
    if not isinstance(config, str):
        return config
    name, colon, size = config.partition(":")
    if colon and not (size.isascii() and size.isdecimal()):
        raise ValueError(f"{config!r}: after the colon comes a group size, as in 'int4:64'")
    if algorithm_of(name):
        raise ValueError(
            f"{name!r} stands for an algorithm over the whole model, not for single layers; use "
            f"{'uint4:128' if name == 'w4a16-awq' else name!r} and algorithm={algorithm_of(name)!r}"
        )
    return by_name(name, int(size) if colon else None)

"""Short names of configs for the command line and model folders ("int4", "int8-dynamic")."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any

from ..granularity import MappingType, PerGroup
from . import floating, integer
from .base import AOBaseConfig


@dataclass(frozen=True)
class Name:
    """A config by its class name and arguments.

    group     the argument that a group size sets: the name of an integer field, or of a granularity ("...granularity")
    no_group  the reason if there is none
    """

    text: str
    config: str
    args: dict[str, Any] = field(default_factory=dict)
    group: str | None = None
    no_group: str = ""


_PER_ROW = "it has one scale per output channel"
_MX = "the OCP MX standard fixes blocks of 32"

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


def close_to(wrong: str, known: list[str]) -> str:
    """ " (did you mean ...?)", or nothing."""
    close = difflib.get_close_matches(wrong, known, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def by_name(name: str, group_size: int | None = None) -> AOBaseConfig:
    """The config of a short name, with another group size if given. Raises ValueError with the names that are valid."""
    entry = CONFIGS.get(name)
    if entry is None:
        raise ValueError(f"unknown config {name!r}{close_to(name, list(CONFIGS))}. Known: {', '.join(CONFIGS)}")
    args = dict(entry.args)
    if group_size is not None:
        if entry.group is None:
            grouped = ", ".join(n for n, e in CONFIGS.items() if e.group)
            raise ValueError(
                f"group_size={group_size} cannot be used with {name}: {entry.no_group}. Configs with groups: {grouped}"
            )
        if type(group_size) is not int or group_size < 1:
            raise ValueError(f"group_size={group_size!r}: must be a positive integer")
        args[entry.group] = group_size
    if isinstance(args.get("granularity"), int):
        args["granularity"] = PerGroup(args["granularity"])
    home = integer if hasattr(integer, entry.config) else floating  # names come from the table above, never from a file
    return getattr(home, entry.config)(**args)


def named(config: Any) -> Any:
    """The config of a short name; anything else is returned unchanged. Raises ValueError for an unknown name."""
    return by_name(config) if isinstance(config, str) else config

"""Short names of configs for the command line and model folders ("int4", "int8-dynamic")."""

from __future__ import annotations

import re
from typing import Any

import torch

from ...support.arguments import check_number, did_you_mean, hint
from ..config_names import CONFIGS, Name, algorithm_of
from ..granularity import MappingType, PerGroup, PerRow
from . import floating, integer
from .base import AOBaseConfig

__all__ = ["CONFIGS", "FASTEST", "Name", "algorithm_of", "by_name", "named"]

# Values that the table of names, which imports no torch, has as text
_VALUES: dict[tuple[str, str], Any] = {
    ("act_mapping_type", "asymmetric"): MappingType.ASYMMETRIC,
    ("granularity", "per_row"): PerRow(),
    ("scale_dtype", "float16"): torch.float16,
}

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
    entry = CONFIGS.get(name.lower())
    if entry is None:
        raise ValueError(_unknown(name))
    args = {key: _VALUES.get((key, value), value) for key, value in entry.args.items()}
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


_BITS = re.compile(r"(?:w|int)?([2-8])[-_ ]?(?:bits?)?")
_GGUF_TYPE = re.compile(r"(?:i?q[1-8]|tq[12])_\w+(?:-pure)?|bf16|f16|f32|mxfp4_moe")


def _unknown(name: str) -> str:
    """What is said of a name that is not in the table."""
    if hasattr(integer, name) or hasattr(floating, name):
        short = [f"{key!r}" for key, entry in CONFIGS.items() if entry.config == name]
        return f"config {name!r} is a class; its short name is {' or '.join(short[:2])}; in Python pass pw.{name}()"
    bits = _BITS.fullmatch(name.lower())
    if bits:
        return f"unknown config {name!r}{hint([f'int{bits[1]}'])}"
    if _GGUF_TYPE.fullmatch(name.lower()):
        return f"{name!r} is a type of GGUF files, not a config; convert the checkpoint, to='gguf', gguf_type={name!r}"
    return f"unknown config {name!r}{did_you_mean(name, CONFIGS)}. Known: {', '.join(CONFIGS)}"


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
            f"{'uint4:128' if name.lower() == 'w4a16-awq' else name!r} and algorithm={algorithm_of(name)!r}"
        )
    return by_name(name, int(size) if colon else None)

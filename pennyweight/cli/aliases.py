"""Short names of configs on the command line, and --group-size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..planning.configs.aliases import CONFIGS, by_name, close_to

if TYPE_CHECKING:
    from ..planning.configs import AOBaseConfig

__all__ = ["CONFIGS", "build", "close_to", "listing"]


def listing() -> str:
    """One line per name, for --help."""
    width = max(map(len, CONFIGS))
    return "\n".join(f"{name:<{width}}  {entry.text}" for name, entry in CONFIGS.items())


def build(name: str, group_size: int | None = None) -> AOBaseConfig:
    """The config of a short name. Raises ValueError with a remedy."""
    entry = CONFIGS.get(name)
    if entry is None or group_size is None:
        return by_name(name)
    if entry.group is None:
        grouped = ", ".join(n for n, e in CONFIGS.items() if e.group)
        raise ValueError(f"--group-size cannot be used with {name}: {entry.no_group}. Configs with groups: {grouped}")
    if group_size < 1:
        raise ValueError(f"--group-size must be positive, got {group_size}")
    return by_name(name, **{entry.group: group_size})

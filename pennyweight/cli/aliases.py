"""Short names of configs on the command line, and --group-size."""

from __future__ import annotations

from ..planning.configs.aliases import CONFIGS, close_to
from ..planning.configs.aliases import by_name as build

__all__ = ["CONFIGS", "build", "close_to", "listing"]


def listing() -> str:
    """One line per name, for --help."""
    width = max(map(len, CONFIGS))
    return "\n".join(f"{name:<{width}}  {entry.text}" for name, entry in CONFIGS.items())

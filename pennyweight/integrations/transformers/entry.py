"""Registers the method "pennyweight" with transformers, as soon as transformers has created its table of methods.

The adapter itself is imported when the first folder of ours is loaded: at this point transformers has not yet finished
its own import.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

METHOD = "pennyweight"


class _Entry:
    """Placeholder in transformers' table of configs until :mod:`.adapter` registers the real class."""

    @staticmethod
    def from_dict(config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        adapter = importlib.import_module(f"{__package__}.adapter")
        adapter.register()  # in the current table: transformers may have been re-imported
        return adapter.PennyweightConfig.from_dict(config_dict, return_unused_kwargs, **kwargs)


def register() -> None:
    """Add the entry, unless the real class is already registered."""
    auto = importlib.import_module("transformers.quantizers.auto")
    table = getattr(auto, "AUTO_QUANTIZATION_CONFIG_MAPPING", None)
    if table is None:
        warnings.warn(
            "this release of transformers has moved its quantizers: from_pretrained cannot "
            "load folders written by pennyweight; upgrade pennyweight, or install a release of transformers that "
            "pyproject.toml of pennyweight lists",
            RuntimeWarning,
            stacklevel=2,
        )
    else:
        table.setdefault(METHOD, _Entry)

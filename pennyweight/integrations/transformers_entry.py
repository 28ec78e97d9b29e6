"""Makes the method "pennyweight" known to transformers. Imported as soon as transformers has its table of methods.

The adapter itself is imported when the first folder of ours comes: at this point transformers has not yet finished its
own import.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

METHOD = "pennyweight"


class _Entry:
    """Stands in transformers' table of configs until :mod:`.transformers` puts the real one there."""

    @staticmethod
    def from_dict(config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        adapter = importlib.import_module(f"{__package__}.transformers")
        adapter.register()  # in the table that is there now: transformers may have been imported anew
        return adapter.PennyweightConfig.from_dict(config_dict, return_unused_kwargs, **kwargs)


def register() -> None:
    """Add the entry, unless the real one is there already."""
    auto = importlib.import_module("transformers.quantizers.auto")
    table = getattr(auto, "AUTO_QUANTIZATION_CONFIG_MAPPING", None)
    if table is None:
        warnings.warn(
            "this release of transformers keeps its quantizers where pennyweight does not look: from_pretrained cannot "
            "load folders that pennyweight wrote; upgrade pennyweight, or install a release of transformers that "
            "pyproject.toml of pennyweight names",
            RuntimeWarning,
            stacklevel=2,
        )
    else:
        table.setdefault(METHOD, _Entry)

"""accelerate's loaders read our files: ``load_checkpoint_in_model`` and ``load_checkpoint_and_dispatch``.

They match the names of a file with those of the model, and leave a weight that the file does not have as it was
initialized. A quantized weight is stored as its parts, so none would match. In a process that imported this package the
file is read by it. In any other process the guards of the file (docs/format.md) make accelerate raise.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from accelerate.utils import modeling
from safetensors import safe_open

from ..io.detect_format import open as open_any
from ..io.file import CheckpointError
from ..io.manifest import KEY


def register() -> None:
    """Let accelerate read files of ours with this package."""
    if not hasattr(modeling.load_state_dict, "__wrapped__"):
        modeling.load_state_dict = _reading_ours(modeling.load_state_dict)


def _reading_ours(original: Any) -> Any:
    @wraps(original)
    def load_state_dict(checkpoint_file: Any, device_map: Any = None) -> Any:
        if not _is_ours(str(checkpoint_file)):
            return original(checkpoint_file, device_map=device_map)
        try:
            with open_any(str(checkpoint_file)) as opened:
                return opened.state_dict()  # set_module_tensor_to_device moves each tensor
        except CheckpointError as e:
            raise CheckpointError(
                e.path, e.tensor, f"{e.reason}. accelerate reads one file at a time; pennyweight.load(folder, model) "
                "reads them together"
            ) from e  # fmt: skip

    return load_state_dict


def _is_ours(path: str) -> bool:
    if not path.endswith(".safetensors"):
        return False
    with safe_open(path, framework="pt") as f:
        return KEY in (f.metadata() or {})

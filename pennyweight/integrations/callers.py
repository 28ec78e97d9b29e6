"""Functions of accelerate and PEFT that need another result from an ordinary tensor function: see core/call_site.py.

Each is registered by pennyweight/startup.py as soon as its module has been imported. This file imports neither library.
"""

from __future__ import annotations

from typing import Any

from ..core import call_site

ACCELERATE = "accelerate.utils.offload"
PEFT = "peft.utils.other"


def register_accelerate() -> None:
    """accelerate's offload to disk writes array files, which can hold only floats."""
    call_site.OFFLOADS[ACCELERATE] = call_site.Offload(8, _refusal)


def register_peft() -> None:
    """PEFT copies a module to train the whole copy (``modules_to_save``), by copy.deepcopy, which passes a parameter
    nothing but the memo."""
    call_site.TRAINING_COPIES[PEFT] = lambda names: hasattr(names.get("self"), "modules_to_save")


def _refusal(w: Any) -> str:
    return (
        f"accelerate's offload to disk stores a quantized weight {tuple(w.shape)} ({w.spec}) as float numbers. "
        "Save the model with pw.save(model, folder) and call accelerate.cpu_offload(model, execution_device, "
        "state_dict=pw.open(folder).packed_for(model)), which maps the files"
    )

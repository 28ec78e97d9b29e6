"""The process that runs stages on the device: ``python -m benchmarks.gpu.worker FOLDER PLAN``; started by run.py."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

from .results import Results
from .stages import Context, run_stage, stages

MODULES = ("tiles", "self_test", "weight_only")


class Missing:
    """In place of a module that cannot be imported: each use raises what the import raised."""

    def __init__(self, name: str, error: Exception) -> None:
        self._why = f"pennyweight.kernels.triton.{name} cannot be imported: {type(error).__name__}: {error}"

    def __getattr__(self, attribute: str) -> object:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise ImportError(self._why)


def context(folder: Path, dry: bool) -> Context:
    results = Results.open(folder)
    if dry:
        from . import dry as stand_in

        return Context(results, "cpu", stand_in.FakeTimer(), stand_in.KERNELS, dry=True, shrink=stand_in.SHRINK)
    import torch

    from pennyweight.kernels.triton.timing import DeviceTimer

    torch.manual_seed(int.from_bytes(results.data["started"].encode(), "little") % 2**31)  # fresh in each run
    found = {}
    for name in MODULES:
        try:
            found[name] = importlib.import_module(f"pennyweight.kernels.triton.{name}")
        except Exception as error:  # cases that need the module record it
            found[name] = Missing(name, error)
    return Context(results, "cuda", DeviceTimer(), SimpleNamespace(**found))


def main(folder: Path, plan: dict) -> None:
    ctx = context(folder, plan["dry"])
    for stage in stages():
        if stage.name in plan["stages"]:
            run_stage(stage, ctx, plan["stages"][stage.name])


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))

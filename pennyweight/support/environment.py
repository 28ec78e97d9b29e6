"""The environment variables of the package, and the cache folder. Nothing else reads one; docs/install.md has them for
users.

Those of an installation (``PENNYWEIGHT_TARGET``, ``PENNYWEIGHT_NATIVE_FLAGS`` ...) are read by setup.py.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Variable:
    """A variable that is read each time it is asked for.

    name      as it is set
    meaning   what its values mean
    default   what an unset variable counts as
    """

    name: str
    meaning: str
    default: str = ""

    def read(self) -> str:
        """The value, without spaces around it."""
        return os.environ.get(self.name, self.default).strip()


NATIVE = Variable(
    "PENNYWEIGHT_NATIVE",
    "0: the native CPU kernels are not loaded, without a warning; 1: on macOS and Windows without their self-test",
)
CPU_ISA = Variable("PENNYWEIGHT_CPU_ISA", "the instruction set of the native CPU kernels; default: the best here")
GPU = Variable("PENNYWEIGHT_GPU", "0: no GPU kernels of our own; 1: without their self-test")
CHECK = Variable("PENNYWEIGHT_CHECK", "1: each fused call also runs unfused, and a difference is an error")
PROGRESS = Variable("PENNYWEIGHT_PROGRESS", "0: no progress bars; 1: also where stderr is no terminal")

VARIABLES = (NATIVE, CPU_ISA, GPU, CHECK, PROGRESS)


def cache_folder() -> Path:
    """The cache folder of this user, which may not exist: results that another process may reuse, and can compute
    again."""
    if sys.platform == "win32":
        root = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches"
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return root / "pennyweight"

"""Fake CUDA tensors (FakeTensorMode) on a build of torch without CUDA.

A few of torch's Python bindings (``contiguous``, indexing, ``to("cuda")``) ask for the current device before a mode
sees the call, which such a build answers with an error. One line of C++ registers a device guard that does nothing. It
stays for the process; torch.cuda.is_available() stays False, and tensors with memory stay impossible.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

SOURCE = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace { C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>) }
"""
_READY: list[bool] = []


@pytest.fixture
def fake_cuda(tmp_path: Path) -> None:
    """Makes ``FakeTensorMode`` take the device "cuda" in every function; skips without a compiler."""
    if torch.backends.cuda.is_built() or _READY:
        return
    compiler, root = shutil.which("g++"), Path(torch.__file__).parent
    if compiler is None:
        pytest.skip("this build of torch has no CUDA, and there is no g++ to register a device guard")
    source, library = tmp_path / "guard.cpp", tmp_path / "guard.so"
    source.write_text(SOURCE, encoding="utf-8")
    options = ["-shared", "-fPIC", "-std=c++20", f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10"]
    command = [compiler, str(source), "-o", str(library), *options]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(f"the device guard was not compiled: {built.stderr[-500:]}")
    ctypes.CDLL(str(library))
    _READY.append(True)

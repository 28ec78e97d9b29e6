"""Loads the native library and selects its instruction set, once.

It is loaded through ctypes after torch, whose OpenMP runtime it shares. ``PENNYWEIGHT_CPU_ISA`` names the instruction
set to use; default: the best of this machine. With ``PENNYWEIGHT_NATIVE=0`` it is not loaded. Where it is missing,
torch's kernels run instead, and its first use warns. On macOS and Windows it is used after it passed its self-test, or
with ``PENNYWEIGHT_NATIVE=1``; see docs/platforms.md.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
import warnings
from functools import lru_cache
from pathlib import Path

import torch  # before the library: it brings the OpenMP runtime

from ...support import environment
from ...support.environment import cache_folder
from . import abi

_LOG = logging.getLogger(__name__)
LIBRARY = Path(__file__).with_name("_native.dll" if sys.platform == "win32" else "_native.so")
COMPILER = {"darwin": "Apple's command line tools (xcode-select --install)", "win32": "ziglang (see docs/platforms.md)"}
REMEDY = (
    f"Install {COMPILER.get(sys.platform, 'g++')} and run `pip install --force-reinstall --no-deps .` in a clone of "
    "the repository, or install a wheel"
)
SELF_TESTED = ("darwin", "win32")  # platforms on which the library was built, but not run, before a release
OFF = LIBRARY.with_suffix(".off")  # written by setup.py if PENNYWEIGHT_NATIVE=0 when the package was installed

KINDS = {
    None: abi.NONE, torch.float32: abi.F32, torch.bfloat16: abi.BF16, torch.float16: abi.F16, torch.int8: abi.I8,
    torch.uint8: abi.U8, torch.float8_e4m3fn: abi.E4M3,
}  # fmt: skip


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL | str:
    """The library with an instruction set selected, or the reason why it is missing."""
    if off := switched_off():
        return off
    if not LIBRARY.exists():
        return "not built: no C++ compiler when the package was installed"
    if sys.platform in SELF_TESTED and environment.NATIVE.read() != "1" and (failed := verdict(LIBRARY)):
        return f"built, but it fails its self-test: {failed}"
    try:
        if sys.platform == "darwin":  # the OpenMP symbols are looked up in libraries that are loaded globally
            ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libomp.dylib"), mode=ctypes.RTLD_GLOBAL)
        lib = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return f"built but cannot be loaded: {error}"
    for name, (result, arguments) in abi.SIGNATURES.items():
        if not hasattr(lib, name):
            return f"built from older sources, without {name}: rebuild it (python setup.py build_ext --inplace)"
        fn = getattr(lib, name)
        fn.restype, fn.argtypes = result, arguments
    if lib.pw_abi() != abi.ABI:
        return "built from other sources: rebuild it (python setup.py build_ext --inplace)"
    wanted = environment.CPU_ISA.read()
    if lib.pw_isa_use(wanted.encode()) < 0:
        names = ", ".join(_isas(lib))
        raise RuntimeError(f"PENNYWEIGHT_CPU_ISA={wanted!r} is not available; this machine has: {names}")
    if not torch.compiler.is_compiling():
        _LOG.info("native CPU kernels: %s, instruction sets %s", LIBRARY, ", ".join(_isas(lib)))
    return lib


def switched_off() -> str | None:
    """Why nobody expects the library here, or None."""
    if environment.NATIVE.read() == "0":
        return "switched off by PENNYWEIGHT_NATIVE=0"
    if OFF.exists():
        return "not built: PENNYWEIGHT_NATIVE=0 when the package was installed"
    return None if sys.platform in ("linux", *SELF_TESTED) else f"not supported on {sys.platform}"


def native() -> ctypes.CDLL:
    """The library. Raises RuntimeError if it is missing."""
    lib = load()
    if isinstance(lib, str):
        raise RuntimeError(f"native CPU kernels: {lib}")
    return lib


def _isas(lib: ctypes.CDLL) -> list[str]:
    return [lib.pw_isa_name(i).decode() for i in range(lib.pw_isa_count()) if lib.pw_isa_here(i)]


def isas() -> list[str]:
    """Instruction sets that were built and that this machine supports, best last; empty without the library."""
    lib = load()
    return [] if isinstance(lib, str) else _isas(lib)


def use_isa(name: str) -> None:
    """Switch to another instruction set ("": the best). Raises ValueError if it is not available."""
    if native().pw_isa_use(name.encode()) < 0:
        raise ValueError(f"instruction set {name!r} is not available; this machine has: {', '.join(isas())}")


def available() -> bool | str:
    """True if the library is available, else the reason why not."""
    lib = load()
    return lib if isinstance(lib, str) else True


def usable() -> bool | str:
    """As :func:`available`, for code that would use the library: warns, once, if it should be there and is not."""
    verdict = available()
    if verdict is not True and not torch.compiler.is_compiling():
        _warn_once(str(verdict))
    return verdict


_warned = False


def _warn_once(reason: str) -> None:
    global _warned  # noqa: PLW0603
    if _warned or switched_off():
        return
    _warned = True  # also if the warning is an error
    warnings.warn(
        f"pennyweight runs without its native CPU kernels ({reason}): torch's kernels run instead, which is slower. "
        f"{REMEDY}. PENNYWEIGHT_NATIVE=0 in the environment silences this.",
        stacklevel=4,
    )


# -- the self-test -----------------------------------------------------------------------------------------------------
# Where its makers could not run a library, `pennyweight doctor` compares every kernel with the reference, once, in a
# process of its own: a library that crashes ends that process only.

TIMEOUT = 300  # seconds; it takes about ten


def verdict(library: Path) -> str | None:
    """None if the library passes the self-test, else why it does not. Kept for this library, torch release and
    machine."""
    digest = hashlib.sha256(library.read_bytes())
    cpu = torch.backends.cpu.get_cpu_capability()
    digest.update(f"{torch.__version__} {sys.version} {sys.platform} {platform.machine()} {cpu}".encode())
    kept = cache_folder() / f"self-test-{digest.hexdigest()[:32]}.json"
    try:
        found = json.loads(kept.read_text("utf-8"))["failed"]
        return found if isinstance(found, str) else None
    except (OSError, ValueError, LookupError):  # none was kept
        pass
    failed = _run()
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({"failed": failed}), "utf-8")
    except OSError:  # nowhere to keep it: the next process tests again
        pass
    return failed


def _run() -> str | None:
    command = [sys.executable, "-m", "pennyweight", "doctor", "--json"]
    env = {**os.environ, environment.NATIVE.name: "1"}  # the library without a self-test
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", check=False, env=env, timeout=TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the self-test did not run: {error}"
    try:
        health = json.loads(done.stdout)
    except ValueError:
        return f"the self-test ended with status {done.returncode}"
    problems = [str(problem) for problem in health["problems"]]
    return "; ".join(problems) or None

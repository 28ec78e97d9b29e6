"""Builds the native CPU kernels, and the project description of PyPI; the other metadata is in pyproject.toml.

The kernels are plain C++ without torch or Python headers, so they work with any torch and any Python, and an isolated
build needs only a compiler. Without a compiler, or with PENNYWEIGHT_NATIVE=0, the package still installs and runs on
torch's kernels; PENNYWEIGHT_NATIVE=1 makes a failed build an error. `pennyweight doctor` shows whether they were built.

PENNYWEIGHT_TARGET (linux-aarch64, darwin-arm64, win32-amd64) builds for another platform, with the compiler in CXX; see
scripts/wheels.
"""

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CompileError, LinkError, PlatformError

SOURCE = Path("pennyweight/kernels/cpu/src")
LIBRARY = "pennyweight.kernels.cpu._native"
OBJECTS = Path("build/native")  # reused by later builds with the same sources, flags and compiler
OFF = ".off"  # suffix of the file that stands in for the library after PENNYWEIGHT_NATIVE=0
PARTS = ("int_linear", "float_linear", "convolution", "conversions")  # files of SOURCE, the slowest to compile first


class Isa(NamedTuple):
    """An instruction set: the parts that gain from it are compiled with its flags, the others are those of its base."""

    base: str
    flags: list[str]
    parts: tuple[str, ...] = PARTS


AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
VNNI512 = [*AVX512, "-mavx512vnni"]
SCALAR = Isa("", ["-O1"])
# The best supported one is selected at load time. Bases are also in dispatch.cpp.
ISAS = {
    "x86_64": {
        "avx512": Isa("scalar", AVX512),
        "avx512_vnni": Isa("avx512", VNNI512, ("int_linear", "convolution")),
        "avx512_bf16": Isa("avx512_vnni", [*VNNI512, "-mavx512vbmi", "-mavx512bf16"], ("float_linear",)),
        "avx2": Isa("scalar", AVX2),
        "avx_vnni": Isa("avx2", [*AVX2, "-mavxvnni"], ("int_linear", "convolution")),
    },
    "aarch64": {
        "neon_dotprod": Isa("scalar", ["-march=armv8.2-a+dotprod+fp16"]),
        "neon_i8mm": Isa("neon_dotprod", ["-march=armv8.2-a+dotprod+fp16+i8mm"], ("int_linear", "convolution")),
    },
}
MACHINES = {"AMD64": "x86_64", "amd64": "x86_64", "arm64": "aarch64", "ARM64": "aarch64"}  # other names of the same
# No FMA contraction, so that every instruction set rounds alike. Only the symbols exported by dispatch.cpp are visible.
COMMON = ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"]
COMMON += ["-fno-trapping-math", "-Wall", "-Wextra"]
FLAGS = [*COMMON, "-fPIC", "-fopenmp"]  # of g++
FLAGS += ["-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-stringop-overflow"]
FLAGS += ["-Wno-array-bounds"]  # these four warnings are false positives of g++ 12


# Apple's and Zig's compilers have the features of the first Apple processor, fp16 and dot products, without a flag.
APPLE = {
    "scalar": ["-O1", "-U__ARM_FEATURE_DOTPROD"],  # simd.h then takes plain C++
    "neon_dotprod": [],
    "neon_i8mm": ["-Xclang", "-target-feature", "-Xclang", "+i8mm"],
}


class System(NamedTuple):
    """How the library is compiled and linked for an operating system, and the platform tag of a cross-built wheel.

    It is linked without an OpenMP library. At load time its symbols resolve to the runtime that torch has loaded, so
    that there is one thread pool. On Linux that is libgomp with g++'s GOMP_*; on macOS libomp.dylib and on Windows
    libiomp5md.dll with clang's __kmpc_*. Windows finds a library that is already loaded by its name.
    """

    suffix: str
    clang: bool
    compile: list[str]
    link: list[str]
    tags: dict[str, str]  # of machines that it can be built for elsewhere


SYSTEMS = {
    "linux": System(".so", False, FLAGS, ["-shared"], {"aarch64": "linux_aarch64"}),
    "darwin": System(
        ".so", True, [*COMMON, "-fPIC", "-mmacosx-version-min=11.0", "-Xclang", "-fopenmp"],
        ["-shared", "-mmacosx-version-min=11.0", "-undefined", "dynamic_lookup", "-Wl,-install_name,@rpath/_native.so"],
        {"aarch64": "macosx_11_0_arm64"},
    ),
    "win32": System(".dll", True, [*COMMON, "-fopenmp"], ["-shared"], {"x86_64": "win_amd64"}),
}  # fmt: skip

# Extra flags of scripts/sanitize, and the instruction sets it builds besides plain C++; default: all.
EXTRA = os.environ.get("PENNYWEIGHT_NATIVE_FLAGS", "").split()
WANTED = os.environ.get("PENNYWEIGHT_NATIVE_ISAS")
TARGET = os.environ.get("PENNYWEIGHT_TARGET", f"{sys.platform}-{platform.machine()}")
SYSTEM = TARGET.partition("-")[0]
MACHINE = MACHINES.get(TARGET.partition("-")[2], TARGET.partition("-")[2])


class Unit(NamedTuple):
    """One run of the compiler."""

    part: str
    isa: str  # "": no instruction set
    flags: list[str]


def units(machine: str, wanted: str | None = None) -> list[Unit]:
    """What is compiled for a machine, the slowest first. wanted: names of instruction sets; default: all."""
    isas = {**ISAS.get(machine, {}), "scalar": SCALAR}
    names = {*isas} if wanted is None else {"scalar", *wanted.split()} & {*isas}
    for _ in isas:  # and their bases
        names |= {isas[name].base for name in names} - {""}
    found = [
        Unit(part, name, [f"-DPW_ISA={name}", *isa.flags] if SYSTEM != "darwin" else [f"-DPW_ISA={name}", *APPLE[name]])
        for part in PARTS
        for name, isa in isas.items()
        if name in names and part in isa.parts
    ]
    return [*found, Unit("dispatch", "", [])]


def compiler() -> list[str]:
    """The command of the C++ compiler. Raises PlatformError if there is none that builds a library for the target."""
    system = SYSTEMS.get(SYSTEM)
    if system is None or (SYSTEM != "linux" and MACHINE not in system.tags):
        raise PlatformError(f"not supported on {TARGET}")
    names = ("clang++", "c++") if system.clang else ("g++", "c++")
    command = shlex.split(os.environ.get("CXX", "")) or [name for name in names if shutil.which(name)][:1]
    if not command:
        raise PlatformError("no C++ compiler was found" + (": see docs/platforms.md" if SYSTEM == "win32" else ""))
    if not shutil.which(command[0]):
        raise PlatformError(f"CXX={shlex.join(command)}: {command[0]} was not found")
    macros = subprocess.run(
        [*command, "-dM", "-E", "-x", "c++", "-"], input="", capture_output=True, text=True, check=False
    )
    if macros.returncode:
        raise PlatformError(f"{shlex.join(command)} does not work: {macros.stderr.strip()}")
    if ("__clang__" in macros.stdout) != system.clang:
        need = "clang" if system.clang else "g++"  # the runtime that torch loads has the OpenMP calls of this one
        raise PlatformError(f"{shlex.join(command)} cannot be used on {SYSTEM}: it must be {need}")
    return command


class BuildNative(build_ext):
    """Compiles the units and links them."""

    def get_ext_filename(self, fullname):
        """Without the tag of a Python version: the library is loaded by ctypes."""
        return f"{fullname.replace('.', os.sep)}{SYSTEMS[SYSTEM].suffix if SYSTEM in SYSTEMS else '.so'}"

    def build_extension(self, ext):
        wanted = os.environ.get("PENNYWEIGHT_NATIVE", "auto")
        library = Path(self.get_ext_fullpath(ext.name))
        off = library.with_suffix(OFF)
        for former in (library, off):  # of another build in the same folder
            former.unlink(missing_ok=True)
        if wanted == "0":
            off.parent.mkdir(parents=True, exist_ok=True)
            off.touch()
            return
        try:
            self._build(ext)
        except (BaseError, OSError) as error:  # no compiler, a failed build, an unsupported platform
            if wanted == "1":
                raise
            print(f"pennyweight: native kernels not built, using torch's kernels ({error})", file=sys.stderr)

    def copy_extensions_to_source(self):
        """For an installation in place: also the mark that the kernels were not wanted."""
        for ext in self.extensions:
            here = Path(*ext.name.split(".")).with_suffix(OFF)
            here.unlink(missing_ok=True)
            if Path(self.get_ext_fullpath(ext.name)).with_suffix(OFF).exists():
                here.touch()
        super().copy_extensions_to_source()

    def get_outputs(self):
        marks = (Path(self.get_ext_fullpath(ext.name)).with_suffix(OFF) for ext in self.extensions)
        return [*super().get_outputs(), *(str(mark) for mark in marks if mark.exists())]

    def _build(self, ext):
        OBJECTS.mkdir(parents=True, exist_ok=True)
        with alone(OBJECTS / "lock"):
            self._build_alone(ext)

    def _build_alone(self, ext):
        command, system = compiler(), SYSTEMS[SYSTEM]
        todo, began, done = units(MACHINE, WANTED), time.perf_counter(), []
        version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
        Path(self.build_temp).mkdir(parents=True, exist_ok=True)

        def compiled(unit):
            built, kept = self._try(unit, [*command, *system.compile], version)
            done.append(unit)
            took = time.perf_counter() - began
            name, what = f"{unit.part} {unit.isa}".rstrip(), "cannot compile" if built is None else "compiled"
            what = "found" if kept else what
            print(f"pennyweight: {what} {len(done)}/{len(todo)}: {name} ({took:.0f} s)", flush=True)
            return built

        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with ThreadPoolExecutor(processors) as pool:
            objects = list(zip(todo, pool.map(compiled, todo), strict=True))
        skipped = {unit.isa for unit, built in objects if built is None}
        while more := {name for name, isa in ISAS.get(MACHINE, {}).items() if isa.base in skipped} - skipped:
            skipped |= more
        if skipped:
            names = ", ".join(sorted(skipped))
            print(f"pennyweight: skipped {names}, which the compiler cannot build", file=sys.stderr)
        path = Path(self.get_ext_fullpath(ext.name))
        path.parent.mkdir(parents=True, exist_ok=True)
        parts = [built for unit, built in objects if unit.isa not in skipped]
        strip = [] if EXTRA or SYSTEM == "darwin" else ["-s"]  # sanitizers print the names of functions
        flags = [*system.link, *strip, *shlex.split(os.environ.get("LDFLAGS", ""))]
        if SYSTEM == "win32":
            parts.append(self._imports(command))
        _run([*command, *flags, *parts, "-o", str(path)], LinkError)

    def _try(self, unit, command, version):
        """The object of a unit, and whether it was there already; (None, False) if the compiler does not support its
        instruction set. Plain C++ must build."""
        out = OBJECTS / f"{unit.part}-{unit.isa or 'dispatch'}.o"
        key, headers = out.with_suffix(".key"), out.with_suffix(".d")
        more = [*shlex.split(os.environ.get("CXXFLAGS", "")), *EXTRA, *unit.flags]
        full = [*command, *more, "-MMD", "-c", str(SOURCE / f"{unit.part}.cpp"), "-o", str(out)]
        if out.exists() and key.exists() and key.read_text() == _key(full, version, headers):
            return str(out), True
        key.unlink(missing_ok=True)
        began = time.time()
        try:
            _run(full, CompileError)
        except CompileError:
            if unit.isa in ("", "scalar"):
                raise
            return None, False
        made_of = _key(full, version, headers, before=began)
        if made_of is not None:
            key.write_text(made_of)
        return str(out), False

    def _imports(self, command):
        """The import library of libiomp5md.dll on Windows, made by the compiler's dlltool."""
        if "c++" not in command:
            raise PlatformError('for Windows CXX must be "python -m ziglang c++", from PyPI\'s ziglang')
        zig = command[: command.index("c++")]
        out = str(Path(self.build_temp) / "libiomp5md.lib")
        _run([*zig, "dlltool", "-m", "i386:x86-64", "-d", str(SOURCE / "libiomp5md.def"), "-l", out], LinkError)
        return out


@contextmanager
def alone(path):
    """Waits for another build of this folder. Not on Windows, where nothing starts two."""
    with open(path, "w") as file:
        if os.name == "posix":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _key(command, version, headers, before=None):
    """A hash of the command, the compiler's version and the files that it read. None if the list of these files or one
    of them is missing, or if one has changed after the time ``before``.

    headers     the compiler's list of the files, without those of the system
    """
    if not headers.exists():
        return None
    found = hashlib.sha256("\0".join([*command, version]).encode())
    for name in sorted(headers.read_text().replace("\\\n", " ").split(": ", 1)[1].split()):
        path = Path(name)
        if not path.exists() or (before is not None and path.stat().st_mtime >= before):
            return None
        found.update(path.read_bytes())
    return found.hexdigest()


def _run(command, error):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.stderr:
        print(done.stderr, file=sys.stderr, flush=True)
    if done.returncode:
        raise error(f"{shlex.join(command[:2])} ... failed with status {done.returncode}")


class Wheel(bdist_wheel):
    """A wheel for every Python 3: nothing is linked with CPython."""

    def get_tag(self):
        tag = super().get_tag()[2]
        if "PENNYWEIGHT_TARGET" in os.environ:
            tag = SYSTEMS[SYSTEM].tags[MACHINE]
        return "py3", "none", tag


def description(readme: str, repository: str, ref: str) -> str:
    """The README for PyPI, which shows it without the repository: relative links become absolute, at a tag."""

    def absolute(at):
        target = at["target"]
        if target is None or re.match(r"[a-z][a-z0-9+.-]*:|//", target):  # code, or absolute
            return at[0]
        kind = "raw" if target.endswith((".png", ".svg", ".jpg", ".gif", ".webp")) else "blob"
        target = f"README.md{target}" if target.startswith("#") else target.removeprefix("./")
        return f"{at['before']}{repository}/{kind}/{ref}/{target}"

    code, link = r"^```.*?^```|`[^`\n]+`", r"(?P<before>\]\(|(?:src|srcset|href)=\")(?P<target>[^)\s\"]+)"
    return re.sub(f"{code}|{link}", absolute, readme, flags=re.MULTILINE | re.DOTALL)


def metadata() -> dict:
    """The arguments of setup for PyPI's page."""
    source = Path("pennyweight/support/version.py").read_text("utf-8")
    version = re.search(r'^__version__ = "(.+)"', source, re.MULTILINE)[1]
    repository = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"]
    text = description(Path("README.md").read_text("utf-8"), repository, f"v{version}")
    return {"long_description": text, "long_description_content_type": "text/markdown"}


if __name__ == "__main__":  # tests import the flags and the functions
    native = Extension(
        LIBRARY,
        sources=[str(SOURCE / f"{part}.cpp") for part in ("dispatch", *PARTS)],
        depends=[str(p) for p in sorted(SOURCE.glob("*"))],
        optional=os.environ.get("PENNYWEIGHT_NATIVE") != "1",
    )
    wanted = os.environ.get("PENNYWEIGHT_NATIVE") != "0"  # without it the wheel is one for any platform
    commands = {"build_ext": BuildNative, "bdist_wheel": Wheel}
    setup(ext_modules=[native] if wanted else [], cmdclass=commands, **metadata())

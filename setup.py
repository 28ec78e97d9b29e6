"""Builds the native CPU kernels; the other package metadata is in pyproject.toml.

The kernels are plain C++ without torch or Python headers, so they work with any torch and any Python, and an isolated
build needs only a compiler. Without a compiler, or with PENNYWEIGHT_NATIVE=0, the package still installs and runs on
torch's kernels; PENNYWEIGHT_NATIVE=1 makes a failed build an error. `pennyweight doctor` shows whether they were built.
"""

import os
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, CompileError, PlatformError

SOURCE = Path("pennyweight/kernels/cpu/src")
LIBRARY = "pennyweight.kernels.cpu._native"
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
# No FMA contraction, so that every instruction set rounds alike. Only the symbols exported by dispatch.cpp are visible.
FLAGS = ["-std=c++17", "-O3", "-g0", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"]
FLAGS += ["-fno-trapping-math", "-Wall", "-Wextra"]
FLAGS += ["-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-stringop-overflow"]
FLAGS += ["-Wno-array-bounds"]  # these four warnings are false positives of g++ 12

# Extra flags of scripts/sanitize, and the instruction sets it builds besides plain C++; default: all.
EXTRA = os.environ.get("PENNYWEIGHT_NATIVE_FLAGS", "").split()
WANTED = os.environ.get("PENNYWEIGHT_NATIVE_ISAS")


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
        Unit(part, name, [f"-DPW_ISA={name}", *isa.flags])
        for part in PARTS
        for name, isa in isas.items()
        if name in names and part in isa.parts
    ]
    return [*found, Unit("dispatch", "", [])]


class BuildNative(build_ext):
    """Compiles the units and links them without an OpenMP library: at load time the symbols resolve to torch's copy, so
    that there is one thread pool."""

    def get_ext_filename(self, fullname):
        """Without the tag of a Python version: the library is loaded by ctypes."""
        return f"{fullname.replace('.', os.sep)}.so"

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
        except (CCompilerError, BaseError) as error:  # no compiler, a failed build, an unsupported platform
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
        if sys.platform != "linux":
            raise PlatformError(f"not supported on {sys.platform} yet")
        todo, began, done = units(platform.machine(), WANTED), time.perf_counter(), []

        def compiled(unit):
            objects = self._try(unit)
            done.append(unit)
            took = time.perf_counter() - began
            name, what = f"{unit.part} {unit.isa}".rstrip(), "cannot compile" if objects is None else "compiled"
            print(f"pennyweight: {what} {len(done)}/{len(todo)}: {name} ({took:.0f} s)", flush=True)
            return objects

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(zip(todo, pool.map(compiled, todo), strict=True))
        skipped = {unit.isa for unit, built in objects if built is None}
        while more := {name for name, isa in ISAS.get(platform.machine(), {}).items() if isa.base in skipped} - skipped:
            skipped |= more
        if skipped:
            names = ", ".join(sorted(skipped))
            print(f"pennyweight: skipped {names}, which the compiler cannot build", file=sys.stderr)
        path = Path(self.get_ext_fullpath(ext.name))
        path.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            [path for unit, built in objects if unit.isa not in skipped for path in built],
            str(path),
            target_lang="c++",
            extra_postargs=[] if EXTRA else ["-s"],  # sanitizers print the names of functions
        )

    def _try(self, unit):
        """The object of a unit; None if the compiler does not support its instruction set. Plain C++ must build."""
        try:
            return self.compiler.compile(
                [str(SOURCE / f"{unit.part}.cpp")],
                output_dir=str(Path(self.build_temp) / (unit.isa or "dispatch")),
                extra_postargs=[*FLAGS, *EXTRA, *unit.flags],
            )
        except CompileError:
            if unit.isa in ("", "scalar"):
                raise
            return None


class Wheel(bdist_wheel):
    """A wheel for every Python 3: nothing is linked with CPython."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":  # tests/kernels/cpu/native imports the flags
    native = Extension(
        LIBRARY,
        sources=[str(SOURCE / f"{part}.cpp") for part in ("dispatch", *PARTS)],
        depends=[str(p) for p in sorted(SOURCE.glob("*"))],
        optional=os.environ.get("PENNYWEIGHT_NATIVE") != "1",
    )
    setup(ext_modules=[native], cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel})

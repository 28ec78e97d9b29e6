"""Builds the native CPU kernels; the other package metadata is in pyproject.toml.

The kernels are plain C++ without torch headers, so they work with any torch and an isolated build needs only a
compiler. Without a compiler, or with PENNYWEIGHT_NATIVE=0, the package still installs and runs on torch's kernels;
PENNYWEIGHT_NATIVE=1 makes a failed build an error. `pennyweight doctor` shows whether they were built.
"""

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, CompileError, PlatformError

SOURCE = Path("pennyweight/kernels/cpu/src")
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
# isa.cpp is compiled once per instruction set with these flags. The best supported one is selected at load time.
ISAS = {
    "x86_64": {
        "avx2": AVX2,
        "avx_vnni": [*AVX2, "-mavxvnni"],
        "avx512": AVX512,
        "avx512_vnni": [*AVX512, "-mavx512vnni"],
        "avx512_bf16": [*AVX512, "-mavx512vnni", "-mavx512vbmi", "-mavx512bf16"],
    },
    "aarch64": {
        "neon_dotprod": ["-march=armv8.2-a+dotprod+fp16"],
        "neon_i8mm": ["-march=armv8.2-a+dotprod+fp16+i8mm"],
    },
}
# No FMA contraction, so that every instruction set rounds alike. Only the symbols exported by dispatch.cpp are visible.
FLAGS = ["-std=c++17", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"]
FLAGS += ["-fno-trapping-math", "-Wall", "-Wextra"]
FLAGS += ["-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-stringop-overflow"]
FLAGS += ["-Wno-array-bounds"]  # these four warnings are false positives of g++ 12

# Extra flags of scripts/sanitize, and the instruction sets it builds besides plain C++; default: all.
FLAGS += os.environ.get("PENNYWEIGHT_NATIVE_FLAGS", "").split()
WANTED = os.environ.get("PENNYWEIGHT_NATIVE_ISAS")


class BuildNative(build_ext):
    """Compiles one object per instruction set and links them without an OpenMP library: at load time the symbols
    resolve to torch's copy, so that there is one thread pool."""

    def build_extension(self, ext):
        wanted = os.environ.get("PENNYWEIGHT_NATIVE", "auto")
        if wanted == "0":
            return
        try:
            self._build(ext)
        except (CCompilerError, BaseError) as error:  # no compiler, a failed build, an unsupported platform
            if wanted == "1":
                raise
            print(f"pennyweight: native kernels not built, using torch's kernels ({error})", file=sys.stderr)

    def _build(self, ext):
        if sys.platform != "linux":
            raise PlatformError(f"not supported on {sys.platform} yet")
        objects = self._compile("dispatch.cpp", "dispatch", [])
        isas = {"scalar": ["-O1"], **ISAS.get(platform.machine(), {})}
        if WANTED is not None:
            isas = {name: flags for name, flags in isas.items() if name in ("scalar", *WANTED.split())}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for built in pool.map(lambda item: self._try(*item), isas.items()):
                objects += built
        path = Path(self.get_ext_fullpath(ext.name))
        path.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, str(path), target_lang="c++")

    def _try(self, isa, flags):
        """Objects of one instruction set; empty if the compiler does not support it. Plain C++ must build."""
        try:
            return self._compile("isa.cpp", isa, ["-fopenmp", f"-DPW_ISA={isa}", *flags])
        except CompileError:
            if isa == "scalar":
                raise
            print(f"pennyweight: skipped {isa}, which the compiler cannot build", file=sys.stderr)
            return []

    def _compile(self, name, folder, flags):
        out = str(Path(self.build_temp) / folder)
        return self.compiler.compile([str(SOURCE / name)], output_dir=out, extra_postargs=[*FLAGS, *flags])


if __name__ == "__main__":  # tests/kernels/cpu/native imports the flags
    native = Extension(
        "pennyweight.kernels.cpu._native",
        sources=[str(SOURCE / "dispatch.cpp"), str(SOURCE / "isa.cpp")],
        depends=[str(p) for p in sorted(SOURCE.glob("*"))],
        optional=os.environ.get("PENNYWEIGHT_NATIVE") != "1",
    )
    setup(ext_modules=[native], cmdclass={"build_ext": BuildNative})

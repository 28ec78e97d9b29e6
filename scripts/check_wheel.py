"""Checks a wheel: its tag, that the library in it exports the kernels' functions, and what it needs when it is loaded.

    python scripts/check_wheel.py WHEEL..

Needs lief (PyPI). Reads the expected functions from pennyweight/kernels/cpu/src/dispatch.cpp.
"""

import re
import sys
import zipfile
from pathlib import Path

import lief

DISPATCH = Path(__file__).resolve().parents[1] / "pennyweight/kernels/cpu/src/dispatch.cpp"
SYSTEM = {  # what may be needed besides the OpenMP runtime of torch
    "manylinux": re.compile(r"lib(c|m|stdc\+\+|gcc_s|pthread)\.so\.\d+|ld-linux-(x86-64|aarch64)\.so\.\d"),
    "macosx": re.compile(r"/usr/lib/lib(System\.B|c\+\+\.1)\.dylib"),
    "win": re.compile(r"(KERNEL32|libiomp5md)\.dll|api-ms-win-crt-[a-z]+-l1-1-0\.dll", re.IGNORECASE),
}
OPENMP = {"manylinux": ("GOMP_", "omp_"), "macosx": ("___kmpc_", "_omp_"), "win": ("__kmpc_", "omp_")}


def functions() -> set[str]:
    """Names of the functions that the library exports."""
    return set(re.findall(r"^PW_EXPORT .*?(pw_\w+)\(", DISPATCH.read_text("utf-8"), re.MULTILINE))


def check(wheel: Path) -> str:
    """A line about the wheel. Raises SystemExit if something is wrong with it."""
    tag = re.fullmatch(r"pennyweight-[^-]+-py3-none-(manylinux|macosx|win)[\w.]+\.whl", wheel.name)
    if not tag:
        raise SystemExit(f"{wheel.name}: expected a wheel py3-none for manylinux, macosx or win")
    system = tag[1]
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith((".so", ".dll", ".dylib"))]
        if len(names) != 1:
            raise SystemExit(f"{wheel.name}: expected one library, found {names}")
        library = lief.parse(archive.read(names[0]))
    exported = {f.name.removeprefix("_") if system == "macosx" else f.name for f in library.exported_functions}
    if missing := functions() - exported:
        raise SystemExit(f"{wheel.name}: {names[0]} does not export {', '.join(sorted(missing))}")
    own = lief.MachO.LoadCommand.TYPE.ID_DYLIB  # on macOS the name of the library itself is among those that it needs
    needed = [str(getattr(entry, "name", entry)) for entry in library.libraries if getattr(entry, "command", 0) != own]
    if other := [name for name in needed if not SYSTEM[system].fullmatch(name)]:
        raise SystemExit(f"{wheel.name}: {names[0]} needs {', '.join(other)}")
    if system == "manylinux":  # g++ gives them no type, so lief does not count them as functions
        imported = [symbol for symbol in library.dynamic_symbols if int(symbol.shndx) == 0]
    else:
        imported = library.imported_functions if system == "win" else library.imported_symbols
    openmp = sorted({str(f.name) for f in imported if str(f.name).startswith(OPENMP[system])})
    if not openmp:
        raise SystemExit(f"{wheel.name}: {names[0]} uses no OpenMP runtime")
    return f"{wheel.name}: {len(functions())} functions, needs {', '.join(needed)}; OpenMP: {', '.join(openmp)}"


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(check(Path(path)))

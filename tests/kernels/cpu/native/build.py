"""Builds every_isa: the native library, linked with the program that tests it.

    python tests/kernels/cpu/native/build.py OUT [--machine aarch64] [--compiler g++] [--flags="-fsanitize=address"]

Instruction sets and flags are those of setup.py. Every instruction set must compile.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
sys.path.insert(0, str(ROOT))

from setup import FLAGS, ISAS, SOURCE, units  # noqa: E402


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=Path)
    p.add_argument("--machine", default=platform.machine(), choices=ISAS)
    p.add_argument("--compiler", default="g++")
    p.add_argument("--flags", default="", help="after those of setup.py")
    o = p.parse_args()
    flags = [*FLAGS, *o.flags.split()]

    with tempfile.TemporaryDirectory() as folder:

        def compiled(name: str, source: Path, more: list[str]) -> str:
            path = f"{folder}/{name}.o"
            subprocess.run(
                [o.compiler, *flags[: len(FLAGS)], *more, *flags[len(FLAGS) :], "-c", source, "-o", path], check=True
            )
            return path

        src = ROOT / SOURCE
        jobs = [("every_isa", HERE / "every_isa.cpp", [])]
        jobs += [(f"{u.part}_{u.isa}", src / f"{u.part}.cpp", u.flags) for u in units(o.machine)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda job: compiled(*job), jobs))
        subprocess.run([o.compiler, *o.flags.split(), "-fopenmp", *objects, "-o", o.out], check=True)


if __name__ == "__main__":
    main()

"""What ``import pennyweight`` adds to ``import torch``, in CPU seconds and as a share of it; and how long the command
takes to start.

    python -m benchmarks.import_time [--rounds 15]

Each round is a new process. Bytecode lies in a folder of this run, written by a first process that does not count:
where it is not kept (PYTHONDONTWRITEBYTECODE), Python compiles the sources again at every start, which takes longer
than the import. The least of all rounds counts, for what other processes cost only adds. Targets: 0.1 s for the import;
0.3 s for each of the command's answers that need no torch, Python's own start included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile

TARGET = 0.1  # seconds
START_TARGET = 0.3
COMPLETION = {"_PENNYWEIGHT_COMPLETE": "complete_bash", "COMP_WORDS": "pennyweight quantize --conf", "COMP_CWORD": "2"}
STARTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "--version": (["--version"], {}),
    "--help": (["--help"], {}),
    "quantize --help": (["quantize", "--help"], {}),
    "completion": ([], COMPLETION),
}
PROBE = """
import json, time
start = time.process_time()
import torch
middle = time.process_time()
import pennyweight
print(json.dumps([middle - start, time.process_time() - middle]))
"""


def seconds(rounds: int) -> tuple[float, float]:
    """CPU seconds of ``import torch``, and of ``import pennyweight`` after it."""
    with tempfile.TemporaryDirectory() as folder:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPYCACHEPREFIX": folder}
        probe = [sys.executable, "-c", PROBE]
        runs = [
            json.loads(subprocess.run(probe, env=env, capture_output=True, text=True, check=True).stdout)
            for _ in range(rounds + 1)
        ]
    torch, own = zip(*runs[1:], strict=True)
    return min(torch), min(own)


def start_seconds(rounds: int) -> dict[str, float]:
    """CPU seconds of the whole process for each of STARTS. It has one thread: as long as on an idle machine."""
    least = dict.fromkeys(STARTS, float("inf"))
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds + 1):
            for name, (arguments, more) in STARTS.items():
                env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
                env |= {"PYTHONPYCACHEPREFIX": folder, **more}
                command = [sys.executable, "-m", "pennyweight", *arguments]
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                subprocess.run(command, env=env, capture_output=True, check=True)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                taken = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                least[name] = min(least[name], taken)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch, own = seconds(rounds)
    print(f"import torch {torch:.3f} s, import pennyweight {own:.3f} s more ({own / torch:.1%}); target {TARGET} s")
    starts = start_seconds(rounds)
    print(", ".join(f"{name} {taken:.3f} s" for name, taken in starts.items()) + f"; target {START_TARGET} s")
    sys.exit(own > TARGET or max(starts.values()) > START_TARGET)


if __name__ == "__main__":
    main()

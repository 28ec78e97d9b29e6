"""What ``import pennyweight`` adds to ``import torch``, in CPU seconds and as a share of it.

    python -m benchmarks.import_time [--rounds 15]

Each round is a new process. Bytecode lies in a folder of this run, written by a first process that does not count:
where it is not kept (PYTHONDONTWRITEBYTECODE), Python compiles the sources again at every start, which takes longer
than the import. The least of all rounds counts, for what other processes cost only adds. Target: 0.1 s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

TARGET = 0.1  # seconds
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    torch, own = seconds(parser.parse_args().rounds)
    print(f"import torch {torch:.3f} s, import pennyweight {own:.3f} s more ({own / torch:.1%}); target {TARGET} s")
    sys.exit(own > TARGET)


if __name__ == "__main__":
    main()

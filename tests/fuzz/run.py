"""Coverage-guided fuzzing of one reader of files, by atheris, for a while.

    python -m tests.fuzz.run gguf --seconds 600

Prints executions, new inputs and crashes; a crash is kept in --keep and makes the exit status 1. Needs
``pip install atheris``. It is no test: pytest does not collect it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

INSTRUMENTED = ["pennyweight.io", "pennyweight.core"]
MAX_BYTES = 8192  # of an input; seeds are smaller


def main() -> int:
    from tests.fuzz.readers import READERS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reader", choices=sorted(READERS))
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-crashes"), help="where inputs that crash go")
    args = parser.parse_args()
    args.keep.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as corpus:
        for i, seed in enumerate(READERS[args.reader].seeds()):
            (Path(corpus) / f"seed{i}").write_bytes(seed)
        # libFuzzer ends its own process, so it gets one
        command = [
            sys.executable, "-m", "tests.fuzz.run", "--child", args.reader, corpus,
            f"-max_total_time={args.seconds}", f"-artifact_prefix={args.keep}/", f"-max_len={MAX_BYTES}",
            "-rss_limit_mb=4096", "-timeout=5", "-print_final_stats=1",
        ]  # fmt: skip
        done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
        found = len(list(Path(corpus).iterdir()))
    crashes = sorted(p.name for p in args.keep.iterdir())
    stats = dict(
        line.removeprefix("stat::").split(":") for line in done.stderr.splitlines() if line.startswith("stat::")
    )
    print(f"{args.reader}: {stats.get('number_of_executed_units', '?').strip()} executions, {found} inputs kept")
    print(f"crashes: {', '.join(crashes) or 'none'}")
    if done.returncode:
        print(done.stderr[-4000:])
    return 1 if crashes or done.returncode else 0


def child(name: str, arguments: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED, enable_loader_override=False):
        from tests.fuzz.readers import READERS

    import torch

    torch.set_num_threads(1)
    reader = READERS[name]
    path = os.path.join(tempfile.mkdtemp(), f"input{reader.suffix}")

    def one(data: bytes) -> None:
        with open(path, "wb") as f:
            f.write(data)
        reader.run(path)

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main())

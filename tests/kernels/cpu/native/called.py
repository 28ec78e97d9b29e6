"""Which exported functions were called, by the counts of a library that asserts (see src/arguments.h).

    python tests/kernels/cpu/native/called.py COUNTS [--every ISA ..]

Prints a table: a row for each exported function, a column for each instruction set. --every: ends with 1 where a
function was not called under one of these.
"""

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[4] / "pennyweight/kernels/cpu/src"
# Those that choose the instruction set, so that it does not matter which was in use.
CHOOSING = ("pw_isa_name", "pw_isa_here", "pw_isa_use")


def exported() -> dict[str, str]:
    """The body of each exported function of dispatch.cpp."""
    text = (SOURCE / "dispatch.cpp").read_text()
    found = re.split(r"^PW_EXPORT ", text, flags=re.MULTILINE)[1:]
    return {re.match(r"[\w ]+?[ *]+(pw_\w+)\(", part).group(1): part for part in found}  # type: ignore[union-attr]


def counted() -> list[str]:
    """The exported functions that have arguments, which are those that are counted."""
    return [name for name, body in exported().items() if not re.search(rf"{name}\(\)", body)]


def read(path: Path) -> Counter[tuple[str, str]]:
    """(function, instruction set) -> calls. Each process that ended added its lines."""
    calls: Counter[tuple[str, str]] = Counter()
    for line in path.read_text().splitlines() if path.exists() else ():
        isa, function, count = line.split()
        calls[function, isa] += int(count)
    return calls


def missing(calls: Counter[tuple[str, str]], isas: list[str]) -> list[str]:
    """One sentence for each function that was not called under one of the instruction sets."""
    gaps = []
    for name in counted():
        if name in CHOOSING:
            gaps += [] if any(function == name for function, _ in calls) else [f"{name} was not called"]
        else:
            gaps += [f"{name} was not called under {isa}" for isa in isas if not calls[name, isa]]
    return gaps


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("counts", type=Path)
    p.add_argument("--every", nargs="*", default=[], metavar="ISA")
    o = p.parse_args()
    calls = read(o.counts)
    isas = sorted({isa for _, isa in calls})
    print(f"{'':18}" + "".join(f"{isa:>14}" for isa in isas))
    for name in counted():
        print(f"{name:18}" + "".join(f"{calls[name, isa]:14,}" for isa in isas))
    gaps = missing(calls, o.every)
    print("\n".join(gaps), end="\n" if gaps else "")
    return bool(gaps)


if __name__ == "__main__":
    sys.exit(main())

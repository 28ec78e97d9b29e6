"""Every config × product, lookup and convolution × arguments that fit and that do not: as float, or the same error.

Each config runs in a process of its own, which may die: see same_as_float.py.
"""

import multiprocessing as mp
import sys
import traceback
from typing import Any

import pytest
import torch

from pennyweight.kernels import table
from pennyweight.kernels.cpu import library
from tests.every.same_as_float import NAMES, sweep


def _child(name: str, native: bool, pipe: Any, log: str) -> None:
    torch.set_num_threads(1)  # a forked process has no OpenMP threads
    if not native:
        library.load.cache_clear()
        library.load = lambda: "switched off by the test"  # type: ignore[assignment]
        table._select.cache_clear()  # earlier tests of this process selected native kernels
    with open(log, "w", encoding="utf-8") as sys.stderr:
        try:
            pipe.send(sweep(name))
        except Exception:
            pipe.send(traceback.format_exc())


CASES = [(name, True) for name in NAMES] + [(name, False) for name in ("int8", "int8-dynamic", "int4")]
# Other widths of these formats, and other names of their configs, are left to the weekly run
QUICK = (
    "int8", "int8-dynamic", "int8-dynamic-grouped", "int8-static", "int4", "8da4w", "uint3", "float8-dynamic",
    "float8-int4", "float8-blocks", "nf4", "mxfp6", "mxfp4-dynamic", "nvfp4", "codebook", "q4_k",
)  # fmt: skip
PARAMS = [
    pytest.param(
        name, native, id=f"{name}{'' if native else '-torch'}",
        marks=() if name in (QUICK if native else ("int8-dynamic",)) else pytest.mark.exhaustive,
    )
    for name, native in CASES
]  # fmt: skip


@pytest.mark.parametrize(("name", "native"), PARAMS)
def test_results_and_errors_are_those_of_float(name: str, native: bool, tmp_path: Any) -> None:
    ours, theirs = mp.Pipe()
    log = tmp_path / "last"
    process = mp.get_context("fork").Process(target=_child, args=(name, native, theirs, str(log)))
    process.start()
    theirs.close()
    try:
        found = ours.recv()
    except EOFError:
        process.join()
        last = log.read_text(encoding="utf-8").splitlines()[-1:]
        pytest.fail(f"the process ended with {process.exitcode} in {last}")
    process.join()
    assert not isinstance(found, str), found
    count, refused, deviations = found
    assert deviations == []
    assert count > 1000
    assert refused > 200

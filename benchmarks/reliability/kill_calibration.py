"""Calibrations in files killed by SIGKILL at random moments on a real disk: whether each goes on to the same bytes, and
how much work is done twice.

    python -m benchmarks.reliability.kill_calibration [--kills N] [--folder DIR] [--blocks B] [--seed S] [OPERATION ...]

--kills     of each operation, 50
--folder    on the disk to be tried; default: a temporary folder
--blocks    of the Llama that is quantized, 4, with hidden size 64
--seed      of the moments, 0
OPERATION   gptq: quantize_checkpoint(calibration=, algorithm="gptq", max_memory=)
            search: search(max_memory=, resume=), then quantize_checkpoint with the mixture that it found
            Default: both

Each child process is forked from this one, which has the imports and has run no model. It is killed after a random part
of the time that a whole run took, and then another one runs in the same folder, until one ends before its time has
come, or three were killed and the next one is left alone. After each kill the folder of the result must hold nothing
that a reader accepts, or the complete result. At the end its files must have the bytes of a run that was not killed; of
a search also its losses and its mixture. Work is counted when it begins: a weight solved (under all candidates in a
search), or the trials of a weight. What a killed process had begun and a later one begins again must be of one block.
Prints a line for each operation; it stops with an error at the first run for which one of this does not hold.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils.logging import disable_progress_bar

import pennyweight as pw
import pennyweight.inference
import pennyweight.report
import pennyweight.training  # with the two above what a run imports, so that kills do not come before its work
from benchmarks.reliability.kill_writers import in_child
from pennyweight.algorithms.mixed_precision.sensitivity import Chain
from pennyweight.core.spec import QuantSpec
from pennyweight.io import load
from pennyweight.io.calibrated_streaming import STATE
from pennyweight.io.meta_model import fresh_model

CONFIG = pw.Int4WeightOnlyConfig(group_size=32)
CANDIDATES = [pw.SpecConfig(QuantSpec(pw.get_format(f"int{bits}"), (32,), torch.float16)) for bits in (2, 3, 4)]
SKIP, MEMORY = ["lm_head"], "1 GB"
IN_TURN = 3  # kills of one run


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(128, (2, 32), generator=generator)} for _ in range(4)]


def write_model(folder: Path, blocks: int) -> None:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=blocks, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def gptq(src: Path, folder: Path, config: Any = CONFIG) -> None:
    pw.quantize_checkpoint(
        src, folder / "out", config, calibration=batches(), algorithm="gptq", max_memory=MEMORY, skip=SKIP,
        progress=False,
    )  # fmt: skip


def search(src: Path, folder: Path) -> None:
    model = fresh_model(str(src))
    load(str(src), model)
    found = pw.search(
        model.eval(), batches(), "3.4 bpw", candidates=CANDIDATES, skip=SKIP, max_memory=MEMORY,
        resume=folder / "searched", progress=False,
    )  # fmt: skip
    (folder / "mixture.json").write_text(found.to_json())
    gptq(src, folder, found.config)


OPERATIONS: dict[str, Callable[[Path, Path], None]] = {"gptq": gptq, "search": search}


def noting(work: Callable[[], object], log: Path) -> None:
    """Do it, with a line in the file for each weight whose solution or trials begin."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(module: Any, attribute: str, lines: Callable[..., list[str]]) -> None:
        whole = getattr(module, attribute)

        def noted(*of: Any) -> Any:
            os.write(handle, "".join(f"{line}\n" for line in lines(*of)).encode())
            return whole(*of)

        setattr(module, attribute, noted)

    for where in ("quantize.pipeline", "algorithms.mixed_precision.search"):
        module = import_module(f"pennyweight.{where}")
        note(module, "solve_in_model", lambda model, row, *rest, where=where: [f"{where} {row.name}"])
    note(Chain, "measure", lambda chain, b, values: [f"trials {name}" for name in {v.name for v in values}])
    work()


def begun(log: Path) -> set[str]:
    return set(log.read_text().splitlines()) if log.exists() else set()


def block(line: str) -> str:
    """The kind of work and the block of the model that it is done for."""
    kind, name = line.split()
    found = re.search(r"\.(\d+)\.", name)
    return f"{kind} {found[1] if found else name}"


def files(folder: Path) -> dict[str, bytes]:
    """Of the result: all files of the checkpoint, and the losses and the mixture of a search."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in (folder / "out").rglob("*") if p.is_file()}
    found = {name: content for name, content in found.items() if STATE not in name}
    mixture = folder / "mixture.json"
    return found | ({mixture.name: mixture.read_bytes()} if mixture.exists() else {})


def readable(folder: Path) -> bool:
    try:
        with pw.open(folder / "out"):
            return True
    except pw.CheckpointError:
        return False


def run(name: str, src: Path, folder: Path, kills: int, chance: random.Random) -> str:
    """Kill it so many times; returns the line about it."""
    work = OPERATIONS[name]
    folder.mkdir()
    whole = folder / "whole"
    whole.mkdir()
    in_child(partial(work, src, whole))  # the first one also waits for the disk
    took = in_child(partial(noting, partial(work, src, fresh(whole)), folder / "log")) or 0.0
    want, total = files(whole), len(begun(folder / "log"))
    lost: list[int] = []  # work begun again after each kill
    runs = complete = 0
    while len(lost) < kills:
        runs += 1
        place = fresh(folder / "killed")
        before: list[set[str]] = []  # what each killed process of this run had begun
        while True:
            log = folder / f"log{len(before)}"
            log.unlink(missing_ok=True)
            more = len(before) < IN_TURN and len(lost) + bool(before) < kills
            moment = chance.random() * took if more else None
            ended = in_child(partial(noting, partial(work, src, place), log), moment)
            if before:
                again = before[-1] & begun(log)
                lost.append(len(again))
                if len(set(map(block, again))) > 1:
                    raise SystemExit(f"{name}, {place}: work of several blocks was done again: {sorted(again)}")
            if ended is not None:
                break
            before.append(begun(log))
            if readable(place):
                if files(place) != want:
                    raise SystemExit(f"{name}, {place}: a reader accepts another result than that of a whole run")
                complete += 1
                if not (place / "out" / STATE).exists():
                    lost.append(0)
                    break
        if files(place) != want:
            differ = sorted(n for n in want.keys() | files(place).keys() if want.get(n) != files(place).get(n))
            raise SystemExit(f"{name}, {place}: {', '.join(differ)} differ from a run that was not killed")
        extra = {p.name for p in place.iterdir()} - {"out", "searched", "mixture.json"}
        if extra:
            raise SystemExit(f"{name}, {place}: left over: {', '.join(sorted(extra))}")
    again = sum(lost)
    return (
        f"{len(lost)} kills in {runs} runs of {took:.1f} s, all with the bytes of a whole run; of {total} pieces of "
        f"work begun again after a kill: {again / len(lost):.1f}, at most {max(lost)}, all of one block; {complete} "
        "kills when the result was in place"
    )


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operations", nargs="*", metavar="OPERATION", choices=[*OPERATIONS, []])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--folder", default="")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)  # a process that is forked must not have begun others
    disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=asked.folder or None) as folder:
        src = Path(folder, "float")
        in_child(partial(write_model, src, asked.blocks))
        fresh_model(str(src))  # imports the class of the model
        for name in asked.operations or OPERATIONS:
            began = time.perf_counter()
            line = run(name, src, Path(folder, name), asked.kills, random.Random(asked.seed))
            print(f"{name:<8}{line}; {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()

"""Writers killed by SIGKILL at random moments on a real disk: what a reader finds then, and what the next write leaves.

    python -m benchmarks.reliability.kill_writers [--rounds N] [--folder DIR] [--megabytes M] [--seed S] [OPERATION ...]

--rounds      kills of each operation, 200
--folder      on the disk to be tried; default: a temporary folder
--megabytes   of a checkpoint, 4
--seed        of the moments, 0
OPERATION     of those below, default all: save-one, save-shards, save-switch, quantize, force, save-pretrained, gguf

Each round writes a checkpoint whose every number is the round's over the one that is there, in a process of its own,
and kills it after a random part of the time that a whole write took lately. Then the folder must hold the old
checkpoint or the new one: all tensors of one round, config.json of the same where the operation writes one. Then the
next write must succeed and leave none but the files of one checkpoint. Prints a line for each operation: how many
rounds ended with the old checkpoint and with the new one, and how many had ended before the kill; it stops with an
error at the first round that left anything else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pennyweight as pw
from pennyweight.cli import output
from pennyweight.io import convert, load, open, quantize_checkpoint, save
from pennyweight.io.replace_checkpoint import replacing

FILES = {"model.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json", "mine.txt"}


@dataclass(frozen=True)
class Operation:
    """write(folder, number): a checkpoint whose numbers are all that one. read(folder): its numbers; none: nothing is
    there. source(folder, number): makes what it is written from. resumes: what is written anew is begun in an empty
    folder, and a killed write is gone on with."""

    write: Callable[[Path, int], Any]
    read: Callable[[Path], set[float]]
    source: Callable[[Path, int], Any] = lambda folder, number: None
    resumes: bool = False


def state(number: int, numel: int) -> dict[str, torch.Tensor]:
    return {f"layers.{i}.weight": torch.full((numel // 4 // 256, 256), float(number)) for i in range(4)}


def numbers(folder: Path) -> set[float]:
    """All numbers that its tensors hold, and that of config.json."""
    out = folder / "out"
    if not any((out / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")):
        return set()
    found = {float(v) for t in load(out).values() for v in plain(t).unique()}
    config = json.loads((out / "config.json").read_text()) if (out / "config.json").exists() else {}
    return found | ({float(config["made"])} if "made" in config else set())


def plain(t: torch.Tensor) -> torch.Tensor:
    return (t.dequantize() if isinstance(t, pw.AffineQuantizedTensor) else t).round()


def operations(numel: int, names: list[str]) -> dict[str, Operation]:
    size = numel * 4
    one, shards = size * 2, size // 4 + 100

    def source(folder: Path, number: int) -> None:
        src = emptied(folder / "src")
        save(state(number, numel), src)
        (src / "config.json").write_text(json.dumps({"made": number}))

    def quantize(folder: Path, number: int) -> None:
        quantize_checkpoint(folder / "src", folder / "out", pw.Int8WeightOnlyConfig(), max_shard_bytes=size // 16)

    def force(folder: Path, number: int) -> None:
        def job(dst: str, **how: Any) -> Any:
            return convert(folder / "src", dst, to="float", max_shard_bytes=shards, **how)

        out = str(folder / "out")
        dst = output.output_folder(out, True, job, resume=False)
        job(dst, resume=False)
        output.publish_output(dst, out)

    found = {
        "save-one": Operation(lambda d, n: save(state(n, numel), d / "out", max_shard_bytes=one), numbers),
        "save-shards": Operation(lambda d, n: save(state(n, numel), d / "out", max_shard_bytes=shards), numbers),
        "save-switch": Operation(
            lambda d, n: save(state(n, numel), d / "out", max_shard_bytes=(one, shards)[n % 2]), numbers
        ),
        "quantize": Operation(quantize, numbers, source, resumes=True),
        "force": Operation(force, numbers, source),
    }
    return found | (with_transformers(numel) if {"save-pretrained", "gguf"} & {*names} else {})


def emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def with_transformers(numel: int) -> dict[str, Operation]:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    hidden = 256
    config = LlamaConfig(
        vocab_size=max(64, numel // hidden // 2), hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)

    def fill(number: int) -> Any:
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(number)
        model.config.made = number  # type: ignore[union-attr]
        return model

    def pretrained(folder: Path, number: int) -> None:
        with replacing(folder / "out") as new:
            fill(number).save_pretrained(new, max_shard_size=numel)

    def source(folder: Path, number: int) -> None:
        fill(number).save_pretrained(emptied(folder / "src"))

    def gguf(folder: Path, number: int) -> None:
        convert(folder / "src", folder / "model.gguf", to="gguf", resume=False)

    def read_gguf(folder: Path) -> set[float]:
        if not (folder / "model.gguf").exists():
            return set()
        with open(folder / "model.gguf") as file:
            return {float(v) for name, t in file.items() if "rope" not in name for v in plain(t).unique()}

    return {"save-pretrained": Operation(pretrained, numbers), "gguf": Operation(gguf, read_gguf, source)}


ALL = ("save-one", "save-shards", "save-switch", "quantize", "force", "save-pretrained", "gguf")


def in_child(work: Callable[[], object], seconds: float | None = None) -> float | None:
    """Do it in a process of its own, killed after that time. Seconds that it took; None: it was killed before its end.
    Raises where it failed."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    began = time.perf_counter()
    end = None if seconds is None else began + seconds
    done, status = os.waitpid(pid, 0 if end is None else os.WNOHANG)
    while not done:
        if end is not None and time.perf_counter() > end:
            os.kill(pid, signal.SIGKILL)
            end = None
        time.sleep(0 if end is None else 0.0002)
        done, status = os.waitpid(pid, os.WNOHANG)
    if os.WIFEXITED(status):
        if os.WEXITSTATUS(status):
            raise SystemExit("a write that was not killed failed")
        return time.perf_counter() - began
    return None


def run(name: str, operation: Operation, folder: Path, rounds: int, chance: random.Random) -> Counter[str]:
    """Kill it so many times. Counts of "old" and "new" as the kill left them, and of "ended" before it."""
    said: Counter[str] = Counter()
    folder.mkdir(parents=True)
    number = 1
    operation.source(folder, number)
    whole = in_child(partial(operation.write, folder, number)) or 0.0
    for _ in range(rounds):
        number = number % 100 + 1
        write = partial(operation.write, folder, number)
        if operation.resumes:
            shutil.rmtree(folder / "out", ignore_errors=True)
        before = operation.read(folder)
        operation.source(folder, number)
        took = in_child(write, chance.random() * whole)
        if took is not None:
            whole = 0.8 * whole + 0.2 * took
        else:
            whole *= 1.005  # so that as many kills come near the end as at the beginning
        found = operation.read(folder)
        if found not in (before, {float(number)}):
            raise SystemExit(f"{name}, {folder}: neither {before} nor {number}, but {found}")
        said["ended" if took is not None else "old" if found == before else "new"] += 1
        if not operation.resumes:
            number = number % 100 + 1
            operation.source(folder, number)
        in_child(partial(again, operation, folder, number, found))
        if operation.read(folder) != {float(number)}:
            raise SystemExit(f"{name}, {folder}: {operation.read(folder)} after the next write, not {number}")
        check_files(name, folder)
    return said


def again(operation: Operation, folder: Path, number: int, found: set[float]) -> None:
    """The next write. Of a job that was killed at its very end nothing is left to do."""
    unfinished = (folder / "out" / "quantize.progress.json").exists()
    if not (operation.resumes and found == {float(number)} and not unfinished):
        operation.write(folder, number)


def check_files(name: str, folder: Path) -> None:
    left = {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_relative_to(folder / "out")}
    left = {n for n in left if not n.startswith("src") and n != "model.gguf"}
    shards: set[str] = set()
    for path in (folder / "out").glob("*"):
        if path.name.startswith("model-"):
            shards.add(path.name)
        elif path.name not in FILES:
            left.add(path.name)
    index = folder / "out" / "model.safetensors.index.json"
    named = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else set()
    if left or shards != named or (named and (folder / "out" / "model.safetensors").exists()):
        raise SystemExit(f"{name}: left over in {folder}: {sorted(left | (shards ^ named))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operations", nargs="*", metavar="OPERATION", choices=[*ALL, []])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--folder", default="")
    parser.add_argument("--megabytes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)  # a process that is forked must not have begun others
    names = asked.operations or [*ALL]
    table = operations(asked.megabytes << 18, names)
    with tempfile.TemporaryDirectory(dir=asked.folder or None) as folder:
        for name in names:
            began = time.perf_counter()
            said = run(name, table[name], Path(folder, name), asked.rounds, random.Random(asked.seed))
            seconds = time.perf_counter() - began
            print(
                f"{name:<16}{asked.rounds} rounds, all whole: {said['old']} old, {said['new']} new, "
                f"{said['ended']} had ended; {seconds:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()

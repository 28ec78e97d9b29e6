"""Multiple choice: does a quantized language model still prefer the right continuation of four?

    python -m benchmarks.accuracy --subjects smollm2 --json FILE --keep FOLDER
    python -m benchmarks.accuracy.multiple_choice --weights FOLDER

The items are those of ``multiple_choice.txt``, written for this benchmark: things that a small model may know. A
continuation's score is its mean log likelihood per token after the text; the best of the four is the model's choice.
Results are kept in `KEPT`, a row a line, and not computed again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.accuracy import statistics
from benchmarks.accuracy.language_model import Recipe, cache_folder
from benchmarks.accuracy.statistics import Interval
from benchmarks.accuracy.subjects import Sizes, Subject, prepare

TEXT = Path(__file__).with_name("multiple_choice.txt")
KEPT = Path(__file__).with_name("multiple_choice.json")
FLOAT = ("float", "float32")
SUBJECT = "smollm2"


@dataclass(frozen=True)
class Item:
    """A text and four continuations, of which one is right."""

    category: str
    text: str
    choices: tuple[str, ...]
    right: int


def items(lines: str | None = None) -> list[Item]:
    """Of the file. The right one is first in a line; here it has each of the four places equally often.

    Raises ValueError for a line that has not five different parts.
    """
    found: list[Item] = []
    category = ""
    for line in (TEXT.read_text(encoding="utf-8") if lines is None else lines).splitlines():
        if line.startswith("#"):
            category = line.lstrip("# ")
            continue
        text, *choices = (part.strip() for part in line.split("|"))
        if len(choices) != 4 or len(set(choices)) != 4 or not text:
            raise ValueError(f"not a text, its continuation, and three that are wrong: {line!r}")
        right = len(found) % 4
        choices[0], choices[right] = choices[right], choices[0]
        found.append(Item(category, text, tuple(choices), right))
    return found


def scores(model: nn.Module, tokenizer: Any, some: Sequence[Item], batch: int = 64) -> Tensor:
    """float64 [items, 4]: mean log likelihood of a continuation's tokens, a space before it."""
    sequences = []
    for item in some:
        text = tokenizer(item.text)["input_ids"]
        sequences += [(text, tokenizer(f" {choice}")["input_ids"]) for choice in item.choices]
    order = sorted(range(len(sequences)), key=lambda i: sum(map(len, sequences[i])))  # little is padding
    found = torch.zeros(len(sequences), dtype=torch.float64)
    for start in range(0, len(order), batch):
        part = [sequences[i] for i in order[start : start + batch]]
        width = max(len(text) + len(choice) for text, choice in part)
        ids, mask = torch.zeros(2, len(part), width, dtype=torch.long)
        for row, (text, choice) in enumerate(part):
            n = len(text) + len(choice)
            ids[row, :n], mask[row, :n] = torch.tensor([*text, *choice]), 1
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        for row, (text, choice) in enumerate(part):
            before = logits[row, len(text) - 1 : len(text) + len(choice) - 1].double().log_softmax(-1)
            found[order[start + row]] = before.gather(-1, torch.tensor(choice).unsqueeze(-1)).mean()
    return found.view(len(some), 4)


def choose(model: nn.Module, tokenizer: Any, some: Sequence[Item]) -> list[int]:
    """The place of the likeliest continuation of each item."""
    return scores(model, tokenizer, some).argmax(-1).tolist()


@dataclass(frozen=True)
class Score:
    """Of a row beside the float model, shares of the items.

    right    answered right
    change   that, minus the float model's; items are drawn together
    same     the float model's choice, right or wrong
    """

    right: Interval
    change: Interval
    same: Interval


def score(chosen: Sequence[int], of_float: Sequence[int], right: Sequence[int]) -> Score:
    rows = list(zip(chosen, of_float, right, strict=True))
    return Score(
        statistics.mean([float(a == r) for a, _, r in rows]),
        statistics.mean([float(a == r) - float(b == r) for a, b, r in rows]),
        statistics.mean([float(a == b) for a, b, _ in rows]),
    )


class Answers:
    """(family, name) -> choices, of one model and one set of items; another digest begins anew."""

    def __init__(self, path: Path = KEPT, digest: str | None = None) -> None:
        self.path = path
        kept = json.loads(path.read_text()) if path.exists() else {"digest": digest, "rows": []}
        if digest is not None and kept["digest"] != digest:
            kept = {"digest": digest, "rows": []}
        self.digest = kept["digest"]
        self.rows = {(r["family"], r["name"]): [int(c) for c in r["choices"]] for r in kept["rows"]}

    def add(self, family: str, name: str, chosen: Sequence[int]) -> None:
        self.rows[family, name] = list(chosen)
        rows = ",\n".join(
            json.dumps({"family": f, "name": n, "choices": "".join(map(str, c))}) for (f, n), c in self.rows.items()
        )
        self.path.write_text(f'{{"digest": "{self.digest}", "rows": [\n{rows}\n]}}\n')

    def scores(self) -> dict[tuple[str, str], Score]:
        """Empty where the float model has no row, or where the items are others by now."""
        right, of_float = [item.right for item in items()], self.rows.get(FLOAT)
        if of_float is None or len(of_float) != len(right):
            return {}
        return {row: score(chosen, of_float, right) for row, chosen in self.rows.items()}


def digest_of(subject: Subject) -> str:
    """Of the model and the items."""
    return hashlib.sha256(subject.digest.encode() + TEXT.read_bytes()).hexdigest()[:12]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, metavar="FOLDER", help="of --keep")
    parser.add_argument("--json", type=Path, default=KEPT, metavar="FILE")
    o = parser.parse_args(arguments)
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    subject = prepare(SUBJECT, cache_folder(), Recipe(), Sizes())
    tokenizer = AutoTokenizer.from_pretrained(subject.model_folder, local_files_only=True)
    answers, some = Answers(o.json, digest_of(subject)), items()
    files = {FLOAT: None} | {tuple(unquote(p.stem).split(" ", 1)): p for p in sorted(o.weights.glob("*.safetensors"))}
    for (family, name), file in files.items():
        if (family, name) in answers.rows:
            continue
        model = subject.model()
        if file is not None:
            model.load_state_dict(load_file(file), strict=False)
        chosen = choose(model, tokenizer, some)
        answers.add(family, name, chosen)
        right = sum(a == item.right for a, item in zip(chosen, some, strict=True))
        print(f"{family} {name}: {right} of {len(some)} right", flush=True)


if __name__ == "__main__":
    sys.exit(main())

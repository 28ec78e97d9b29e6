"""The language models through transformers: its own forward and its own caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import llama
from .base import Case


def load(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    import transformers
    from transformers import AutoModelForCausalLM

    transformers.utils.logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


class Sequences:
    """Sequences of equal length in a model with a cache; make_cache(batch, most tokens) -> a cache, or None for the
    model's default."""

    def __init__(self, model: Any, make_cache: Callable[[int, int], Any] | None = None) -> None:
        self.model, self.make_cache, self.cache = model, make_cache, None

    def prompt(self, numbers: list[list[int]]) -> Tensor:
        """Start anew; logits after the last token, [sequences, vocabulary]."""
        self.cache = None
        if self.make_cache is not None:
            self.cache = self.make_cache(len(numbers), len(numbers[0]) + 512)
        return self._run(torch.tensor(numbers))

    def token(self, numbers: list[int]) -> Tensor:
        """One more for each sequence; logits after it."""
        return self._run(torch.tensor(numbers)[:, None])

    def generate(self, numbers: list[int], count: int) -> list[int]:
        """So many tokens after a prompt, each the most likely one."""
        ids = torch.tensor([numbers])
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=count, max_new_tokens=count
        )
        return out[0, len(numbers) :].tolist()

    def _run(self, ids: Tensor) -> Tensor:
        out = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = out.past_key_values
        return out.logits[:, -1]


class Prompt:
    """A case whose step is a whole prompt, from an empty cache."""

    def __init__(self, sequences: Any, case: Case) -> None:
        self.sequences, self.numbers = sequences, llama.tokens(case.batch, case.tokens)

    def step(self) -> None:
        self.sequences.prompt(self.numbers)

    def output(self) -> Tensor:
        return self.sequences.prompt(self.numbers).float()


class Decode:
    """A case whose step is one token after the prompt, for each sequence; the context grows with each step."""

    def __init__(self, sequences: Any, case: Case) -> None:
        self.sequences = sequences
        numbers = llama.tokens(case.batch, case.tokens + 4)
        sequences.prompt([n[: case.tokens] for n in numbers])
        self.next = [[n[case.tokens + i] for n in numbers] for i in range(4)]

    def step(self) -> None:
        self.sequences.token(self.next[0])

    def output(self) -> Tensor:
        """Logits after the fourth token."""
        return [self.sequences.token(n) for n in self.next][-1].float()


class Generate:
    """A case whose step generates tokens after a prompt; its output is the prompt's."""

    def __init__(self, sequences: Any, case: Case) -> None:
        self.sequences, self.numbers = sequences, llama.tokens(1, case.tokens)

    def step(self) -> None:
        found = self.sequences.generate(self.numbers[0], llama.GENERATED)
        if len(found) != llama.GENERATED:
            raise RuntimeError(f"{len(found)} tokens were generated instead of {llama.GENERATED}")

    def output(self) -> Tensor:
        return self.sequences.prompt(self.numbers).float()


class FirstToken:
    """A case whose step loads the model from its file and computes one token; open() -> sequences."""

    def __init__(self, open: Callable[[], Any]) -> None:
        self.open = open

    def step(self) -> None:
        self.output()

    def output(self) -> Tensor:
        sequences = self.open()
        y = sequences.prompt(llama.tokens(1, 1)).float()
        if hasattr(sequences, "close"):
            sequences.close()
        return y


class FileToFile:
    """A case whose step makes the quantized file. `floor`: seconds to read and write as many bytes, measured once.

    Its output is that of the model in the file.
    """

    def __init__(self, make: Callable[[], Any], source: list[Path], out: Path, open: Callable[[], Any]) -> None:
        self.make, self.first = make, FirstToken(open)
        make()
        nbytes = sum(f.stat().st_size for f in ([out] if out.is_file() else out.iterdir()))
        self.floor = llama.read_and_write(source, nbytes, out.parent / "scratch")

    def step(self) -> None:
        self.make()

    def output(self) -> Tensor:
        return self.first.output()


def bind(sequences: Any, case: Case) -> Any:
    kinds: dict[str, Any] = {"prompt": Prompt, "decode": Decode, "generate": Generate}
    return kinds[case.task](sequences, case)

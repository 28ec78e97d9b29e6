"""Pre-train a tiny byte-level language model in low precision, on the sources of Python's standard library.

python examples/tutorials/pretrain.py --recipe rowwise
python examples/tutorials/pretrain.py --recipe "int8 weights" --steps 400 --file run.pt --plot losses.png
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.optim import AdamW8bit
from pennyweight.training import RECIPES, Int8WeightOnlyTrainingConfig, LowPrecisionTrainingConfig

LENGTH, BATCH, WIDTH = 64, 16, 64


class Block(nn.Module):
    """Attention and a feed-forward layer, built from nn.Linear, which recipes convert."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.silu(self.up(self.norm2(x))))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(256, WIDTH), Block(), Block(), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256))


def text() -> Tensor:
    """About two million bytes of the standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)[:2_000_000]), dtype=torch.uint8)


def windows(data: Tensor, step: int) -> Tensor:
    """A batch that depends only on the step, so that a resumed run gets the same ones."""
    start = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
    return torch.stack([data[s : s + LENGTH + 1] for s in start.tolist()]).long()


def train(model: nn.Module, optimizer: AdamW8bit, data: Tensor, steps: range, recipe: str) -> list[float]:
    """The losses of those steps."""
    losses = []
    columns = (
        TextColumn(recipe),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[l]}"),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("", total=len(steps), l="")
        for step in steps:
            window = windows(data, step)
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(window[:, :-1])
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            progress.update(task, advance=1, l=f"loss {losses[-1]:.3f}")
    return losses


def start(recipe: str) -> tuple[nn.Module, AdamW8bit]:
    """A model with a recipe ("bf16", a name in RECIPES, or "int8 weights"), and its optimizer."""
    torch.manual_seed(0)
    model = network()
    if recipe != "bf16":
        whole = recipe == "int8 weights"
        print(
            pw.quantize_(
                model, Int8WeightOnlyTrainingConfig() if whole else LowPrecisionTrainingConfig(recipe)
            ).summary()
        )
    return model, AdamW8bit(model.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="rowwise", choices=["bf16", *RECIPES, "int8 weights"])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--file", type=Path, default=None, help="checkpoint: resumed if it exists, written at the end")
    parser.add_argument("--plot", type=Path, default=None, help="an image of the losses (needs matplotlib)")
    options = parser.parse_args()

    data = text()
    model, optimizer = start(options.recipe)
    losses: list[float] = []
    if options.file is not None and options.file.exists():
        saved = torch.load(options.file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        losses = saved["losses"]
    losses += train(model, optimizer, data, range(len(losses), options.steps), options.recipe)
    first, last = losses[0], sum(losses[-8:]) / len(losses[-8:])
    print(f"{options.recipe}: loss {first:.3f} -> {last:.3f}")
    assert len(losses) < 60 or last < first - 1.5

    if options.file is not None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}, options.file)
    if options.plot is not None:
        from matplotlib import pyplot

        pyplot.plot(losses)
        pyplot.xlabel("step")
        pyplot.ylabel(f"loss, {options.recipe}")
        pyplot.savefig(options.plot)
    if options.recipe in RECIPES:
        # The deployed model matches the trained one: weights are stored as the forward products used them.
        before = model(windows(data, 0)[:, :-1])
        report = pw.quantize_(model, RECIPES[options.recipe].deployed())
        with torch.no_grad():
            off = (model(windows(data, 0)[:, :-1]) - before).norm() / before.norm()
        print(f"deployed: {report.summary()}; relative error of the logits {off:.1e}")
        assert off < 0.02


if __name__ == "__main__":
    main()

"""The Python of docs/training.md and docs/optimizers.md runs, block by block, on a model with the pages' names."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import pennyweight as pw
from pennyweight import optim, training
from pennyweight.integrations import peft
from tests.optim.models import Net

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("training.md", "optimizers.md")
BLOCKS = [
    (page, block)
    for page in PAGES
    for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.S)
]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning", "ignore::UserWarning:peft")
@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=[f"{page}-{i}" for i, (page, _) in enumerate(BLOCKS)])
def test_a_block_runs(page: str, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    batches = [torch.randn(32, 64) for _ in range(4)]

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x in batches:
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            optimizer.step()

    names: dict[str, Any] = {
        "pw": pw, "torch": torch, "model": Net(), "batches": batches, "x": batches[0], "train": train,
        "LoraConfig": LoraConfig, "get_peft_model": get_peft_model, "merge_and_report": peft.merge_and_report,
        **{name: getattr(optim, name) for name in optim.__all__},
        **{name: getattr(training, name) for name in training.__all__},
    }  # fmt: skip
    exec(block, names)

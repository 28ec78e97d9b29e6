"""What child processes of test_multiprocessing.py run: importable, because they are started by "spawn", too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import pennyweight as pw

X = torch.linspace(-1, 1, 3 * 64).view(3, 64)


def net(config: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).eval().requires_grad_(False)
    pw.quantize_(model, config)
    return model


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 4)).eval().requires_grad_(False)
    pw.quantize_(model, "int4", filter_fn=lambda m, name: isinstance(m, (nn.Conv2d, nn.Linear)))
    return model


def frozen() -> nn.Module:
    model = net("int8")
    pw.inference.freeze_(model)
    return model


def fused() -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = BertModel(BertConfig(**sizes, vocab_size=64)).eval().requires_grad_(False)
    pw.quantize_(model, "int8-dynamic")
    pw.fuse_(model)
    return model


MODELS = {
    "int8": lambda: net("int8"), "int8-dynamic": lambda: net("int8-dynamic"), "int4": lambda: net("int4"),
    "uint3": lambda: net(pw.UIntXWeightOnlyConfig("uint3", 32)), "float8": lambda: net("float8"),
    "nvfp4": lambda: net("nvfp4"), "nf4": lambda: net("nf4"), "convolution": conv_net, "frozen": frozen,
    "fused": fused,
}  # fmt: skip


@torch.no_grad()
def run(model: nn.Module) -> torch.Tensor:
    if type(model).__name__.endswith("BertModel"):
        return model(torch.arange(12).view(2, 6)).last_hidden_state
    return model(X if isinstance(model[0], nn.Linear) else torch.linspace(-1, 1, 8 * 9).view(1, 8, 3, 3))


def put(queue: Any, models: list[nn.Module]) -> None:
    for model in models:
        queue.put(run(model).tolist())


def take(requests: Any, answers: Any) -> None:
    """Answers with the outputs of each model that comes, until None comes."""
    while (model := requests.get()) is not None:
        answers.put(run(model).tolist())
        del model


def double(model: nn.Module) -> None:
    with torch.no_grad():
        for part in model[0].weight.parts[1:2]:
            part.mul_(2)


class Inputs(torch.utils.data.Dataset):
    """A data set whose items are outputs of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return run(self.model)

"""What the mistakes in the tables are made with: models, data and files. A row uses these names."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pennyweight as pw


class Net(nn.Module):
    """Token ids [B, T] -> logits [B, T, 96]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 64)
        self.up_proj, self.down_proj = nn.Linear(64, 128), nn.Linear(128, 64)
        self.lm_head = nn.Linear(64, 96, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.down_proj(self.up_proj(self.embed(ids)).relu()))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))


def _quantized(make: Callable[[], nn.Module], config: Any, filter_fn: Any = None) -> nn.Module:
    model = make()
    pw.quantize_(model, config, filter_fn)
    return model


def _frozen() -> nn.Module:
    model = _quantized(mlp, "int8")
    pw.inference.freeze_(model)
    return model


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return mlp()


def _with_nan() -> nn.Module:
    model = mlp()
    with torch.no_grad():
        model[0].weight[3, 5] = float("nan")
    return model


def llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


# Made anew for each row that has the name
MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "other": lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16)),
    "net": Net,
    "llama": llama,
    "compiled": lambda: torch.compile(Net()),  # type: ignore[dict-item, return-value]
    "quantized": lambda: _quantized(mlp, "int8"),
    "int4_model": lambda: _quantized(mlp, "int4"),
    "dynamic": lambda: _quantized(mlp, "int8-dynamic"),
    "small_table": lambda: _quantized(Net, pw.FqnToConfig({"_default": "int8", "_embeddings": "int8"})),
    "conv": lambda: _quantized(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3)), "int8", lambda m, _: isinstance(m, nn.Conv2d)
    ),
    "prepared": lambda: _quantized(mlp, pw.QATConfig("int4")),
    "frozen": _frozen,
    "on_meta": _on_meta,
    "with_nan": _with_nan,
}


def values() -> dict[str, Any]:
    """The other names: modules and data."""
    import pennyweight.algorithms
    import pennyweight.optim
    import pennyweight.training

    return {
        "pw": pw,
        "torch": torch,
        "nn": nn,
        "algorithms": pennyweight.algorithms,
        "optim": pennyweight.optim,
        "training": pennyweight.training,
        "x": torch.randn(4, 64),
        "narrow": torch.randn(4, 63),
        "ids": torch.randint(0, 96, (2, 8)),
        "batches": [torch.randn(8, 64) for _ in range(3)],
        "STATIC": pw.Int8StaticActivationInt8WeightConfig,
        "int4": pw.get_format("int4"),
        "report": pw.quantize_(mlp(), "int8"),
        "planned": pw.plan(mlp(), "int8"),
    }


TEXT = "hello, this is a text and not a model\n" * 5


def write_files(folder: Path) -> None:
    """The files of a careless user."""
    pw.save(_quantized(mlp, "int8"), folder / "saved")
    pw.save(mlp(), folder / "float")
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        llama().save_pretrained(folder / "llama_dir")
    for name in ("notes.txt", "notes.safetensors", "notes.gguf"):
        (folder / name).write_text(TEXT)
    for name in ("empty", "tokenizer_only", "full"):
        (folder / name).mkdir()
    (folder / "tokenizer_only/tokenizer.json").write_text("{}")
    (folder / "full/notes.txt").write_text(TEXT)
    (folder / "mixed.yaml").write_text("'*.down_prj': int8\n_default: int4\n")
    (folder / "broken.yaml").write_text("a: [1,\n")
    (folder / "unknown.yaml").write_text("_default: int44\n")
    torch.save({"a": torch.zeros(3)}, folder / "weights.pt")

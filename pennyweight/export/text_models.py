"""Text models of transformers, wrapped for export: ids and mask in, one tensor out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

INPUTS = ("input_ids", "attention_mask")
# Output attribute -> output name; the first that the model returns is used
OUTPUTS = ("logits", "last_hidden_state")
SAMPLE = (2, 8)  # rows and tokens; both are dynamic in the file


class TextModel(nn.Module):
    """input_ids, attention_mask [batch, sequence] -> logits, or last_hidden_state if the model has no head."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.output = ""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        out: Any = self.model(input_ids=input_ids, attention_mask=attention_mask)
        self.output = next((name for name in OUTPUTS if name in out), "")
        if not self.output:
            raise ValueError(f"{type(self.model).__name__} returns {', '.join(out)}; expected {' or '.join(OUTPUTS)}")
        return out[self.output]


@dataclass(frozen=True)
class TextExport:
    """Arguments of :func:`~pennyweight.export.onnx.export_onnx`: ``export_onnx(t.module, (), path, **t.arguments)``."""

    module: TextModel
    arguments: dict[str, Any]


def require_text(model: Any) -> None:
    """Raise ValueError for a model whose input is not text, or that has an encoder and a decoder."""
    kind = type(model).__name__
    if getattr(model, "main_input_name", "") != "input_ids" or getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{kind}: only models with input_ids and one stack of layers can be exported by name; its main input is "
            f"{getattr(model, 'main_input_name', 'unknown')}. Call pennyweight.export.onnx.export_onnx with inputs"
        )


def text_model(model: Any) -> TextExport:
    """Wrap a transformers model for export, with dynamic batch and sequence. Disables its cache.

    Raises ValueError as :func:`require_text` does.
    """
    require_text(model)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    module = TextModel(model).eval()
    ids = torch.zeros(SAMPLE, dtype=torch.long, device="cpu")
    sample = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        module(**sample)
    axes = {0: "batch", 1: "sequence"}
    return TextExport(
        module,
        {
            "kwargs": sample, "dynamic_shapes": dict.fromkeys(INPUTS, axes), "input_names": list(INPUTS),
            "output_names": [module.output],
        },
    )  # fmt: skip

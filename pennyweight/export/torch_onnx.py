"""torch.onnx.export of a quantized model fails in one of many places; the error then names the exporter that works."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import nn

from ..core.tensor import AffineQuantizedTensor


def explain_failures() -> None:
    """Wrap torch.onnx.export, which is imported: nothing changes for what it can export."""
    export = torch.onnx.export

    @wraps(export)
    def explained(model: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return export(model, *args, **kwargs)
        except Exception as error:
            name = _quantized(model)
            if name is None:
                raise
            raise torch.onnx.OnnxExporterError(
                f"{name} is quantized, which torch.onnx.export cannot write. pennyweight.export.onnx.export_onnx("
                "model, args, path), or the command pennyweight export-onnx, writes the stored codes; for a float file "
                "call dequantize_(model) first"
            ) from error

    torch.onnx.export = explained


def _quantized(model: Any) -> str | None:
    """A quantized weight of a module or of an exported program."""
    if isinstance(model, torch.export.ExportedProgram):
        ours = (node for node in model.graph.nodes if str(node.target).startswith("pennyweight."))
        return next((f"node {node.name}" for node in ours), None)
    if not isinstance(model, nn.Module):
        return None
    state = model.state_dict(keep_vars=True)
    return next((name for name, tensor in state.items() if isinstance(tensor, AffineQuantizedTensor)), None)

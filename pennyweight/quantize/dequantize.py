"""dequantize_(model): quantized parameters become plain tensors again."""

from __future__ import annotations

import logging

import torch
from torch import nn

from ..core.describe_spec import shorten
from ..core.model_arguments import check_arguments
from ..core.tensor import AffineQuantizedTensor
from ..planning.module_handlers import thaw_classes_
from ..planning.parameters import places
from ..planning.quantize_report import ALGORITHM, Report, Row
from .save_pretrained import settle_saving_

_LOG = logging.getLogger(__name__)


@check_arguments()
def dequantize_(model: nn.Module) -> Report:
    """Dequantize every quantized parameter in place; ties are kept. Returns a report.

    A frozen model is thawed first. requires_grad is copied from the quantized parameter (quantize_ leaves it False).
    """
    rows = []
    thaw_classes_(model)
    with torch.inference_mode(False), torch.no_grad():
        for where in list(places(model)):
            w = where[0].get()
            if not isinstance(w, AffineQuantizedTensor):
                continue
            value = nn.Parameter(w.dequantize().contiguous(), requires_grad=w.requires_grad)
            for place in where:
                place.set(value)
            name, kind = where[0].name, type(where[0].module).__name__
            float_name, note = str(w.dtype).removeprefix("torch."), f"was {shorten(w.spec, w.act, w.ndim)}"
            rows.append(Row(name, kind, tuple(w.shape), float_name, "", w.nbytes, value.nbytes, None, note))
    model.__dict__.pop(ALGORITHM, None)
    settle_saving_(model)
    report = Report("dequantize_", rows, verb="dequantized")
    _LOG.info("dequantize_: %d parameters are plain tensors again", len(rows))
    return report

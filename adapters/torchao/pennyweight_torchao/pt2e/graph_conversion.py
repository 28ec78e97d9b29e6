"""Prepare and convert exported graphs, and the passes after conversion, under torchao's names."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from ..graph_mode.convert_graph import convert as convert_pt2e_graph
from ..graph_mode.prepare_graph import insert_observers
from ..graph_mode.prepare_graph import prepare as _prepare
from ..graph_mode.prepare_graph import prepare_qat as _prepare_qat
from ..graph_mode.specs import Quantizer

__all__ = ["convert", "convert_pt2e", "prepare", "prepare_pt2e", "prepare_qat_pt2e"]


def prepare_pt2e(model: GraphModule, quantizer: Quantizer) -> GraphModule:
    """:func:`pennyweight_torchao.graph_mode.prepare`: observers for calibration."""
    return _prepare(model, quantizer)


def prepare_qat_pt2e(model: GraphModule, quantizer: Quantizer) -> GraphModule:
    """:func:`pennyweight_torchao.graph_mode.prepare_qat`: fake quantizers for training."""
    return _prepare_qat(model, quantizer)


def convert_pt2e(
    model: GraphModule, use_reference_representation: bool = False, fold_quantize: bool = True
) -> GraphModule:
    """:func:`pennyweight_torchao.graph_mode.convert`: quantize and dequantize operators.

    Raises NotImplementedError for ``use_reference_representation=True``: :func:`pennyweight.lower` computes products of
    codes in integers.
    """
    if use_reference_representation:
        raise NotImplementedError(
            "convert_pt2e has no use_reference_representation=True; pennyweight.lower(converted) computes in integers"
        )
    return convert_pt2e_graph(model, fold_quantize)


convert = convert_pt2e


def prepare(
    model: GraphModule, node_name_to_scope: dict[str, tuple[str, type]], is_qat: bool, obs_or_fq_callback: Any = None
) -> GraphModule:
    """Insert the observers of an annotated graph. node_name_to_scope is not needed: nodes know their modules."""
    return insert_observers(model, is_qat, obs_or_fq_callback)

"""Prepare and convert exported graphs, and the passes after conversion, under torchao's names."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ..graph_mode.convert_graph import convert as convert_pt2e_graph
from ..graph_mode.dequantize_copies import copy_dequantize_per_user, port_metadata
from ..graph_mode.prepare_graph import insert_observers
from ..graph_mode.prepare_graph import prepare as _prepare
from ..graph_mode.prepare_graph import prepare_qat as _prepare_qat
from ..graph_mode.reference_arithmetic import use_integer_arithmetic
from ..graph_mode.specs import Quantizer

__all__ = [
    "DuplicateDQPass", "PortNodeMetaForQDQ", "convert", "convert_pt2e", "prepare", "prepare_pt2e", "prepare_qat_pt2e",
    "reference_representation_rewrite",
]  # fmt: skip


def prepare_pt2e(model: GraphModule, quantizer: Quantizer) -> GraphModule:
    """:func:`pennyweight_torchao.graph_mode.prepare`: observers for calibration."""
    return _prepare(model, quantizer)


def prepare_qat_pt2e(model: GraphModule, quantizer: Quantizer) -> GraphModule:
    """:func:`pennyweight_torchao.graph_mode.prepare_qat`: fake quantizers for training."""
    return _prepare_qat(model, quantizer)


def convert_pt2e(
    model: GraphModule, use_reference_representation: bool = False, fold_quantize: bool = True
) -> GraphModule:
    """:func:`pennyweight_torchao.graph_mode.convert`: quantize and dequantize operators."""
    return convert_pt2e_graph(model, use_reference_representation, fold_quantize)


convert = convert_pt2e


def prepare(
    model: GraphModule, node_name_to_scope: dict[str, tuple[str, type]], is_qat: bool, obs_or_fq_callback: Any = None
) -> GraphModule:
    """Insert the observers of an annotated graph. node_name_to_scope is not needed: nodes know their modules."""
    return insert_observers(model, is_qat, obs_or_fq_callback)


def reference_representation_rewrite(model: GraphModule) -> GraphModule:
    """Products of codes in integers: :mod:`pennyweight_torchao.graph_mode.reference_arithmetic`. Returns the model."""
    use_integer_arithmetic(model)
    return model


class DuplicateDQPass(PassBase):
    """A dequantize for each annotated user of a tensor."""

    def call(self, graph_module: GraphModule) -> PassResult:
        copy_dequantize_per_user(graph_module)
        return PassResult(graph_module, True)


class PortNodeMetaForQDQ(PassBase):
    """Stack traces and tags of annotated nodes for their quantize and dequantize."""

    def call(self, graph_module: GraphModule) -> PassResult:
        port_metadata(graph_module)
        return PassResult(graph_module, True)

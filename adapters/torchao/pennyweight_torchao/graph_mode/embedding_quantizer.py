"""A quantizer for embedding tables: uint8 with a scale and a real zero point per row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule

from pennyweight.export.decomposed_ops import calls

from .range_observers import PerChannelMinMaxObserver
from .specs import ANNOTATION, QuantizationAnnotation, QuantizationConfig, QuantizationSpec, Quantizer
from .xnnpack_quantizer import OperatorConfig, Pattern


def get_embedding_operators_config() -> OperatorConfig:
    """The config of the tables, and the patterns that it is for."""
    make = PerChannelMinMaxObserver.with_args(eps=2**-12)
    weight = QuantizationSpec(torch.uint8, make, qscheme=torch.per_channel_affine_float_qparams, ch_axis=0)
    return OperatorConfig(QuantizationConfig(None, None, weight, None), [[nn.Embedding], [F.embedding]])


class EmbeddingQuantizer(Quantizer):
    """Quantizes the table of every embedding. No calibration is needed."""

    @classmethod
    def get_supported_quantization_configs(cls) -> list[QuantizationConfig]:
        """The configs."""
        return list({config for config, _ in cls.get_supported_operators()})

    @classmethod
    def get_supported_operator_for_quantization_config(cls, quantization_config: QuantizationConfig) -> list[Pattern]:
        """The patterns of a config."""
        return next((p for config, p in cls.get_supported_operators() if config == quantization_config), [])

    @classmethod
    def get_supported_operators(cls) -> list[OperatorConfig]:
        """All configs with their patterns."""
        return [get_embedding_operators_config()]

    def annotate(self, model: GraphModule) -> GraphModule:
        """Write an annotation to each embedding."""
        weight = get_embedding_operators_config().config.weight
        for node in model.graph.nodes:
            if calls(node, torch.ops.aten.embedding.default):
                node.meta[ANNOTATION] = QuantizationAnnotation(input_qspec_map={node.args[0]: weight})
        return model

    def validate(self, model: GraphModule) -> None:
        """Nothing: every embedding is supported."""

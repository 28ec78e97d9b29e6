"""How a quantizer says what to quantize: specs of single tensors, the annotation of a node, the base class Quantizer.

A place in a graph is either a node, for its output, or a pair (producer, user), for the edge between them.
The names are those of PyTorch's graph mode: a quantizer written for it works here unchanged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

ANNOTATION = "quantization_annotation"  # key of Node.meta
EdgeOrNode = tuple[Node, Node] | Node


class QuantizationSpecBase(ABC):  # noqa: B024 - a marker: the kinds of spec share no method
    """Base of the specs of one tensor."""


@dataclass(eq=True, frozen=True)
class QuantizationSpec(QuantizationSpecBase):
    """A tensor with quantization parameters of its own, from the observer that ``observer_or_fake_quant_ctr`` makes.

    dtype: of the codes. quant_min, quant_max: the codes used; None: all of the dtype. qscheme: per tensor or per
    channel, affine or symmetric. ch_axis: the axis of channels. is_dynamic: parameters are computed from
    each input at run time. Raises ValueError if quant_min exceeds quant_max, or if ch_axis is negative.
    """

    dtype: torch.dtype
    observer_or_fake_quant_ctr: Any
    quant_min: int | None = None
    quant_max: int | None = None
    qscheme: torch.qscheme | None = None
    ch_axis: int | None = None
    is_dynamic: bool = False

    def __post_init__(self) -> None:
        if self.quant_min is not None and self.quant_max is not None and self.quant_min > self.quant_max:
            raise ValueError(f"quant_min must be <= quant_max, got {self.quant_min} and {self.quant_max}")
        if self.ch_axis is not None and self.ch_axis < 0:
            raise ValueError(f"ch_axis must be >= 0 (it counts from the first axis), got {self.ch_axis}")


@dataclass(eq=True, frozen=True)
class FixedQParamsQuantizationSpec(QuantizationSpecBase):
    """A tensor with known parameters: value = (code - zero_point) * scale, as for the output of a sigmoid."""

    dtype: torch.dtype
    scale: float
    zero_point: int
    quant_min: int | None = None
    quant_max: int | None = None
    qscheme: torch.qscheme | None = None
    is_dynamic: bool = False


@dataclass(eq=True, frozen=True)
class SharedQuantizationSpec(QuantizationSpecBase):
    """A tensor that uses the observer of another place, so that both have the same codes."""

    edge_or_node: EdgeOrNode


@dataclass(eq=True, frozen=True)
class DerivedQuantizationSpec(QuantizationSpecBase):
    """A tensor whose parameters are ``derive_qparams_fn`` of the observers of other places.

    Example: a bias in int32 with scale input scale * weight scale.
    """

    derived_from: list[EdgeOrNode]
    derive_qparams_fn: Callable[[list[nn.Module]], tuple[Tensor, Tensor]]
    dtype: torch.dtype
    quant_min: int | None = None
    quant_max: int | None = None
    qscheme: torch.qscheme | None = None
    ch_axis: int | None = None
    is_dynamic: bool = False


@dataclass
class QuantizationAnnotation:
    """What is quantized around one node; stands in ``node.meta["quantization_annotation"]``.

    input_qspec_map: input node -> spec of that edge, None: not quantized. output_qspec: spec of the output.
    allow_implicit_sharing: edges of this node may use the observer of the same tensor at another user, if specs agree.
    """

    input_qspec_map: dict[Node, QuantizationSpecBase | None] = field(default_factory=dict)
    output_qspec: QuantizationSpecBase | None = None
    allow_implicit_sharing: bool = True
    _annotated: bool = False


@dataclass(eq=True, frozen=True)
class QuantizationConfig:
    """The four specs that a quantizer needs for a layer; None: not quantized."""

    input_activation: QuantizationSpec | None
    output_activation: QuantizationSpec | None
    weight: QuantizationSpec | None
    bias: QuantizationSpec | None
    is_qat: bool = False


class Quantizer(ABC):
    """Annotates a graph. :func:`prepare` calls the methods in this order."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Change the graph before it is annotated, for example decompose an operator. Default: nothing."""
        return model

    @abstractmethod
    def annotate(self, model: GraphModule) -> GraphModule:
        """Write annotations to the nodes."""

    @abstractmethod
    def validate(self, model: GraphModule) -> None:
        """Raise an error if the annotated graph is not supported."""

    def prepare_obs_or_fq_callback(  # noqa: B027 - optional
        self, model: GraphModule, edge_or_node_to_obs_or_fq: dict[EdgeOrNode, nn.Module | None]
    ) -> None:
        """Change the observers before they are inserted. Several places can have the same observer."""


class ComposableQuantizer(Quantizer):
    """Several quantizers, applied in order. Raises RuntimeError if one changes or removes annotations of another."""

    def __init__(self, quantizers: Sequence[Quantizer]) -> None:
        self.quantizers = quantizers
        self._graph_annotations: dict[Node, QuantizationAnnotation] = {}

    def _record(self, model: GraphModule, quantizer: Quantizer) -> None:
        for node in model.graph.nodes:
            now, before = node.meta.get(ANNOTATION), self._graph_annotations.get(node)
            if before is not None and now is not before:
                done = "removed" if now is None else "changed"
                raise RuntimeError(
                    f"Quantizer {type(quantizer).__name__} has {done} annotations on node {node}; "
                    "put the quantizer that should decide about this node first"
                )
            if now is not None:
                self._graph_annotations[node] = now

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        for quantizer in self.quantizers:
            model = quantizer.transform_for_annotation(model)
        return model

    def annotate(self, model: GraphModule) -> GraphModule:
        for quantizer in self.quantizers:
            quantizer.annotate(model)
            self._record(model, quantizer)
        return model

    def validate(self, model: GraphModule) -> None:
        """Nothing: each quantizer sees nodes of the others."""

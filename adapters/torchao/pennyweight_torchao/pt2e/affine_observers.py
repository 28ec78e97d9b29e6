"""Observers and fake quantizers of any granularity; in graphs they become ``torchao::`` affine operators."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pennyweight.export.graph_edits import add_constant
from pennyweight.planning.granularity import Granularity, MappingType

from ..enums import ZeroPointDomain
from ..graph_mode.observer_base import SelfConverting
from ..observers import AffineQuantizedMinMaxObserver as _MinMax
from ..observers import AffineQuantizedObserverBase as _Base
from ..qparams import get_block_size, require

__all__ = ["AffineQuantizedMinMaxObserver", "AffineQuantizedObserverBase", "AffineQuantizedPlaceholderObserver"]


class AffineQuantizedObserverBase(_Base, SelfConverting):
    """Keeps the block size and dtype of its input, and converts itself. Other arguments are ignored."""

    is_dynamic = False

    def __init__(
        self, mapping_type: MappingType, target_dtype: torch.dtype, granularity: Granularity,
        quant_min: int | None = None, quant_max: int | None = None, eps: float | None = None,
        scale_dtype: torch.dtype | None = None, zero_point_dtype: torch.dtype | None = None,
        preserve_zero: bool = True, zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            mapping_type, target_dtype, granularity, quant_min, quant_max, eps, scale_dtype, zero_point_dtype,
            preserve_zero, zero_point_domain,
        )  # fmt: skip
        self.block_size: Any = None
        self.original_dtype: torch.dtype | None = None

    def _see(self, input: Tensor) -> None:
        self.original_dtype = input.dtype
        self.block_size = get_block_size(input.shape, self.granularity)

    def convert(self, model: GraphModule, observer_node: Node) -> None:
        """Replace the node by quantize_affine and dequantize_affine; dynamic: with choose_qparams_affine before them.

        Raises AssertionError if no tensor was seen.
        """
        require(self.block_size is not None, "Expecting block_size to be populated: run data through the model")
        ops, graph, source = torch.ops.torchao, model.graph, observer_node.args[0]
        with graph.inserting_before(observer_node):
            if self.is_dynamic:
                arguments = (
                    source, self.mapping_type.name, self.block_size, self.target_dtype, self.quant_min, self.quant_max,
                    self.eps, self.scale_dtype, self.zero_point_dtype,
                )  # fmt: skip
                chosen = graph.call_function(ops.choose_qparams_affine, arguments)
                scale, zero_point = (graph.call_function(operator.getitem, (chosen, i)) for i in (0, 1))
            else:
                s, z = self.calculate_qparams()
                scale = add_constant(model, graph, "_scale", s, s.device)
                zero_point = add_constant(model, graph, "_zero_point", z, getattr(z, "device", None))
            rest = (self.block_size, scale, zero_point, self.target_dtype, self.quant_min, self.quant_max)
            codes = graph.call_function(ops.quantize_affine, (source, *rest), {})
            values = graph.call_function(ops.dequantize_affine, (codes, *rest), {"output_dtype": self.original_dtype})
        observer_node.replace_all_uses_with(values)
        graph.erase_node(observer_node)


class AffineQuantizedMinMaxObserver(AffineQuantizedObserverBase, _MinMax):
    """The minimum and maximum of each block over all data. Raises AssertionError if the number of blocks changes."""

    def forward(self, input: Tensor) -> Tensor:
        if input.numel():
            self._see(input)
        return _MinMax.forward(self, input)


class AffineQuantizedPlaceholderObserver(AffineQuantizedObserverBase):
    """Keeps the block size only: for parameters that are computed from each input."""

    def __init__(
        self, mapping_type: MappingType, target_dtype: torch.dtype, granularity: Granularity,
        quant_min: int | None = None, quant_max: int | None = None, eps: float | None = None, is_dynamic: bool = False,
        scale_dtype: torch.dtype | None = None, zero_point_dtype: torch.dtype | None = None,
        preserve_zero: bool = True, zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            mapping_type, target_dtype, granularity, quant_min, quant_max, eps, scale_dtype, zero_point_dtype,
            preserve_zero, zero_point_domain,
        )  # fmt: skip
        self.is_dynamic = is_dynamic

    def forward(self, input: Tensor) -> Tensor:
        self._see(input)
        return input

    def calculate_qparams(self) -> tuple[Tensor, Any]:
        raise RuntimeError("calculate_qparams should not be called for PlaceholderObserver: it has no parameters")

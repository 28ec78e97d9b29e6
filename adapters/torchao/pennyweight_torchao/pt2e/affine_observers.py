"""Observers and fake quantizers of any granularity; in graphs they become ``torchao::`` affine operators."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pennyweight.export.graph_edits import add_constant
from pennyweight.planning.granularity import Granularity, MappingType, PerAxis, PerGroup, PerTensor

from ..enums import ZeroPointDomain
from ..graph_mode.fake_quantize import FakeQuantize, FakeQuantizeBase
from ..graph_mode.observer_base import SelfConverting
from ..observers import AffineQuantizedObserverBase as _Base
from ..primitives import _fake_quantize_affine
from ..qparams import get_block_size, require

__all__ = [
    "AffineFakeQuantize", "AffineQuantizedMinMaxObserver", "AffineQuantizedMovingAverageMinMaxObserver",
    "AffineQuantizedObserverBase", "AffineQuantizedPlaceholderObserver", "default_affine_fake_quant",
    "default_affine_per_axis_fake_quant", "default_groupwise_fake_quant",
]  # fmt: skip


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


class AffineQuantizedMinMaxObserver(AffineQuantizedObserverBase):
    """The minimum and maximum of each block over all data. Raises AssertionError if the number of blocks changes."""

    def _merge(self, seen: Tensor, new: Tensor, low: bool) -> Tensor:
        return torch.minimum(seen, new) if low else torch.maximum(seen, new)

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() == 0:
            return input
        self._see(input)
        low, high = self._range(input)
        if not hasattr(self, "min_val"):
            self.min_val, self.max_val = low, high
            return input
        require(
            self.min_val.shape == low.shape,
            f"Can't update existing min_val - shape mismatch, self.min_val:{self.min_val.shape} != min_val:{low.shape}",
        )
        self.min_val.copy_(self._merge(self.min_val, low, True))
        self.max_val.copy_(self._merge(self.max_val, high, False))
        return input

    def calculate_qparams(self) -> tuple[Tensor, Any]:
        return self._seen_qparams()


class AffineQuantizedMovingAverageMinMaxObserver(AffineQuantizedMinMaxObserver):
    """Moving averages of the range of each block: low = low + averaging_constant * (new low - low)."""

    def __init__(
        self, mapping_type: MappingType, target_dtype: torch.dtype, granularity: Granularity,
        averaging_constant: float = 0.01, quant_min: int | None = None, quant_max: int | None = None,
        eps: float | None = None, is_dynamic: bool = False, scale_dtype: torch.dtype | None = None,
        zero_point_dtype: torch.dtype | None = None, preserve_zero: bool = True,
        zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT, **kwargs: Any,
    ) -> None:  # fmt: skip
        if is_dynamic and averaging_constant != 1:
            raise NotImplementedError(
                "AffineQuantizedMovingAverageMinMaxObserver doesn't support dynamic quantization for averaging "
                f"constant of {averaging_constant}: it must be 1"
            )
        super().__init__(
            mapping_type, target_dtype, granularity, quant_min, quant_max, eps, scale_dtype, zero_point_dtype,
            preserve_zero, zero_point_domain,
        )  # fmt: skip
        self.is_dynamic, self.averaging_constant = is_dynamic, averaging_constant

    def _merge(self, seen: Tensor, new: Tensor, low: bool) -> Tensor:
        return seen + self.averaging_constant * (new - seen)


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


class AffineFakeQuantize(FakeQuantize):
    """Rounds blocks of any granularity in training, with an affine observer."""

    def __init__(
        self, observer: Any = AffineQuantizedMinMaxObserver, is_dynamic: bool = False, **observer_kwargs: Any
    ) -> None:
        FakeQuantizeBase.__init__(self)
        self.activation_post_process = seen = observer(**observer_kwargs, is_dynamic=is_dynamic)
        self.target_dtype, self.quant_min, self.quant_max = seen.target_dtype, seen.quant_min, seen.quant_max
        self.zero_point_domain, self.mapping_type = seen.zero_point_domain, seen.mapping_type
        self.granularity, self.is_dynamic = seen.granularity, is_dynamic
        real = self.zero_point_domain == ZeroPointDomain.FLOAT
        self.register_buffer("scale", torch.tensor([1.0], dtype=torch.float))
        self.register_buffer("zero_point", torch.tensor([0], dtype=torch.float if real else torch.int))
        self.block_size: Any = None

    def forward(self, X: Tensor) -> Tensor:
        if self.observer_enabled[0] == 1 or self.block_size is None:
            self.activation_post_process(X.detach())
            self.block_size = self.activation_post_process.block_size
        if self.observer_enabled[0] == 1:
            scale, zero_point = self.calculate_qparams()
            self.scale.resize_(scale.shape).copy_(scale)
            self.zero_point.resize_(zero_point.shape).copy_(zero_point)
        if self.fake_quant_enabled[0] != 1:
            return X
        block = get_block_size(X.shape, self.granularity)
        return _fake_quantize_affine(
            X, block, self.scale, self.zero_point, self.target_dtype, self.quant_min, self.quant_max,
            self.zero_point_domain,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return (
            f"fake_quant_enabled={self.fake_quant_enabled}, observer_enabled={self.observer_enabled}, "
            f"quant_min={self.quant_min}, quant_max={self.quant_max}, target_dtype={self.target_dtype}, "
            f"granularity={self.granularity}, mapping_type={self.mapping_type}, "
            f"zero_point_domain={self.zero_point_domain}, scale={self.scale}, zero_point={self.zero_point}, "
            f"block_size={self.block_size}"
        )

    def convert(self, model: GraphModule, observer_node: Node) -> None:
        """Replace the node by affine operators, with the observer's parameters."""
        self.activation_post_process.convert(model, observer_node)


_SYMMETRIC = {"observer": AffineQuantizedMinMaxObserver, "mapping_type": MappingType.SYMMETRIC}
default_affine_fake_quant = AffineFakeQuantize.with_args(
    observer=AffineQuantizedMinMaxObserver, mapping_type=MappingType.ASYMMETRIC, target_dtype=torch.uint8,
    granularity=PerTensor(),
)  # fmt: skip
default_groupwise_fake_quant = AffineFakeQuantize.with_args(
    **_SYMMETRIC, target_dtype=torch.int8, granularity=PerGroup(128)
)
default_affine_per_axis_fake_quant = AffineFakeQuantize.with_args(
    **_SYMMETRIC, target_dtype=torch.int8, granularity=PerAxis(0)
)

"""Mixture-of-experts layers of vLLM on grouped products with quantized weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.utils import set_weight_attrs

from ...core.ops.slice import stack
from ...core.tensor import AffineQuantizedTensor
from ...kernels.repack import prepare
from .linear import MISSING, Pending, Piece, cut, merge, product, runs

ACTIVATIONS: dict[MoEActivation, Callable[[Tensor], Tensor]] = {
    MoEActivation.SILU: F.silu,
    MoEActivation.GELU: F.gelu,
    MoEActivation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
}


class PennyweightExpertsMethod(FusedMoEMethodBase):
    """The method of the experts of one layer.

    w13 [experts, 2 * intermediate, hidden] holds w1 and w3 of each, w2 is [experts, hidden, intermediate]. Raises
    ValueError for activations and biases that it does not compute.
    """

    def __init__(self, prefix: str, moe: Any) -> None:
        super().__init__(moe)
        self.prefix = prefix
        if moe.activation not in ACTIVATIONS or not moe.is_act_and_mul or moe.has_bias:
            what = "biases" if moe.has_bias else f"activation {moe.activation.value}"
            raise ValueError(
                f"{prefix}: pennyweight does not compute experts with {what}; serve the float model, or a file of "
                "pennyweight convert --for vllm"
            )

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register w13_weight and w2_weight without memory; their loaders keep what this rank needs."""
        load = extra_weight_attrs.pop("weight_loader")
        shapes = {
            "w13_weight": (2 * intermediate_size_per_partition, hidden_size),
            "w2_weight": (hidden_size, intermediate_size_per_partition),
        }
        layer.pennyweight_experts = {}
        for name, shape in shapes.items():
            pending = layer.pennyweight_experts[name] = [Pending(*shape) for _ in range(num_experts)]
            empty = torch.empty((num_experts, *shape), dtype=params_dtype, device="meta")
            weight = Parameter(empty, requires_grad=False)
            set_weight_attrs(weight, {"weight_loader": self._loader(load, pending, shape)})
            set_weight_attrs(weight, extra_weight_attrs)
            layer.register_parameter(name, weight)

    def _loader(self, load: Any, pending: list[Pending], shape: tuple[int, int]) -> Callable[..., Any]:
        def weight_loader(
            param: Parameter, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int,
            return_success: bool = False,
        ) -> bool | None:  # fmt: skip
            w = loaded_weight
            if w.ndim != 2:
                raise ValueError(f"{weight_name}: expected the weight of one expert, got {list(w.shape)}")
            sharded = 1 if shard_id == "w2" else 0  # the axis that tensor parallelism cuts
            size = w.shape[sharded]
            local = [1, 1, 1]
            local[0], local[1 + sharded] = len(pending), shape[sharded]
            target = Parameter(torch.full(local, MISSING, dtype=torch.int64, device="cpu"), requires_grad=False)
            numbers = torch.arange(1, size + 1, dtype=torch.int64, device="cpu")
            here = load(target, numbers.view((1, -1) if sharded else (-1, 1)), weight_name, shard_id, expert_id, True)
            filled = (target.detach().flatten(1) != MISSING).any(1).nonzero().flatten().tolist()
            for expert in filled:
                found = list(runs(target.detach()[expert].flatten()))
                if w.shape[1 - sharded] != shape[1 - sharded] or (sharded and [n for _, n, _ in found] != [shape[1]]):
                    raise ValueError(
                        f"{weight_name}: the model needs {list(shape)}, the checkpoint has {list(w.shape)}"
                    )
                for start, length, first in found:
                    piece = cut(w, sharded, first, length, weight_name)
                    at = 0 if sharded else start
                    pending[expert].add(Piece(at, piece.shape[0], piece))
            return here if return_success else None

        return weight_loader

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Stack the experts and pack them for their kernels; experts that cannot be stacked are kept one by one."""
        for name, pending in layer.__dict__.pop("pennyweight_experts").items():
            dtype = getattr(layer, name).dtype
            experts = []
            for e, each in enumerate(pending):
                if each.missing():
                    raise ValueError(
                        f"{self.prefix}.{name}: expert {e} has {each.missing()} of {each.rows} rows missing"
                    )
                experts.append([part.weight for part in merge(each.pieces.values())])
            stacked = _stacked(experts)
            if stacked is not None:
                weight = prepare(stacked, ("bmm",), dtype)
                setattr(layer, name, Parameter(weight, requires_grad=False))
                continue
            each_ready = [[_ready(w, dtype) for w in parts] for parts in experts]
            setattr(layer, name, Parameter(torch.empty(0, dtype=dtype, device="cpu"), requires_grad=False))
            layer.__dict__[f"{name}_each"] = each_ready

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        """None: the kernels of vLLM are not used."""
        return None

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """sum over the chosen experts e of topk_weights · w2[e](act(w1[e] x) · w3[e] x). x [tokens, hidden]."""
        k = topk_ids.shape[1]
        chosen = topk_ids.flatten().long()
        if layer.expert_map is not None:  # expert parallelism: numbers of the experts of this rank, -1 elsewhere
            chosen = layer.expert_map[chosen].long()
        order = torch.argsort(torch.where(chosen < 0, layer.local_num_experts, chosen), stable=True)
        counts = torch.bincount(chosen[chosen >= 0], minlength=layer.local_num_experts)
        order = order[: int(counts.sum())]
        rows = torch.div(order, k, rounding_mode="floor")
        scale = topk_weights.flatten()[order].unsqueeze(1).to(x.dtype)
        inputs = x[rows]
        if layer.apply_router_weight_on_input:
            inputs = inputs * scale
        hidden = _grouped(layer, "w13_weight", inputs, counts)
        gate, up = hidden.chunk(2, -1)
        out = _grouped(layer, "w2_weight", ACTIVATIONS[layer.activation](gate) * up, counts)
        if not layer.apply_router_weight_on_input:
            out = out * scale
        return torch.zeros_like(x).index_add_(0, rows, out.to(x.dtype))


def _stacked(experts: list[list[Any]]) -> AffineQuantizedTensor | None:
    if any(len(parts) != 1 or not isinstance(parts[0], AffineQuantizedTensor) for parts in experts):
        return None
    out = stack([parts[0].to_layout("plain") for parts in experts], 0)
    return None if out is NotImplemented else out


def _ready(w: Any, dtype: torch.dtype) -> Any:
    return prepare(w, ("linear",), dtype) if isinstance(w, AffineQuantizedTensor) else w.to(dtype).contiguous()


def _grouped(layer: Any, name: str, x: Tensor, counts: Tensor) -> Tensor:
    """Product of groups of rows, each with its expert's weight: x [rows, in] -> [rows, out]."""
    each = layer.__dict__.get(f"{name}_each")
    if each is None:
        ends = counts.cumsum(0).to(torch.int32)
        return torch._grouped_mm(x, getattr(layer, name).transpose(-2, -1), offs=ends)
    groups = x.split(counts.tolist())
    outs = [torch.cat([product(g, w, None) for w in parts], -1) for g, parts in zip(groups, each, strict=True)]
    return torch.cat(outs)

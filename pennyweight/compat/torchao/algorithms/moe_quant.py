"""torchao.prototype.moe_quant (0.11 to 0.15): experts as parameters [experts, out, in], quantized one expert at a time.

    quantize_(model, MoEQuantConfig(Int8WeightOnlyConfig()), cond_ffn_filter)

pennyweight.quantize_ selects such parameters by name (FqnToConfig) and has kernels for all experts at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....core.tensor import AffineQuantizedTensor
from ....planning.configs import AOBaseConfig
from ....planning.module_handlers import register_quantize_module_handler
from ..base_tensor import TorchAOBaseTensor
from ..tools import DummyModule
from .quantized_layers import quantized_weight

__all__ = [
    "ConditionalFeedForwardAOQuantizable", "DummyModule", "FakeExtraDimTensor", "MOEFeedForwardAOQuantizable",
    "MoEQuantConfig", "UseFakeExtraDimTensor", "cond_ffn_filter", "moe_filter", "moe_quant_fn",
]  # fmt: skip

aten = torch.ops.aten


class MOEFeedForwardAOQuantizable(nn.Module):
    """A mixture of experts: softmax router, ``top_k`` experts per token, their weights normalized to sum 1.

    shared_expert  a module that sees every token, or None. return_scores: also return the weights [tokens, top_k]
    """

    def __init__(
        self, hidden_dim: int, expert_dim: int, num_experts: int, top_k: int,
        act_fn: Callable[[Tensor], Tensor] = F.silu, shared_expert: nn.Module | None = None,
        return_scores: bool = False, empty_init: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.router = nn.Linear(hidden_dim, num_experts, bias=False)
        self.experts = ConditionalFeedForwardAOQuantizable(num_experts, hidden_dim, expert_dim, act_fn, empty_init)
        self.hidden_dim, self.top_k = hidden_dim, top_k
        self.shared_expert, self.return_scores = shared_expert, return_scores

    def forward(self, x: Tensor) -> Any:
        """x [batch, .., hidden_dim] -> [batch, tokens, hidden_dim]."""
        batch, x = x.shape[0], x.reshape(-1, self.hidden_dim)
        scores, chosen = torch.topk(F.softmax(self.router(x), dim=-1), self.top_k, dim=-1)
        scores = scores / scores.sum(-1, keepdim=True).to(x.dtype)
        out = self.experts(x, chosen, scores, self.top_k)
        if self.shared_expert is not None:
            out = out + self.shared_expert(x)
        out = out.reshape(batch, -1, self.hidden_dim)
        return (out, scores) if self.return_scores else out


class ConditionalFeedForwardAOQuantizable(nn.Module):
    """Gated experts: w2 (act(w1 x) * w3 x), with w1, w3 [experts, expert_dim, hidden_dim], w2 transposed.

    empty_init: uninitialized weights, to load a state dict into; else standard normal ones
    """

    def __init__(
        self, num_experts: int, hidden_dim: int, expert_dim: int, act_fn: Callable[[Tensor], Tensor] = F.silu,
        empty_init: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        make = torch.empty if empty_init else torch.randn
        self.w1 = nn.Parameter(make(num_experts, expert_dim, hidden_dim))
        self.w2 = nn.Parameter(make(num_experts, hidden_dim, expert_dim))
        self.w3 = nn.Parameter(make(num_experts, expert_dim, hidden_dim))
        self.num_experts, self.hidden_dim, self.expert_dim, self.act_fn = num_experts, hidden_dim, expert_dim, act_fn

    def forward(self, x: Tensor, expert_indices: Tensor, expert_weights: Tensor, top_k: int) -> Tensor:
        """x [tokens, hidden_dim]; expert_indices, expert_weights [tokens, top_k]."""
        pairs = expert_indices.reshape(-1)
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            at = (pairs == expert).nonzero().squeeze(-1)
            if at.numel() == 0:
                continue
            rows = at.div(top_k, rounding_mode="floor")
            y = self._expert(x[rows], expert) * expert_weights.reshape(-1, 1)[at]
            out = out.index_add(0, rows, y.to(out.dtype))
        return out

    def _expert(self, x: Tensor, expert: int) -> Tensor:
        gated = self.act_fn(F.linear(x, self.w1[expert])) * F.linear(x, self.w3[expert])
        return F.linear(gated, self.w2[expert])


class FakeExtraDimTensor(TorchAOBaseTensor):
    """Tensors of one shape, dtype and device as one tensor with an axis more, of any class.

    Supports what selects along that axis: ``w[i]`` gives tensor i; slices and index lists give such a tensor again.
    It is a linked list (``head_tensor``, ``tensor_tail``), because compilers need each tensor in an attribute.
    """

    tensor_data_names = ["head_tensor"]  # noqa: RUF012
    optional_tensor_data_names = ["tensor_tail"]  # noqa: RUF012
    tensor_attribute_names: list[str] = []  # noqa: RUF012
    head_tensor: Tensor
    tensor_tail: FakeExtraDimTensor | None

    @staticmethod
    def __new__(cls: Any, tensors: Any, tensor_tail: FakeExtraDimTensor | None = None) -> FakeExtraDimTensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        every = [*tensors, *(() if tensor_tail is None else tensor_tail.tensor_list)]
        assert every, "FakeExtraDimTensor needs at least one tensor"
        for name in ("dtype", "shape", "device", "layout"):
            kinds = {getattr(t, name) for t in every}
            assert len(kinds) == 1, f"all tensors in FakeExtraDimTensor must have same {name} but got {kinds}"
        first = every[0]
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[return-value]
            cls, (len(every), *first.shape), dtype=first.dtype, device=first.device, requires_grad=False
        )

    def __init__(self, tensors: Any, tensor_tail: FakeExtraDimTensor | None = None) -> None:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not tensors:
            assert tensor_tail is not None
            tensors, tensor_tail = [tensor_tail.head_tensor], tensor_tail.tensor_tail
        self.head_tensor = tensors[0]
        self.tensor_tail = FakeExtraDimTensor(tensors[1:], tensor_tail) if len(tensors) > 1 else tensor_tail

    @property
    def tensor_list(self) -> list[Tensor]:
        """The tensors."""
        return [self.head_tensor, *(() if self.tensor_tail is None else self.tensor_tail.tensor_list)]

    @property
    def num_tensors(self) -> int:
        return len(self.tensor_list)

    def _apply_fn_to_data(self, fn: Callable[[Tensor], Tensor]) -> FakeExtraDimTensor:
        return FakeExtraDimTensor([fn(t) for t in self.tensor_list])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FakeExtraDimTensor(shape={tuple(self.shape)}, containing {self.num_tensors}: {self.head_tensor})"


def _first_axis(func: Any, w: FakeExtraDimTensor, dim: int) -> None:
    if dim % w.ndim != 0:
        raise NotImplementedError(f"{func} of a FakeExtraDimTensor along axis {dim}: only axis 0 can be indexed")


@FakeExtraDimTensor.implements([aten.slice.Tensor])
def _slice(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    w, dim, start, end, step = (*args, *(0, None, None, 1)[len(args) - 1 :])
    _first_axis(func, w, dim)
    return FakeExtraDimTensor(w.tensor_list[start:end:step])


@FakeExtraDimTensor.implements([aten.select.int])
def _select(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    w, dim, index = args
    _first_axis(func, w, dim)
    return w.tensor_list[index].detach()


@FakeExtraDimTensor.implements([aten.index.Tensor])
def _index(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    w, indices = args[:2]
    if len(indices) != 1 or indices[0] is None or indices[0].ndim != 1:
        raise NotImplementedError("a FakeExtraDimTensor is indexed by one list of numbers, along axis 0")
    return FakeExtraDimTensor([w.tensor_list[i] for i in indices[0].tolist()])


@FakeExtraDimTensor.implements_torch_function([F.linear, aten.linear.default])
def _linear(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    w = given["weight"]
    assert w.num_tensors == 1, "FakeExtraDimTensor used in a linear op when it had multiple tensors"
    return F.linear(given["input"], w.head_tensor, given.get("bias"))


class UseFakeExtraDimTensor(Enum):
    """Whether experts become a FakeExtraDimTensor: always, never, or if one tensor cannot hold them all."""

    TRUE = auto()
    FALSE = auto()
    AS_FALLBACK = auto()


@dataclass
class MoEQuantConfig(AOBaseConfig):
    """A config for each expert of ``w1``, ``w2`` and ``w3``."""

    base_config: AOBaseConfig
    use_fake_extra_dim_tensor: UseFakeExtraDimTensor = UseFakeExtraDimTensor.AS_FALLBACK
    set_inductor_config: bool = True


def _quantized(weight: Tensor, config: MoEQuantConfig) -> Tensor:
    experts: Sequence[Any] = [quantized_weight(w, config.base_config) for w in weight.detach()]
    fake = config.use_fake_extra_dim_tensor
    one = all(type(w) is AffineQuantizedTensor for w in experts)
    if fake is UseFakeExtraDimTensor.FALSE and not one:
        raise ValueError(
            f"{config.base_config} makes a {type(experts[0]).__name__}, which has no form for all experts at once; use "
            "UseFakeExtraDimTensor.AS_FALLBACK"
        )
    if one and fake is not UseFakeExtraDimTensor.TRUE:
        return torch.stack([w.to_layout("plain") for w in experts])
    return FakeExtraDimTensor(experts)


@register_quantize_module_handler(MoEQuantConfig)
def moe_quant_fn(module: nn.Module, config: MoEQuantConfig) -> nn.Module:
    """The module with ``w1``, ``w2`` and ``w3`` quantized. Raises AssertionError unless they have three axes."""
    assert isinstance(config.base_config, AOBaseConfig), (
        f"MoEQuantConfig needs a config such as Int8WeightOnlyConfig(), got {config.base_config!r}"
    )
    for name in ("w1", "w2", "w3"):
        weight = getattr(module, name)
        assert weight.ndim == 3, f"{type(module).__name__}.{name} must have 3 axes, got {list(weight.shape)}"
        setattr(module, name, nn.Parameter(_quantized(weight, config), requires_grad=False))
    return module


def moe_filter(module: nn.Module, fqn: str) -> bool:
    """Whether it is a mixture of experts of this module."""
    return isinstance(module, MOEFeedForwardAOQuantizable)


def cond_ffn_filter(module: nn.Module, fqn: str) -> bool:
    """Whether it holds the experts of one."""
    return isinstance(module, ConditionalFeedForwardAOQuantizable)

"""Sites: which parameters of a module can be quantized, for which op, and along which axis they are contracted.

Register a new module type with one line: ``site(MyLinear, SiteKind(("weight",), "linear"))``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.spec import DTYPES
from ..core.tensor import AffineQuantizedTensor
from ..distributed.dtensor import local_tensor
from .granularity import Granularity, PerAxis, PerBlock, PerGroup, PerRow, PerTensor


@dataclass(frozen=True)
class SiteKind:
    """The quantizable parameters of a module type.

    params      their names
    op          op of the kernel table that consumes them
    transposed  the parameter is [in, out]; it is stored [out, in] so that the contracted axis is last
    default     whether ``quantize_`` selects it by default, without a name or filter
    rank        required rank of the parameters; None: any
    """

    params: tuple[str, ...]
    op: str
    transposed: bool = False
    default: bool = True
    rank: int | None = None


_KINDS: dict[type | str, SiteKind] = {}


def site(module_type: type | str, kind: SiteKind) -> SiteKind:
    """Register a module type as a site; a qualified name avoids importing it."""
    _KINDS[module_type] = kind
    return kind


def kinds() -> dict[type | str, SiteKind]:
    """Registered module types."""
    return dict(_KINDS)


def kind_of(module: nn.Module) -> SiteKind | None:
    """The SiteKind of a module: that of its type or nearest registered base type, or that of recurrent networks, or of
    transformers' experts."""
    for cls in type(module).__mro__:
        found = _KINDS.get(cls) or _KINDS.get(f"{cls.__module__}.{cls.__qualname__}")
        if found is not None:
            return found
    if isinstance(module, nn.RNNBase):
        return _recurrent(tuple(module._flat_weights_names))
    if module.__dict__.keys() >= _EXPERT_ATTRIBUTES:
        return EXPERTS[bool(module.__dict__["is_transposed"])]
    return None


@lru_cache(maxsize=256)
def _recurrent(names: tuple[str, ...]) -> SiteKind:
    """nn.LSTM, nn.GRU and nn.RNN: matrices of all layers and directions, which multiply the input (weight_ih_l0), the
    state (weight_hh_l0), and with proj_size the output (weight_hr_l0). See kernels/recurrent.py."""
    return SiteKind(tuple(name for name in names if name.startswith("weight_")), "linear")


# Mixture-of-experts weights in transformers 5: one parameter per layer, [experts, out, in] or transposed.
# Each model has its own class. They share a decorator (use_experts_implementation), which sets these attributes and
# runs the products by torch._grouped_mm, in a loop, or as one batch.
_EXPERT_ATTRIBUTES = {"is_transposed", "is_concatenated", "has_gate", "has_bias"}
FIRST_PROJECTIONS = ("gate_up_proj", "up_proj")  # read the tokens that the router gives an expert
EXPERTS = tuple(SiteKind((*FIRST_PROJECTIONS, "down_proj"), "bmm", transposed, rank=3) for transposed in (False, True))


site(nn.Linear, SiteKind(("weight",), "linear"))
site(nn.MultiheadAttention, SiteKind(("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"), "linear"))
site(nn.RNNCellBase, SiteKind(("weight_ih", "weight_hh"), "linear"))
site("transformers.pytorch_utils.Conv1D", SiteKind(("weight",), "linear", transposed=True))
site(nn.Embedding, SiteKind(("weight",), "embedding", default=False))
for _conv in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    site(_conv, SiteKind(("weight",), "convolution", default=False))
for _transposed in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
    site(_transposed, SiteKind(("weight",), "transposed_convolution", default=False))


class Indivisible(ValueError):
    """A group size that does not divide the contracted axis, with an on_indivisible policy that does not pad."""


@dataclass(frozen=True)
class Site:
    """One parameter of one module, as configs receive it.

    name        parameter FQN; module: its module's FQN; param: its name in the module
    shape       stored shape: contracted axis last; for convolutions [O, I/groups, *kernel], for transposed ones
                [I, O/groups, *kernel]
    transposed  the last two axes of the parameter are swapped relative to ``shape``
    bare        no SiteKind covers it; the user states how it is used
    """

    name: str
    module: str
    param: str
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    type_name: str
    transposed: bool = False
    bare: bool = False

    def block(self, granularity: Granularity, on_indivisible: str = "pad") -> tuple[int, ...] | None:
        """The block of a weight at this site.

        on_indivisible applies to a group size that does not divide the contracted axis: "pad" to whole groups (exact),
        use the "largest_divisor" not above the group size, else raise Indivisible. Raises ValueError for scales along
        another axis.
        """
        rank = len(self.shape)
        if isinstance(granularity, PerTensor):
            return None
        if isinstance(granularity, PerBlock):
            return granularity.block_size
        if isinstance(granularity, PerGroup):
            return self._groups(granularity.group_size, on_indivisible)
        axes = (0, -rank, 1, 1 - rank) if self.op == "transposed_convolution" else (0, -rank)
        if isinstance(granularity, PerAxis) and granularity.axis not in axes:
            raise ValueError(
                f"{self.name}: a weight does not support PerAxis({granularity.axis}); use PerAxis(0), output channels"
            )
        if isinstance(granularity, PerRow) and granularity.dim not in (-1, rank - 1):
            raise ValueError(f"{self.name}: a weight does not support PerRow(dim={granularity.dim}); use PerRow()")
        return self._channel

    @property
    def _channel(self) -> tuple[int, ...]:
        """The block of one output channel."""
        taps = len(self.shape) - 2
        if self.op == "transposed_convolution":
            return (-1, 1, *(-1,) * taps)
        return (-1,) * (taps + 1) if self.op == "convolution" else (-1,)

    def along_inputs(self, group: int) -> tuple[int, ...]:
        """The block of ``group`` inputs of one output; of a convolution at one position of its kernel."""
        taps = (1,) * (len(self.shape) - 2)
        return {"convolution": (group, *taps), "transposed_convolution": (group, 1, *taps)}.get(self.op, (group,))

    @property
    def inputs(self) -> int:
        """Size of the contracted axis; of a convolution, the input channels of a group."""
        return self.shape[{"convolution": 1, "transposed_convolution": 0}.get(self.op, -1)]

    def _groups(self, group: int, on_indivisible: str) -> tuple[int, ...]:
        if self.op == "convolution":  # whole kernels; 16 channels of 3x3 are a group of 128, and not 8 of them
            channels = largest_divisor(self.shape[1], max(1, int(1.25 * group / math.prod(self.shape[2:]))))
            return (channels, *self._channel[1:])
        return self.standard_block(group, on_indivisible)

    def standard_block(self, group: int, on_indivisible: str = "pad") -> tuple[int, ...]:
        """The block of exactly ``group`` inputs, as number formats with a fixed block size (MX, NVFP4) define it: along
        the contracted axis, of a convolution its input channels. Raises Indivisible as :meth:`block` does."""
        k = self.inputs
        if group >= k or k % group == 0 or on_indivisible == "pad":
            return self.along_inputs(group)
        divisor = largest_divisor(k, group)
        if divisor >= LEAST_GROUP and on_indivisible == "largest_divisor":
            return self.along_inputs(divisor)
        remedy = f"group_size={divisor}, or " if divisor >= LEAST_GROUP else ""
        raise Indivisible(
            f"{self.name}: group size {group} does not divide its {k} inputs; "
            f"use {remedy}on_indivisible='pad' or 'skip'"
        )

    def activation_block(self, granularity: Granularity) -> tuple[int, ...] | None:
        """The block of this site's input: per token; of a convolution per sample, of a transposed one per position."""
        if isinstance(granularity, PerTensor):
            return None
        if isinstance(granularity, PerGroup):
            return (granularity.group_size,)
        if isinstance(granularity, PerBlock):
            return granularity.block_size
        if self.op == "transposed_convolution":
            return (-1, *(1,) * (len(self.shape) - 2))
        return self._channel


# "largest_divisor" does not go below this: the scales of smaller groups would take more bytes than their codes.
LEAST_GROUP = 8


def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of n that is at most ``limit``; 1 for n = 0."""
    return next((d for d in range(min(n, limit), 0, -1) if n % d == 0), 1)


class Place(NamedTuple):
    """A module attribute that holds a parameter: its own FQN, its module's, the module, and the attribute's name."""

    name: str
    module_name: str
    module: nn.Module
    param: str

    @property
    def own(self) -> bool:
        """Whether the SiteKind of its module lists it."""
        kind = kind_of(self.module)
        return kind is not None and self.param in kind.params

    def get(self) -> Any:
        return getattr(self.module, self.param)

    def set(self, tensor: Tensor) -> None:
        """Replace the parameter by ``tensor``, as a Parameter, or as a plain tensor if it was one."""
        if self.param in self.module._parameters:
            self.module._parameters[self.param] = tensor  # type: ignore[assignment]
        else:
            setattr(self.module, self.param, tensor.data)
        if isinstance(self.module, nn.RNNBase):  # its own list of parameters would keep the replaced one alive
            self.module._update_flat_weights()


def places(model: nn.Module) -> Iterator[list[Place]]:
    """Every parameter with all its places, in the model's order; tied ones have several.

    Includes plain tensors that replace a site's parameter (PEFT does this). A module that is registered twice has a
    place under each of its names, as in a state dict.
    """
    found: dict[int, list[Place]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{module_name}." if module_name else ""
        names = [n for n, p in module._parameters.items() if p is not None]
        kind = kind_of(module)
        for n in kind.params if kind is not None else ():
            if n not in names and isinstance(module.__dict__.get(n), Tensor) and _recomputed_from(module, n) is None:
                names.append(n)
        for n in names:
            place = Place(prefix + n, module_name, module, n)
            found.setdefault(id(place.get()), []).append(place)
    yield from found.values()


class Computed(NamedTuple):
    """A weight that is no parameter: its layer's FQN, its own, and the call that makes it one."""

    layer: str
    name: str
    remedy: str


def computed_from(place: Place) -> Computed | None:
    """The weight of a layer that a parametrization or a hook (weight_norm, spectral_norm, pruning) computes from this
    parameter before each forward."""
    if isinstance(place.module, nn.utils.parametrize.ParametrizationList):
        owner, _, name = place.module_name.rpartition(".")
        layer = owner.rpartition("parametrizations")[0].rstrip(".")
        remedy = f"call torch.nn.utils.parametrize.remove_parametrizations(layer, {name!r})"
    else:
        layer, name = place.module_name, place.param.rpartition("_")[0]
        kind = kind_of(place.module)
        if kind is None or name not in kind.params or _recomputed_from(place.module, name) is None:
            return None
        if f"{name}_g" in place.module._parameters:
            call = "remove_weight_norm(layer"
        elif f"{name}_mask" in place.module._buffers:
            call = "prune.remove(layer"
        else:
            call = "remove_spectral_norm(layer"
        remedy = f"call torch.nn.utils.{call}, {name!r})"
    return Computed(layer, f"{layer}.{name}" if layer else name, remedy)


def _recomputed_from(module: nn.Module, name: str) -> str | None:
    """The parameter from which a hook computes ``name``."""
    return next((f"{name}_{end}" for end in ("orig", "g") if f"{name}_{end}" in module._parameters), None)


def make_site(place: Place, tensor: Tensor, *, named: bool = False) -> Site | str:
    """The site of a parameter, or the reason why it has none. ``named``: selected by its own name."""
    kind, kind_name = kind_of(place.module), type(place.module).__name__
    if place.param in getattr(place.module, "fake_quantized", ()):
        return "is prepared for quantization-aware training; call quantize_(model, QATConfig(step='convert'))"
    op, transposed = None, False
    if kind is not None and place.own and kind.rank in (None, tensor.ndim):
        op, transposed = kind.op, kind.transposed
    elif named and tensor.ndim in (2, 3):
        op = "linear" if tensor.ndim == 2 else "bmm"
    if op is None:
        computed = computed_from(place)
        if computed is not None:
            own = computed.name.rpartition(".")[2]
            return f"{own} is computed from it before each forward; {computed.remedy} first"
        if named and tensor.ndim > 1:
            return f"a bare parameter must be 2-d or 3-d to be quantized, this one is {tensor.ndim}-d"
        if kind is not None:
            own = "bias" if place.param.startswith("bias") else place.param  # also bias_ih_l0: one line in a report
            return f"{own} of {kind_name} is not quantized"
        return f"no site for {kind_name}; select it by name with FqnToConfig" if tensor.ndim > 1 else "vector"
    if tensor.dtype not in DTYPES.values():
        return f"dtype {str(tensor.dtype).removeprefix('torch.')} is not one of {', '.join(DTYPES)}"
    if hasattr(local_tensor(tensor), "__tensor_flatten__") and not isinstance(
        local_tensor(tensor), AffineQuantizedTensor
    ):
        return f"{type(tensor).__name__} is a tensor subclass of another library"
    if op == "transposed_convolution" and getattr(place.module, "groups", 1) > 1:
        return "a transposed convolution with groups of channels has no kernel"
    if getattr(place.module, "max_norm", None) is not None:
        return "max_norm writes to the table at each lookup"
    shape = tuple(tensor.shape)
    if transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return Site(
        place.name, place.module_name, place.param, op, shape, tensor.dtype, tensor.device.type, kind_name, transposed,
        not place.own,
    )  # fmt: skip


def is_linear(module: nn.Module, fqn: str = "") -> bool:
    """The default filter: modules whose weights multiply their input (Linear, Conv1D, attention's in_proj, recurrent
    networks, experts)."""
    kind = kind_of(module)
    return kind is not None and kind.default

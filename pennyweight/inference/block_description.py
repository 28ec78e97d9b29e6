"""A fused block as data: its steps with names of parameters instead of tensors, and how its arguments are used."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.block import AttentionStep, Heads, Layer, LinearStep, Norm, NormStep, RotaryStep, Steps
from ..kernels.block_plan import indices
from .query_graph import NormForm

Product = tuple[str, str, bool]  # name of the weight, of the bias or "", whether the weight is stored as [in, out]


@dataclass(frozen=True)
class Arguments:
    """How the arguments of a block's forward are used.

    names      of all parameters of forward, in order
    hidden     name of the input
    mask       name of the attention mask; "" if there is none
    selects    whether a bool mask selects the keys that are allowed; else only float masks are
    padding    name of nn.TransformerEncoderLayer's mask of padded keys; its masks are True where a key is not allowed
    rotary     name of the pair (cos, sin); "" if there is none
    cache      name of the cache; "" if there is none
    bias       name of a float tensor that is added to the scores with the mask (T5's position_bias); "" if none
    states     name of the tensor [batch, n, channels] of which cross-attention computes keys and values; "" if none
    states_mask     name of the mask of cross-attention; "" if none
    states_selects  whether a bool mask of cross-attention selects the keys that are allowed
    unused     arguments that change nothing
    constants  other arguments with the values for which the block was recognized
    batch_first  whether the input is [batch, tokens, width], else [tokens, batch, width]
    """

    names: tuple[str, ...]
    hidden: str
    mask: str = ""
    selects: bool = True
    padding: str = ""
    rotary: str = ""
    cache: str = ""
    bias: str = ""
    states: str = ""
    states_mask: str = ""
    states_selects: bool = True
    unused: frozenset[str] = frozenset()
    constants: dict[str, Any] = field(default_factory=dict)
    batch_first: bool = True


@dataclass(frozen=True)
class CrossPart:
    """Cross-attention of a block.

    cut           number of steps before its AttentionStep
    kept          (buffer, width) of the buffers that are used before and after the cut
    keys, values  paths of the linear layers that compute them, [batch, tokens, shared * size]
    heads         sizes
    layer         index of the block in the cache
    """

    cut: int
    kept: tuple[tuple[int, int], ...]
    keys: str
    values: str
    heads: Heads
    layer: int = 0


@dataclass(frozen=True)
class BlockDescription:
    """Steps of a block without its tensors.

    name       of the block in its model
    steps      as :class:`Steps`; a layer is a Product and a norm a NormForm
    widths     of the buffers
    arguments  of forward
    causal     whether tokens see only earlier ones if the mask is None
    cached     whether keys and values are those of a cache, or written as if there were one
    cut        number of steps up to and including the RotaryStep
    kept       (buffer, width) of the buffers that both parts of a block read, if it runs in two parts
    layer      index of the block in the cache
    attention  path of the module that holds the choice of the attention function, and that choice; ("", "") if none
    output     what the block returns: None: its hidden states; else a tuple, of "" for them, of names of arguments that
               it passes on, and of None
    dtype      of the input and the output
    modules    paths and classes of all modules in the block
    shapes     names and shapes of its parameters
    attributes  (path, name, value) of numbers, strings and functions in its modules
    cross      its cross-attention, if it has one
    """

    name: str
    steps: tuple[Any, ...]
    widths: tuple[int, ...]
    arguments: Arguments
    heads: Heads
    causal: bool
    cached: bool
    cut: int
    kept: tuple[tuple[int, int], ...]
    layer: int
    attention: tuple[str, str]
    output: tuple[str | None, ...] | None
    dtype: torch.dtype
    modules: tuple[tuple[str, str], ...]
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    attributes: tuple[tuple[str, str, Any], ...]
    cross: CrossPart | None = None

    def products(self) -> list[Product]:
        return [p for step in self.steps if isinstance(step, LinearStep) for p in step.layers]  # type: ignore[misc]

    def quantized(self) -> set[str]:
        """Names of the quantized weights."""
        across = () if self.cross is None else (self.cross.keys, self.cross.values)
        return {product[0] for product in self.products()} | {f"{path}.weight" for path in across}

    def parameters(self) -> list[str]:
        """Names of all parameters that the steps read."""
        names = [name for product in self.products() for name in product[:2]]
        norms = [getattr(step, n, None) for step in self.steps for n in ("norm", "q_norm", "k_norm")]
        names += [name for norm in norms if norm is not None for name in (norm.weight, norm.bias)]
        return list(dict.fromkeys(name for name in names if name))

    def build(self, block: nn.Module) -> Steps:
        """The steps with the parameters of ``block``."""

        def get(name: str) -> Tensor | None:
            if not name:
                return None
            path, _, own = name.rpartition(".")
            return block.get_submodule(path)._parameters[own]

        def norm(form: NormForm | None) -> Norm | None:
            return None if form is None else Norm(form.kind, form.eps, get(form.weight), get(form.bias), form.offset)

        def layer(product: Product) -> Layer:
            weight: Any = get(product[0])
            return Layer(weight.t() if product[2] else weight, get(product[1]))

        steps: list[Any] = []
        for step in self.steps:
            if isinstance(step, LinearStep):
                layers: Any = step.layers
                steps.append(replace(step, layers=tuple(map(layer, layers)), norm=norm(step.norm)))  # type: ignore[arg-type]
            elif isinstance(step, NormStep):
                steps.append(replace(step, norm=norm(step.norm)))  # type: ignore[arg-type]
            elif isinstance(step, RotaryStep):
                steps.append(replace(step, q_norm=norm(step.q_norm), k_norm=norm(step.k_norm)))  # type: ignore[arg-type]
            else:
                assert isinstance(step, AttentionStep)
                steps.append(step)
        return Steps(tuple(steps), self.widths, self.dtype)

    def part(self, steps: Steps, begin: int, end: int) -> tuple[Steps, tuple[int, ...]]:
        """Some of the steps, and those buffers in them that other parts use, too."""
        some = steps.steps[begin:end]
        used = {0, 1}.union(*(set(reads) | set(writes) for reads, writes in map(indices, some)))
        shared = {b for b, _ in (*self.kept, *(() if self.cross is None else self.cross.kept))}
        widths = tuple(n if i in used else 1 for i, n in enumerate(steps.widths))  # others take no memory
        return replace(steps, steps=some, widths=widths, partial=end < len(steps.steps)), tuple(sorted(shared & used))

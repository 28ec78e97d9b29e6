"""Cache of the hidden states between the blocks of a chain, one per batch, so that each block can run alone."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .block_order import hidden_argument, output_tensor
from .disk_offload import offloaded
from .float32_products import products_in_float32, run_batch

Rest = Callable[[int, int], tuple[Any, dict[str, Any]]]  # (batch, block) -> further arguments
STATES, SHARED_STATES = "states-", "hidden-"  # beginnings of the names of folders: of one process, of all ranks
_BY_NAME = "pennyweight: hidden states by name"


class ActivationCache:
    """One tensor per batch: in files of a folder; without one in memory, or in mapped files.

    own   indices of the batches that :meth:`put` stores; other ranks store the others in the same folder. None: all
    """

    def __init__(self, folder: Path | None, name: str, own: Container[int] | None = None) -> None:
        self.folder, self.name, self.own, self.kept = folder, name, own, {}  # type: ignore[var-annotated]

    def put(self, i: int, x: Tensor) -> None:
        if self.own is not None and i not in self.own:
            return
        if self.folder is None:
            self.kept[i] = offloaded(x)
        else:
            torch.save(x, self.folder / f"{self.name}-{i}.pt")

    def get(self, i: int) -> Tensor:
        if self.folder is None:
            return self.kept[i].clone()
        return torch.load(self.folder / f"{self.name}-{i}.pt", weights_only=True)


def capture_block_inputs(
    model: nn.Module, batches: Sequence[Any], blocks: Sequence[nn.Module], hidden: ActivationCache,
    first: Callable[[Tensor], None] = lambda x: None,
) -> Rest:  # fmt: skip
    """Store the inputs of the first block for each batch in ``hidden``. Returns the other arguments of each block.

    ``first`` is called with the first input before it is stored."""
    kept: list[list[tuple[Any, dict[str, Any]]]] = []
    shared = True  # the other arguments are the same for all blocks, so later batches can stop at the first
    for i, batch in enumerate(batches):
        calls: list[tuple[Any, dict[str, Any]]] = []

        def before(
            module: nn.Module, args: Any, kwargs: Any, *, i: int = i, calls: list[Any] = calls, shared: bool = shared
        ) -> None:
            x = hidden_argument(args, kwargs)
            if x is None:
                raise RuntimeError("a block was called without its hidden states")
            if not calls:
                if i == 0:
                    first(x)
                hidden.put(i, x.clone())  # a block may write into its inputs, here and when it runs alone
            calls.append(other_arguments(args, kwargs))
            if len(calls) == len(blocks) or (shared and i > 0):
                raise _StopForward

        with ExitStack() as hooks, suppress(_StopForward):
            for block in blocks:
                hooks.enter_context(block.register_forward_pre_hook(before, with_kwargs=True))
            run_batch(model, batch)
        kept.append(calls)
        shared = shared and all(_same(calls[0], c) for c in calls)
        if shared:
            del calls[1:]
        calls[:] = tree_map_only(Tensor, offloaded, calls)  # masks and rotary tables of all batches take memory too
    return lambda i, b: kept[i][b if len(kept[i]) > 1 else 0]


def other_arguments(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a block beside its hidden states, for :func:`run_block`."""
    return tuple(args[1:]), {k: v for k, v in kwargs.items() if k != "hidden_states"} | {_BY_NAME: not args}


def advance_block(states: ActivationCache, batches: Iterable[int], b: int, block: nn.Module, rest: Rest) -> None:
    """Replace the hidden states of batches with these indices before block b by those after it."""
    for i in batches:
        states.put(i, run_block(block, states.get(i), rest(i, b)))


class _StopForward(Exception):
    """Stops a forward pass once all required inputs are captured."""


def _same(a: tuple[Any, dict[str, Any]], b: tuple[Any, dict[str, Any]]) -> bool:
    """Whether two calls have identical other arguments, compared by identity, also inside tuples."""

    def same(x: Any, y: Any) -> bool:
        if isinstance(x, (tuple, list)) and type(x) is type(y) and len(x) == len(y):
            return all(map(same, x, y))
        return x is y or (isinstance(x, (int, float, str)) and x == y)

    return same(a[0], b[0]) and a[1].keys() == b[1].keys() and all(same(v, b[1][k]) for k, v in a[1].items())


def run_block(
    block: nn.Module, x: Tensor, rest: tuple[Any, dict[str, Any]], state: dict[str, Tensor] | None = None
) -> Tensor:
    """Output of a block for hidden states; ``state`` replaces the parameters of these names."""
    args, kwargs = rest
    kwargs = dict(kwargs)
    args, kwargs = ((), kwargs | {"hidden_states": x}) if kwargs.pop(_BY_NAME) else ((x, *args), kwargs)
    with products_in_float32(block.parameters()):
        if state is None:
            out = output_tensor(block(*args, **kwargs))
        else:
            out = output_tensor(torch.func.functional_call(block, state, args, kwargs, tie_weights=False))
    assert out is not None
    return out

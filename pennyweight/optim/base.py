"""The optimizer that all others here are rows of: states by name and kind, one rule, one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core import stochastic_rounding
from ..core.distributed.full_tensor import distribute_like, is_dtensor, local_tensor
from ..core.ops.inplace import stochastic_writes
from ..core.ops.inplace import write_ as requantize_
from ..core.tensor import AffineQuantizedTensor
from ..kernels.cpu import optimizer as native
from .memory import Memory
from .quantized_states import KEPT, LEAST, StateBlocks, StateFormat, read, state_blocks, write_, zeros
from .update_rules import Rule

QT = AffineQuantizedTensor


def check_ways(name: str, ways: Mapping[str, Any]) -> None:
    """The arguments of torch.optim's optimizers that say how a step is carried out. ``foreach`` and ``fused`` are taken
    and change nothing: all parameters of a CPU are updated in one native call, which is both. Raises ValueError for
    ``capturable`` and ``differentiable``, TypeError for an argument that torch.optim has not either."""
    for key, value in ways.items():
        if key not in ("foreach", "fused", "capturable", "differentiable"):
            raise TypeError(f"{name} has no argument {key!r}; docs/optimizers.md lists those that it has")
        if value is not None and type(value) is not bool:
            raise TypeError(f"{name}: {key} is True, False or None, got {value!r}")
        if value and key == "capturable":
            raise ValueError(f"{name}: capturable=True, but its step is not captured into CUDA graphs; leave it out")
        if value and key == "differentiable":
            raise ValueError(f"{name}: differentiable=True, but states of few bits have no gradient; leave it out")


class LowBitOptimizer(torch.optim.Optimizer):
    """An optimizer with quantized states. A subclass is data:

    STATES  its states, each of a kind of number in :data:`KEPT`
    BITS    which row of KEPT; ``block_size``, the elements under a scale, is a group's option
    RULE    the rule, and its number in native code

    Parameters of fewer than 4096 elements keep float32 states. Those on a CPU are updated by one native call; others,
    and all where the native library is missing, by the plain rule (``memory()`` says which). A step is computed in
    float32. bf16_stochastic_round: bfloat16 parameters are rounded by chance, so that updates smaller than half their
    last place are not lost; parameters that are quantized themselves always are. Random numbers are a function of
    ``seed``, parameter, step and element.
    """

    STATES: ClassVar[dict[str, str]]
    BITS: ClassVar[str]
    LEAST: ClassVar[float] = LEAST
    RULE: ClassVar[tuple[Rule, int]]

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._jobs: dict[Tensor, tuple[Any, ...]] = {}
        self._slow: dict[str, int] = {}
        super().__init__(params, defaults)

    # -- what a subclass says ----------------------------------------------------------------------------------------

    def names(self, group: dict[str, Any]) -> list[str]:
        """States that a group has."""
        return list(self.STATES)

    def numbers(self, group: dict[str, Any], step: int) -> list[float]:
        """The rule's numbers at a step, from 1."""
        raise NotImplementedError

    def check(self, group: dict[str, Any]) -> None:
        """Raise ValueError where an option makes no sense."""

    # -- groups ------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim's. Raises ValueError for an option out of range, and for parameters that cannot be updated:
        quantized ones that are frozen, and complex ones."""
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def _check(self, group: dict[str, Any]) -> None:
        if not float(group["lr"]) >= 0:
            raise ValueError(f"lr must not be negative, got {group['lr']}")
        if not group["weight_decay"] >= 0:
            raise ValueError(f"weight_decay must not be negative, got {group['weight_decay']}")
        size = group["block_size"]
        if type(size) is not int or size < 16 or size % 2:
            raise ValueError(f"block_size is the elements under a scale: an even number from 16 on, got {size!r}")
        if "betas" in group and (len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"])):
            raise ValueError(f"betas must be two numbers in [0, 1), got {group['betas']}")
        self.check(group)
        for i, p in enumerate(group["params"]):
            if isinstance(p, QT) and not p.requires_grad:
                raise ValueError(
                    f"{_name(group, i)} is quantized and frozen: it has no gradient to follow; give the optimizer the "
                    "parameters that require one, [p for p in model.parameters() if p.requires_grad]"
                )
            if not p.is_floating_point():
                raise ValueError(f"{_name(group, i)} is {p.dtype}: only floating-point parameters are optimized")

    # -- the step ----------------------------------------------------------------------------------------------------

    @torch._disable_dynamo  # a compiled step is this one: its kernel is fused already
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; parameters without a gradient are passed over. closure: computes the loss anew, which is returned.

        Raises RuntimeError for a sparse gradient, before anything is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        todo = []
        ordinal = 0
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    if p.grad.is_sparse:
                        raise RuntimeError(
                            f"{_name(group, i)} has a sparse gradient, which {type(self).__name__} does not take; "
                            "use nn.Embedding(sparse=False), or torch.optim.SparseAdam for that parameter"
                        )
                    todo.append((group, p, ordinal))
                ordinal += 1
        jobs, later, slow = [], [], Counter[str]()
        for group, p, ordinal in todo:
            job, end = self._one(group, p, ordinal, slow)
            if job is not None:
                jobs.append(job)
                later.append(end)
        if jobs:
            native.run(jobs)
            for target, value, _ in later:
                if target is not value:
                    target.copy_(value)
            # what autograd holds of them is out of date, and a backward pass through it must say so
            torch.autograd.graph.increment_version([target for target, _, _ in later])
        self._slow = dict(slow)
        return loss

    def _one(self, group: dict[str, Any], p: Tensor, ordinal: int, slow: Counter[str]) -> tuple[Any, Any]:
        """Step a parameter by the plain rule, or return its native job and what must live and be copied after it."""
        state = self.state[p]
        if not state:
            self._init(group, p, state)
        state["step"] += 1
        count = int(state["step"].item())
        c = self.numbers(group, count)
        held = [local_tensor(state[name]) for name in self.names(group)]
        kept = [KEPT[self.BITS][self.STATES[name]] for name in self.names(group)]
        key, turn = (
            stochastic_rounding.make_key(group["seed"], ordinal, *_place(p)),
            stochastic_rounding.step_mask(count),
        )
        mine, g = local_tensor(p), _gradient(p)
        chanced = group["bf16_stochastic_round"] and p.dtype is torch.bfloat16
        why = native.accepts(mine, g, held)
        if why is not True:
            slow[why] += 1
            self._plain(mine, g, held, kept, c, key, count, group, chanced)
            return None, None
        values, g = mine.contiguous(), g.contiguous()
        flags = native.MAXIMIZE * bool(group["maximize"]) + native.NESTEROV * bool(group.get("nesterov"))
        made = self._jobs.get(p)
        where = (values.data_ptr(), values.numel(), values.dtype, key, *(_address(s) for s in held))
        if made is None or made[0] != where:
            block = next((s.spec.block for s in held if isinstance(s, QT)), None)
            where_blocks = StateBlocks(1, 1, 1, 1) if block is None else state_blocks(mine.shape, block)
            job = native.job(values, held, [(k.stochastic, k.power) for k in kept], self.RULE[1], where_blocks, key)
            self._jobs[p] = made = (where, job)
        native.set_step(made[1], g, flags + native.STOCHASTIC * chanced, turn, c)
        return made[1], (mine, values, g)

    def _plain(
        self, p: Tensor, g: Tensor, held: Sequence[Tensor], kept: Sequence[StateFormat], c: Sequence[float],
        key: tuple[int, int], count: int, group: dict[str, Any], chanced: bool,
    ) -> None:  # fmt: skip
        """The reference of a step, and what runs where there is no native one."""
        turn = stochastic_rounding.step_mask(count)
        wide = torch.float64 if p.dtype is torch.float64 else torch.float32
        x = p.dequantize(wide) if isinstance(p, QT) else p.to(wide, copy=True)
        g = g.to(wide)
        floats = [read(s).to(wide) for s in held]
        self.RULE[0](x, -g if group["maximize"] else g, floats, c, bool(group.get("nesterov")))
        for state, value, how in zip(held, floats, kept, strict=True):
            if isinstance(state, QT):
                write_(state, value.float(), how, key, turn)
            elif state is not value:
                state.copy_(value)
        if isinstance(p, QT):  # by chance: to the nearest, an update below half a step of its codes would be lost
            with stochastic_writes(count, *key):
                requantize_(p, x, update=True)
            return
        p.copy_(
            stochastic_rounding.round_to_bfloat16(
                x, stochastic_rounding.low_bits(stochastic_rounding.random_bits(x.shape, key, x.device), turn)
            )
            if chanced
            else x
        )

    def _init(self, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
        state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        for name in self.names(group):
            state[name] = self._fresh(group, p, name)

    def _fresh(self, group: dict[str, Any], p: Tensor, name: str) -> Tensor:
        mine = local_tensor(p)
        if p.numel() < self.LEAST:
            dtype = torch.float64 if p.dtype is torch.float64 else torch.float32
            return _like(p, torch.zeros(mine.shape, dtype=dtype, device=mine.device))
        kept = KEPT[self.BITS][self.STATES[name]]
        return _like(p, zeros(mine.shape, kept, group["block_size"], mine.device))

    # -- reports and files -------------------------------------------------------------------------------------------

    def memory(self) -> Memory:
        """Bytes of the states that exist now, on this rank, beside those of float32. Printing it gives a table."""
        quantized = floats = float32 = 0
        parameters = [0, 0]
        for p, state in self.state.items():
            tensors = [local_tensor(t) for name, t in state.items() if name in self.STATES]
            parameters[0 if any(isinstance(t, QT) for t in tensors) else 1] += 1
            quantized += sum(t.nbytes for t in tensors if isinstance(t, QT))
            floats += sum(t.nbytes for t in tensors if not isinstance(t, QT))
            float32 += 4 * len(tensors) * local_tensor(p).numel()
        return Memory(quantized, floats, float32, (parameters[0], parameters[1]), self._slow)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch.optim's, with states as they were kept: no dtype of the parameter's. Float states, those of
        torch.optim's optimizer of the same name too, are quantized. Raises ValueError where a state has another shape
        than its parameter, or another name than those of this optimizer."""
        taken: dict[str, Any] = {}

        def take(optimizer: Any, data: dict[str, Any]) -> dict[str, Any]:
            taken.update(data["state"])
            ids = [i for group in data["param_groups"] for i in group["params"]]
            ours = [p for group in self.param_groups for p in group["params"]]
            self._loading = (taken, dict(zip(ids, ours, strict=False)))
            return {**data, "state": {}}

        handle = self.register_load_state_dict_pre_hook(take)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self.__dict__.pop("_loading", None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._jobs, self._slow = {}, self.__dict__.get("_slow", {})
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        loading = self.__dict__.pop("_loading", None)
        if loading is None:
            return
        taken, ours = loading
        groups = {p: (group, i) for group in self.param_groups for i, p in enumerate(group["params"])}
        for index, saved in taken.items():
            p = ours.get(index)
            if p is None:
                raise ValueError(f"state of parameter {index}, which is in no group of the state dict")
            group, i = groups[p]
            self.state[p] = self._adopt(group, p, saved, _name(group, i))

    def _adopt(self, group: dict[str, Any], p: Tensor, saved: dict[str, Any], name: str) -> dict[str, Any]:
        wanted = {"step", *self.names(group)}
        saved = {k: v for k, v in saved.items() if v is not None}  # SGD without momentum yet
        if saved and saved.keys() != wanted - ({"step"} if self.STEPLESS else set()) and saved.keys() != wanted:
            raise ValueError(f"state of {name} has {sorted(saved)}; {type(self).__name__} keeps {sorted(wanted)}")
        if not saved:
            return {}
        count = saved.get("step", 1.0)
        state: dict[str, Any] = {"step": torch.as_tensor(count, dtype=torch.float32, device="cpu").detach().clone()}
        for key in self.names(group):
            source = saved[key]
            if source.shape != p.shape:
                raise ValueError(
                    f"state {key} of {name} has shape {list(source.shape)}, the parameter {list(p.shape)}: it is "
                    "that of another model"
                )
            target = self._fresh(group, p, key)
            mine, theirs = local_tensor(target), _shard(source, p)
            if isinstance(mine, QT) and isinstance(theirs, QT) and theirs.spec == mine.spec:
                mine = mine.with_(parts=theirs.to(mine.device).parts).clone()
                state[key] = _like(p, mine)
                continue
            value = read(theirs).to(device=mine.device, dtype=torch.float32)
            if isinstance(mine, QT):
                write_(mine, value, KEPT[self.BITS][self.STATES[key]])
            else:
                mine.copy_(value if isinstance(theirs, QT) else theirs)
            state[key] = target
        return state

    STEPLESS: ClassVar[bool] = False  # torch.optim's optimizer of this name counts no steps


def _name(group: dict[str, Any], i: int) -> str:
    names = group.get("param_names")
    return f"parameter {names[i] if names else i} {list(group['params'][i].shape)}"


def _address(state: Tensor) -> tuple[int, ...]:
    if not isinstance(state, QT):
        return (state.data_ptr(),)
    assert state._scale is not None
    return (state._codes.data_ptr(), state._scale.data_ptr())


# -- parameters in shards (DTensor, as FSDP2 makes them) ---------------------------------------------------------------


def _place(p: Tensor) -> tuple[int, ...]:
    """What tells this rank's random numbers from those of others."""
    return tuple(p.device_mesh.get_coordinate() or ()) if is_dtensor(p) else ()  # type: ignore[attr-defined]


def _gradient(p: Tensor) -> Tensor:
    g = p.grad
    assert g is not None
    if is_dtensor(p) and is_dtensor(g) and g.placements != p.placements:  # type: ignore[attr-defined]
        g = g.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
    return local_tensor(g)


def _like(p: Tensor, mine: Tensor) -> Tensor:
    """This rank's part of a state as the parameter is kept: a shard where that is one."""
    if not is_dtensor(p):
        return mine
    from torch.distributed.tensor import DTensor

    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    return DTensor.from_local(mine, mesh, placements, run_check=False, shape=p.shape, stride=p.stride())


def _shard(source: Tensor, p: Tensor) -> Tensor:
    """This rank's part of a state that is given whole or in shards."""
    return local_tensor(source if not is_dtensor(p) or is_dtensor(source) else distribute_like(read(source), p))

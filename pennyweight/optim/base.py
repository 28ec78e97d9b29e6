"""Base class of all optimizers here: named states, an update rule, and the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core import stochastic_rounding
from ..core.ops.inplace import stochastic_writes
from ..core.ops.inplace import write_ as requantize_
from ..core.tensor import AffineQuantizedTensor
from ..distributed.dtensor import (
    distribute_like,
    is_dtensor,
    local_gradient,
    local_tensor,
    mesh_coordinate,
    wrap_like,
)
from ..kernels.cpu import abi
from ..kernels.cpu import optimizer as native
from ..support.arguments import check_number, did_you_mean, hint, show
from ..support.errors import ArgumentTypeError
from .quantized_states import KEPT, LEAST, StateBlocks, StateFormat, read, state_blocks, write_, zeros
from .update_rules import Rule

QT = AffineQuantizedTensor


@dataclass(frozen=True)
class Memory:
    """Bytes of the current states on this rank.

    quantized, floats  bytes of quantized states and of float states (small parameters)
    float32            bytes of the same states in float32
    parameters         number of parameters with states: (quantized, float)
    slow               reason for not using the native step -> number of parameters, at the last step
    """

    quantized: int
    floats: int
    float32: int
    parameters: tuple[int, int]
    slow: dict[str, int]

    @property
    def ratio(self) -> float:
        """State bytes relative to float32."""
        return (self.quantized + self.floats) / self.float32 if self.float32 else 0.0

    def __str__(self) -> str:
        rows = [
            ("states", "parameters", "bytes"),
            ("quantized", str(self.parameters[0]), f"{self.quantized:,}"),
            ("float32 (small parameters)", str(self.parameters[1]), f"{self.floats:,}"),
            ("all of them in float32", str(sum(self.parameters)), f"{self.float32:,}"),
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows]
        lines.append(f"{self.ratio:.3f} of float32")
        lines += [f"slower reference step: {n} parameter(s), {why}" for why, n in self.slow.items()]
        return "\n".join(lines)


_OPTIONS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "block_size", "bf16_stochastic_round", "maximize", "seed")


def check_ways(name: str, ways: Mapping[str, Any]) -> None:
    """Check the implementation arguments of torch.optim's optimizers. ``foreach`` and ``fused`` are accepted and have
    no effect: all CPU parameters are updated in one native call, which is both. Raises ValueError for ``capturable``
    and ``differentiable``, TypeError for an argument that torch.optim does not have either."""
    for key, value in ways.items():
        if key not in ("foreach", "fused", "capturable", "differentiable"):
            alias = {"learning_rate": "lr", "momentum": "betas", "beta1": "betas", "decay": "weight_decay"}
            guess = hint([alias[key]]) if key in alias else did_you_mean(key, _OPTIONS, 1)
            raise TypeError(f"{name} has no argument {key!r}{guess}; see docs/optimizers.md for its arguments")
        if value is not None and type(value) is not bool:
            raise TypeError(f"{name}: {key} must be True, False or None, got {value!r}")
        if value and key == "capturable":
            raise ValueError(f"{name}: capturable=True is not supported: CUDA graphs cannot capture the step")
        if value and key == "differentiable":
            raise ValueError(f"{name}: differentiable=True is not supported: quantized states have no gradient")


_NUMBERS = ("lr", "weight_decay", "eps", "momentum", "dampening")


def _is_share(beta: Any) -> bool:
    return isinstance(beta, (Real, Tensor)) and 0 <= float(beta) < 1


class LowBitOptimizer(torch.optim.Optimizer):
    """An optimizer with quantized states. Subclasses define:

    STATES  state name -> kind of state in :data:`KEPT`
    BITS    the row of KEPT; ``block_size``, the number of elements per scale, is a group option
    RULE    the update rule, and its number in native code

    Parameters with fewer than 4096 elements have float32 states. CPU parameters are updated by one native call; others,
    and all if the native library is missing, by the reference rule (``memory()`` reports which). A step is computed in
    float32. bf16_stochastic_round: bfloat16 parameters are rounded stochastically, so that updates smaller than half a
    unit in the last place are not lost; quantized parameters always are. Random numbers are a function of ``seed``,
    parameter, step and element.
    """

    STATES: ClassVar[dict[str, str]]
    BITS: ClassVar[str]
    LEAST: ClassVar[float] = LEAST
    RULE: ClassVar[tuple[Rule, int]]

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        if isinstance(params, (nn.Module, str, Mapping)):
            given = f"{show(params)}; write {type(self).__name__}(model.parameters())"
            raise ArgumentTypeError(f"params must be the parameters of a model, got {given}")
        self._jobs: dict[Tensor, tuple[Any, ...]] = {}
        self._slow: dict[str, int] = {}
        super().__init__(params, defaults)

    # -- defined by subclasses ---------------------------------------------------------------------------------------

    def names(self, group: dict[str, Any]) -> list[str]:
        """Names of the states of a group."""
        return list(self.STATES)

    def numbers(self, group: dict[str, Any], step: int) -> list[float]:
        """Coefficients of the rule at a step (counted from 1)."""
        raise NotImplementedError

    def check(self, group: dict[str, Any]) -> None:
        """Raise ValueError for an invalid option."""

    # -- groups ------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim: frozen parameters, also quantized ones, are accepted and skipped. Raises ValueError for an
        option out of range, and for complex parameters."""
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def _check(self, group: dict[str, Any]) -> None:
        for option, value in group.items():
            if option in _NUMBERS and not isinstance(value, Tensor):
                check_number(option, value)
        if not float(group["lr"]) >= 0:
            raise ValueError(f"lr must not be negative, got {group['lr']}")
        if not group["weight_decay"] >= 0:
            raise ValueError(f"weight_decay must not be negative, got {group['weight_decay']}")
        size = group["block_size"]
        if type(size) is not int or size < 16 or size % 2:
            raise ValueError(f"block_size (elements per scale) must be an even number of at least 16, got {size!r}")
        betas = group.get("betas", (0, 0))
        if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(_is_share(beta) for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1) such as (0.9, 0.999), got {show(betas)}")
        self.check(group)
        for i, p in enumerate(group["params"]):
            if not p.is_floating_point():
                raise ValueError(f"{_name(group, i)} is {p.dtype}: only floating-point parameters can be optimized")

    # -- the step ----------------------------------------------------------------------------------------------------

    @torch._disable_dynamo  # not compiled: the native kernel is already fused
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; parameters without a gradient are skipped. closure: recomputes the loss, which is returned.

        Raises RuntimeError for a sparse gradient before any parameter changes.
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
                            f"{_name(group, i)} has a sparse gradient, which {type(self).__name__} does not support; "
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
            # tensors saved by autograd are stale; a backward pass through them must raise
            torch.autograd.graph.increment_version([target for target, _, _ in later])
        self._slow = dict(slow)
        return loss

    def _one(self, group: dict[str, Any], p: Tensor, ordinal: int, slow: Counter[str]) -> tuple[Any, Any]:
        """Step by the reference rule, or return the native job and the tensors to keep alive and copy back."""
        state = self.state[p]
        if not state:
            self._init(group, p, state)
        state["step"] += 1
        count = int(state["step"].item())
        c = self.numbers(group, count)
        states = [local_tensor(state[name]) for name in self.names(group)]
        kept = [KEPT[self.BITS][self.STATES[name]] for name in self.names(group)]
        key, turn = (
            stochastic_rounding.make_key(group["seed"], ordinal, *mesh_coordinate(p)),
            stochastic_rounding.step_mask(count),
        )
        local, g = local_tensor(p), local_gradient(p)
        stochastic = group["bf16_stochastic_round"] and p.dtype is torch.bfloat16
        why = native.accepts(local, g, states)
        if why is not True:
            slow[why] += 1
            self._plain(local, g, states, kept, c, key, count, group, stochastic)
            return None, None
        values, g = local.contiguous(), g.contiguous()
        flags = abi.MAXIMIZE * bool(group["maximize"]) + abi.NESTEROV * bool(group.get("nesterov"))
        made = self._jobs.get(p)
        where = (values.data_ptr(), values.numel(), values.dtype, key, *(_address(s) for s in states))
        if made is None or made[0] != where:
            block = next((s.spec.block for s in states if isinstance(s, QT)), None)
            where_blocks = StateBlocks(1, 1, 1, 1) if block is None else state_blocks(local.shape, block)
            job = native.job(values, states, [(k.stochastic, k.power) for k in kept], self.RULE[1], where_blocks, key)
            self._jobs[p] = made = (where, job)
        native.set_step(made[1], g, flags + abi.STOCHASTIC * stochastic, turn, c)
        return made[1], (local, values, g)

    def _plain(
        self, p: Tensor, g: Tensor, states: Sequence[Tensor], kept: Sequence[StateFormat], c: Sequence[float],
        key: tuple[int, int], count: int, group: dict[str, Any], stochastic: bool,
    ) -> None:  # fmt: skip
        """The reference step, used if there is no native one."""
        turn = stochastic_rounding.step_mask(count)
        wide = torch.float64 if p.dtype is torch.float64 else torch.float32
        x = p.dequantize(wide) if isinstance(p, QT) else p.to(wide, copy=True)
        g = g.to(wide)
        floats = [read(s).to(wide) for s in states]
        self.RULE[0](x, -g if group["maximize"] else g, floats, c, bool(group.get("nesterov")))
        for state, value, how in zip(states, floats, kept, strict=True):
            if isinstance(state, QT):
                write_(state, value.float(), how, key, turn)
            elif state is not value:
                state.copy_(value)
        if isinstance(p, QT):  # stochastically: RTN would lose updates below half a step
            with stochastic_writes(count, *key):
                requantize_(p, x, update=True)
            return
        p.copy_(
            stochastic_rounding.round_to_bfloat16(
                x, stochastic_rounding.low_bits(stochastic_rounding.random_bits(x.shape, key, x.device), turn)
            )
            if stochastic
            else x
        )

    def _init(self, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
        state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        for name in self.names(group):
            state[name] = self._fresh(group, p, name)

    def _fresh(self, group: dict[str, Any], p: Tensor, name: str) -> Tensor:
        local = local_tensor(p)
        if p.numel() < self.LEAST:
            dtype = torch.float64 if p.dtype is torch.float64 else torch.float32
            return wrap_like(torch.zeros(local.shape, dtype=dtype, device=local.device), p)
        kept = KEPT[self.BITS][self.STATES[name]]
        return wrap_like(zeros(local.shape, kept, group["block_size"], local.device), p)

    # -- memory and checkpoints --------------------------------------------------------------------------------------

    def memory(self) -> Memory:
        """Bytes of the current states on this rank, compared with float32. Prints as a table."""
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
        """As in torch.optim, but states keep their own dtype instead of the parameter's. Float states are quantized,
        also those of torch.optim's optimizer of the same name. Raises ValueError if the shape of a state differs from
        its parameter, or if its name is not a state of this optimizer."""
        taken: dict[str, Any] = {}
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
            raise ValueError(
                f"state_dict must be that of an optimizer, with 'state' and 'param_groups', got {show(state_dict)}"
            )

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
                raise ValueError(f"state of parameter {index}, which is not in any group of the state dict")
            group, i = groups[p]
            self.state[p] = self._adopt(group, p, saved, _name(group, i))

    def _adopt(self, group: dict[str, Any], p: Tensor, saved: dict[str, Any], name: str) -> dict[str, Any]:
        wanted = {"step", *self.names(group)}
        saved = {k: v for k, v in saved.items() if v is not None}  # SGD without momentum yet
        if saved and saved.keys() != wanted - ({"step"} if self.STEPLESS else set()) and saved.keys() != wanted:
            raise ValueError(f"state of {name} has {sorted(saved)}; {type(self).__name__} expects {sorted(wanted)}")
        if not saved:
            return {}
        count = saved.get("step", 1.0)
        state: dict[str, Any] = {"step": torch.as_tensor(count, dtype=torch.float32, device="cpu").detach().clone()}
        for key in self.names(group):
            source = saved[key]
            if source.shape != p.shape:
                raise ValueError(
                    f"state {key} of {name} has shape {list(source.shape)}, the parameter {list(p.shape)}: it belongs "
                    "to another model"
                )
            target = self._fresh(group, p, key)
            local, given = local_tensor(target), _shard(source, p)
            if isinstance(local, QT) and isinstance(given, QT) and given.spec == local.spec:
                local = local.with_(parts=given.to(local.device).parts).clone()
                state[key] = wrap_like(local, p)
                continue
            value = read(given).to(device=local.device, dtype=torch.float32)
            if isinstance(local, QT):
                write_(local, value, KEPT[self.BITS][self.STATES[key]])
            else:
                local.copy_(value if isinstance(given, QT) else given)
            state[key] = target
        return state

    STEPLESS: ClassVar[bool] = False  # torch.optim's optimizer of this name has no step count


def _name(group: dict[str, Any], i: int) -> str:
    names = group.get("param_names")
    return f"parameter {names[i] if names else i} {list(group['params'][i].shape)}"


def _address(state: Tensor) -> tuple[int, ...]:
    if not isinstance(state, QT):
        return (state.data_ptr(),)
    assert state._scale is not None
    return (state._codes.data_ptr(), state._scale.data_ptr())


def _shard(source: Tensor, p: Tensor) -> Tensor:
    """This rank's part of a state, given as a full or a sharded tensor."""
    return local_tensor(source if not is_dtensor(p) or is_dtensor(source) else distribute_like(read(source), p))

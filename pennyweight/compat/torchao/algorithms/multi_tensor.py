"""MultiTensor: one tensor for the inputs of several calibration batches; every function runs once for each.

Used by torchao's GPTQ (0.6 to 0.15) and AutoRound. A function gets batch i of each MultiTensor; a MultiTensor with one
value has that value in every batch. Tensor results become a MultiTensor again, other results must be equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = [
    "MultiTensor", "MultiTensorInputRecorder", "StateDictManager", "batches_of",
    "remove_multitensors_from_buffers_and_params", "replace_buffers_and_params_with_multitensors",
]  # fmt: skip


class MultiTensor(Tensor):
    """``values``: the tensors, all of one dtype; ``shape`` is the first one's. ``MultiTensor(x)`` or of a list."""

    values: list[Tensor]

    @staticmethod
    def __new__(cls: Any, input: Tensor | Sequence[Tensor], **kwargs: Any) -> MultiTensor:
        first = input[0] if isinstance(input, (list, tuple)) else input
        kwargs["dtype"] = kwargs.get("dtype", first.dtype)
        kwargs.setdefault("device", first.device)
        return torch.Tensor._make_wrapper_subclass(cls, kwargs.pop("shape", first.shape), **kwargs)  # type: ignore[return-value]

    def __init__(self, input: Tensor | Sequence[Tensor], **kwargs: Any) -> None:
        self.values = []
        self.debug = False
        self.add_tensors(input)

    @property
    def count(self) -> int:
        """Number of tensors."""
        return len(self.values)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, count={self.count}, example={self.values[0]})"

    def append(self, input: Tensor) -> MultiTensor:
        return self.add_tensors(input)

    def add_tensors(self, input: Tensor | Sequence[Tensor]) -> MultiTensor:
        """Append a tensor or several; returns itself."""
        for one in input if isinstance(input, (list, tuple)) else [input]:
            assert isinstance(one, Tensor), f"MultiTensor holds tensors, got {type(one).__name__}"
            self.values.extend(one.values if isinstance(one, MultiTensor) else [one])
        return self

    def pad_to_length(self, length: int, pad_in_place: bool = True) -> MultiTensor:
        """At least ``length`` tensors, by repeating the last: copies of it in place, or itself in a new MultiTensor."""
        more = max(0, length - self.count)
        if pad_in_place:
            self.values += [self.values[-1].clone() for _ in range(more)]
            return self
        return self if more == 0 else type(self)([*self.values, *[self.values[-1]] * more])

    def unpad(self, count: int = 1, force: bool = False) -> None:
        """Keep the first ``count`` tensors, if the others are equal to their first or ``force``."""
        same = all(torch.equal(v, self.values[0]) for v in self.values[count:])
        if force or same:
            self.values = self.values[: min(count, self.count)]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat, spec = tree_flatten((args, kwargs or {}))
        count = max((x.count for x in flat if isinstance(x, MultiTensor)), default=1)
        changes = _in_place(func)
        columns = [x.pad_to_length(count, changes).values if isinstance(x, MultiTensor) else [x] * count for x in flat]
        outputs, out_spec = [], None
        for i in range(count):
            one_args, one_kwargs = tree_unflatten([column[i] for column in columns], spec)
            flat_out, out_spec = tree_flatten(func(*one_args, **one_kwargs))
            outputs.append(flat_out)
        if changes and args and isinstance(args[0], MultiTensor):
            return None if func is Tensor.__setitem__ else args[0]
        joined = [_join(func, list(column)) for column in zip(*outputs, strict=True)]
        assert out_spec is not None
        return tree_unflatten(joined, out_spec)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return cls.__torch_function__(func, types, args, kwargs)

    @classmethod
    def is_linear_layer(cls, func: Any) -> bool:
        return func is torch.nn.functional.linear


def _in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return func is Tensor.__setitem__ or (name.endswith("_") and not name.endswith("__")) or name in (
        "__iadd__", "__isub__", "__imul__", "__itruediv__",
    )  # fmt: skip


def _join(func: Any, column: list[Any]) -> Any:
    if isinstance(column[0], Tensor):
        return MultiTensor(column)
    if any(other != column[0] for other in column[1:]):
        raise ValueError(
            f"{getattr(func, '__name__', func)} of a MultiTensor gave {column[:3]} for its tensors; results other than "
            "tensors must be the same for all"
        )
    return column[0]


class MultiTensorInputRecorder(nn.Module):
    """A module that records the arguments of its calls: ``get_recorded_inputs()`` has a MultiTensor for each tensor."""

    def __init__(self, disable_input_validation: bool = False, target_class: Any = MultiTensor) -> None:
        super().__init__()
        self.flat_args: list[Any] = []
        self.spec: Any = None
        self.validate, self.target_class, self.count = not disable_input_validation, target_class, 0

    def forward(self, *args: Any, **kwargs: Any) -> MultiTensorInputRecorder:
        flat, spec = tree_flatten((args, kwargs))
        self.count += 1
        if self.spec is None:
            self.spec = spec
            self.flat_args = [self.target_class(x) if isinstance(x, Tensor) else x for x in flat]
            return self
        if self.validate:
            self._check(flat, spec)
        for held, x in zip(self.flat_args, flat, strict=True):
            if isinstance(x, Tensor):
                held.append(x)
        return self

    def _check(self, flat: list[Any], spec: Any) -> None:
        assert spec == self.spec, f"got two different input structures when recording inputs: {self.spec} and {spec}"
        for i, (held, x) in enumerate(zip(self.flat_args, flat, strict=True)):
            if not isinstance(x, Tensor):
                assert x == held, f"input {i} is {x!r}, before {held!r}: inputs other than tensors must not change"
            else:
                assert isinstance(held, self.target_class), f"input {i} is a tensor, before {held!r}"
                assert held.dtype == x.dtype, f"input {i} has dtype {x.dtype}, before {held.dtype}"

    def get_recorded_inputs(self) -> tuple[Any, ...]:
        """The positional arguments. Raises AssertionError if there are others, or none."""
        args, kwargs = self.get_recorded_args_and_kwargs()
        assert not kwargs, f"inputs have keywords {sorted(kwargs)}; use get_recorded_args_and_kwargs"
        return args

    def get_recorded_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert self.spec is not None, "no inputs have been recorded yet"
        args, kwargs = tree_unflatten(self.flat_args, self.spec)
        return args, kwargs


class StateDictManager:
    """A state dict, and names of parameters by identity; ``get_instance()`` is one for the process."""

    _instance: StateDictManager | None = None

    @staticmethod
    def get_instance() -> StateDictManager:
        if StateDictManager._instance is None:
            StateDictManager._instance = StateDictManager()
        return StateDictManager._instance

    def __init__(self) -> None:
        self.state_dict: dict[str, Any] = {}
        self.id_to_name: dict[int, str] = {}

    def set_state_dict(self, model: nn.Module) -> None:
        self.state_dict = model.state_dict()
        self.update_id_to_name(model)

    def update_id_to_name(self, model: nn.Module) -> None:
        self.id_to_name = {id(value): name for name, value in model.named_parameters()}

    def get_name_for_param(self, param: Tensor) -> str | None:
        return self.id_to_name.get(id(param))

    def update_param(self, name: str, new_value: Tensor) -> None:
        """Raises KeyError for a name that the state dict does not have."""
        if name not in self.state_dict:
            raise KeyError(f"Parameter {name} not found in state_dict")
        self.state_dict[name] = new_value.values[0] if isinstance(new_value, MultiTensor) else new_value

    def get_state_dict(self) -> dict[str, Any]:
        return self.state_dict


def replace_buffers_and_params_with_multitensors(model: nn.Module) -> nn.Module:
    """The module with its own buffers and parameters as MultiTensors of one value."""
    for name, buffer in list(model.named_buffers(recurse=False)):
        setattr(model, name, MultiTensor([buffer]))
    for name, p in list(model.named_parameters(recurse=False)):
        setattr(model, name, nn.Parameter(MultiTensor([p.detach()]), p.requires_grad))
    return model


def remove_multitensors_from_buffers_and_params(model: nn.Module) -> nn.Module:
    """The inverse: the first value of each."""
    for name, buffer in list(model.named_buffers(recurse=False)):
        if isinstance(buffer, MultiTensor):
            setattr(model, name, buffer.values[0])
    for name, p in list(model.named_parameters(recurse=False)):
        if isinstance(p, MultiTensor):
            setattr(model, name, nn.Parameter(p.values[0], p.requires_grad))
    return model


def batches_of(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list[tuple[Any, dict[str, Any]]]:
    """(args, kwargs) of each batch, from arguments with MultiTensors and objects with a list ``values``."""
    flat, spec = tree_flatten((tuple(args), dict(kwargs or {})))

    def values(x: Any) -> list[Any] | None:
        return x.values if isinstance(x, MultiTensor) or isinstance(getattr(x, "values", None), list) else None

    count = max((len(v) for x in flat if (v := values(x)) is not None), default=1)

    def column(x: Any) -> Iterator[Any]:
        v = values(x)
        if v is not None and len(v) not in (1, count):
            raise ValueError(f"an input has {len(v)} tensors, another {count}; give the same number, or one for all")
        yield from [x] * count if v is None else v if len(v) == count else v * count

    return [tree_unflatten(list(one), spec) for one in zip(*map(column, flat), strict=True)]

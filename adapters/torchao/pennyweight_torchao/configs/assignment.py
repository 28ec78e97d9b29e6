"""Assignment to the fields of configs: ``config.group_size = 64``, as torchao's configs allow.

Our configs are frozen. While the alias is installed, a class that it serves is :func:`enable`d: an assignment builds a
new config from the changed fields, with every check of the constructor, and the old object takes over its fields. So a
config is valid at all times, and a rejected assignment changes nothing. The class stays the same class; classes that
torchao freezes too (granularities, layouts, :class:`Float8LinearConfig`) stay frozen.

Hash and equality follow the fields. A config that is a key of a dict must not change, as with every Python object
whose hash follows its value; torchao's configs have no hash at all. This package never keeps a caller's config:
:func:`snapshot` is what ``quantize_`` works with and stores, so assignments during or after the call, also from another
thread, do not reach it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from pennyweight.planning.configs import AOBaseConfig, FqnToConfig

C = TypeVar("C")

# Data classes of torchao that are no configs and not frozen there.
OPEN = {
    "MXFakeQuantizeConfig", "NVFP4FakeQuantizeConfig", "QuantizeTensorToFloat8Kwargs", "QuantizeTensorToInt8Kwargs",
    "QuantizeTensorToMXKwargs", "QuantizeTensorToNVFP4Kwargs",
}  # fmt: skip
_FROZEN: dict[type, dict[str, Any]] = {}  # an enabled class -> its own methods before
# Fields that are two names of one value.
SAME = {"fqn_to_config": "module_fqn_to_config", "module_fqn_to_config": "fqn_to_config"}


def enable(cls: type) -> None:
    """Allow assignments to the fields of a frozen dataclass, if torchao's class of that name allows them."""
    if not dataclasses.is_dataclass(cls) or not (issubclass(cls, AOBaseConfig) or cls.__name__ in OPEN):
        return
    owner = next(c for c in cls.__mro__ if "__setattr__" in vars(c))
    generated = "__dataclass_params__" in vars(owner) and owner.__dataclass_params__.frozen  # type: ignore[attr-defined]
    if generated and owner.__setattr__ is not _assign:  # a __setattr__ that someone wrote stays
        _FROZEN[cls] = {name: vars(cls)[name] for name in ("__setattr__", "__delattr__") if name in vars(cls)}
        cls.__setattr__ = _assign  # type: ignore[method-assign,assignment]
        cls.__delattr__ = object.__delattr__  # type: ignore[method-assign]


def freeze_again() -> None:
    """Undo :func:`enable` for every class."""
    for cls, held in _FROZEN.items():
        for name in ("__setattr__", "__delattr__"):
            delattr(cls, name)
            if name in held:
                setattr(cls, name, held[name])
    _FROZEN.clear()


def _assign(self: Any, name: str, value: Any) -> None:
    """``self.name = value``. Raises what the constructor raises for that value, and changes nothing then."""
    known = {f.name for f in dataclasses.fields(self) if f.init}
    if name not in known:
        object.__setattr__(self, name, value)  # an attribute of the caller's own
        return
    changed = {name: value}
    if SAME.get(name) in known:
        changed[SAME[name]] = value
    # One call: another thread sees all fields of the old config or all of the new.
    vars(self).update(vars(dataclasses.replace(self, **changed)))


def snapshot(config: C) -> C:
    """A config that later assignments to this one do not change. Anything else is returned as it is."""
    if isinstance(config, FqnToConfig):
        table = {name: snapshot(value) for name, value in config.fqn_to_config.items()}
        return dataclasses.replace(config, fqn_to_config=table, module_fqn_to_config=table)
    if type(config).__setattr__ is not _assign:
        return config
    copy = object.__new__(type(config))
    vars(copy).update(vars(config))
    return copy

"""Configs as plain data for JSON files, and back.

    {"type": "Int4WeightOnlyConfig", "group_size": 64}

Fields at their defaults are omitted, so that this release can read files of a later release that adds a field.
Granularities, mapping types, dtypes, formats and specs are objects with a "type" too. A mapping of names is a list of
pairs, because its order matters and JSON writers may sort keys. Types are looked up only in ``TYPES``, the library's
own configs and granularities, and a field accepts only values of its declared type. Name patterns must be matchable in
linear time.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

from ...core.formats import Format, get_format
from ...core.spec import ActivationSpec, QuantSpec
from .. import granularity
from ..granularity import MappingType
from ..name_patterns import check_keys
from . import base, floating, fqn, integer
from .base import AOBaseConfig

_MODULES = (base, fqn, floating, integer, granularity)
_BASES = (AOBaseConfig, granularity.Granularity)
TYPES: dict[str, type] = {
    cls.__name__: cls
    for module in _MODULES
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, _BASES) and cls not in _BASES
}
# All torch dtypes by name (int4, float8_e4m3fn)
_DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
_OLDER_NAMES = {"module_fqn_to_config"}  # aliases of other fields
_DEPTH = 4  # FqnToConfig > ContractedAxis > config > granularity


def config_to_data(config: AOBaseConfig) -> dict[str, Any]:
    """A config as dicts, lists, strings and numbers. Raises ValueError for a class or value that cannot be serialized,
    and for patterns that :func:`config_from_data` does not support."""
    if TYPES.get(type(config).__name__) is not type(config):
        raise ValueError(f"{type(config).__name__} is not one of the library's configs and cannot be serialized")
    if isinstance(config, fqn.FqnToConfig):
        check_keys(config.fqn_to_config)
    return _to_data(config, type(config).__name__)


def config_from_data(data: Any) -> AOBaseConfig:
    """Inverse of :func:`config_to_data`. Raises ValueError for anything unknown, of a wrong type or out of range."""
    out = _from_data(data, "config", 0)
    if not isinstance(out, AOBaseConfig):
        raise ValueError(f"config must be an object whose type is a config, got {str(data)[:100]}")
    return out


AOBaseConfig.coder[:] = [config_to_data, config_from_data]


def _to_data(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return {"type": "dtype", "name": str(value).removeprefix("torch.")}
    if isinstance(value, Format):
        return {"type": "Format", "name": value.name}
    if isinstance(value, MappingType):
        return {"type": "MappingType", "name": value.rule}
    if isinstance(value, (QuantSpec, ActivationSpec)):
        return {"type": type(value).__name__, **value.to_dict()}
    if isinstance(value, (tuple, list)):
        return [_to_data(v, where) for v in value]
    if isinstance(value, Mapping):
        return [[k, _to_data(v, f"{where}[{k!r}]")] for k, v in value.items()]
    if TYPES.get(type(value).__name__) is not type(value):
        plain = getattr(value, "value", None)  # an enum of another library; this one takes a string
        if isinstance(plain, str):
            return plain
        raise ValueError(f"{where}: a {type(value).__name__} cannot be serialized")
    out: dict[str, Any] = {"type": type(value).__name__}
    for f in fields(value):  # type: ignore[arg-type]
        current = getattr(value, f.name)
        default: Any = f.default if f.default_factory is MISSING else f.default_factory()
        if current != default and f.name not in _OLDER_NAMES:
            out[f.name] = _to_data(current, f"{where}.{f.name}")
    return out


def _from_data(data: Any, where: str, depth: int) -> Any:
    if depth > _DEPTH:
        raise ValueError(f"{where}: nested too deep")
    if isinstance(data, list):
        return tuple(_from_data(v, where, depth) for v in data)
    if not isinstance(data, dict):
        return data
    kind = data.get("type")
    rest = {k: v for k, v in data.items() if k != "type"}
    if kind in ("dtype", "Format", "MappingType"):
        return _named(kind, rest, where)
    try:
        if kind == "QuantSpec":
            return QuantSpec.from_dict(rest)
        if kind == "ActivationSpec":
            return ActivationSpec.from_dict(rest)
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from e
    cls = TYPES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ValueError(f"{where}: this release does not know the type {str(kind)[:60]!r}; upgrade pennyweight")
    return _build(cls, rest, where, depth)


def _named(kind: Any, rest: dict[str, Any], where: str) -> Any:
    name = rest.get("name")
    if rest.keys() != {"name"} or not isinstance(name, str):
        raise ValueError(f"{where}: a {kind} must have a name and nothing else, got {str(rest)[:100]}")
    if kind == "Format":
        return get_format(name)
    known: Mapping[str, Any] = _DTYPES if kind == "dtype" else {m.rule: m for m in MappingType}
    if name not in known:
        raise ValueError(f"{where}: unknown {kind} {name[:60]!r}")
    return known[name]


def _build(cls: Any, rest: dict[str, Any], where: str, depth: int) -> Any:
    hints, given = _hints(cls), {}
    for name, raw in rest.items():
        at = f"{where}: {cls.__name__}.{str(name)[:60]}"
        if name not in hints:
            raise ValueError(f"{at}: this release does not know this field; upgrade pennyweight")
        value = _pairs(raw, at, depth) if name == "fqn_to_config" else _from_data(raw, at, depth + 1)
        if not _fits(value, hints[name]):
            raise ValueError(f"{at} cannot be {str(raw)[:100]}")
        given[name] = value
    try:
        return cls(**given)
    except (TypeError, ValueError) as e:
        raise ValueError(f"{where}: {e}") from e


def _pairs(raw: Any, where: str, depth: int) -> dict[str, Any]:
    if not isinstance(raw, list) or not all(isinstance(p, list) and len(p) == 2 and type(p[0]) is str for p in raw):
        raise ValueError(f"{where} must be a list of pairs of a name and a config or null")
    out = {key: _from_data(value, f"{where}[{key[:100]!r}]", depth + 1) for key, value in raw}
    if len(out) != len(raw):
        raise ValueError(f"{where} has a duplicate key")
    try:
        check_keys(out)
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from e
    return out


@lru_cache(maxsize=64)
def _hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a declared type. ``Any``: a number, a string or None."""
    origin = get_origin(hint)
    if hint is Any:
        return value is None or isinstance(value, (bool, int, float, str))
    if origin in (Union, types.UnionType):
        return any(_fits(value, h) for h in get_args(hint))
    if origin is tuple:
        inner = get_args(hint)
        if not isinstance(value, tuple):
            return False
        if len(inner) == 2 and inner[1] is Ellipsis:
            return all(_fits(v, inner[0]) for v in value)
        return len(value) == len(inner) and all(map(_fits, value, inner))
    if origin is not None:  # the mapping of FqnToConfig
        return isinstance(value, dict) and all(_fits(v, get_args(hint)[1]) for v in value.values())
    if hint in (bool, int):
        return type(value) is hint
    if hint is float:
        return type(value) in (int, float)
    return isinstance(value, type(None) if hint is None else hint)

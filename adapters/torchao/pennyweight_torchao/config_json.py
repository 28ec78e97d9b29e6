"""Configs as JSON in torchao's form: ``{"_type": class, "_version": n, "_data": {field: value}}``.

Dtypes and enum members are ``{"_type": name of the type, "_data": name of the member}``. Reading builds only known
types: the configs, granularities, layouts and enums of this package, types passed to :func:`register_config_type`, and
the configs, enums and dataclasses of the modules in ``ALLOWED_AO_MODULES`` that are already imported. Names in a file
are looked up in that table; they are never imported or looked up in a module.

Our configs are written with torchao's fields, so that torchao reads them. A tuple in your own config is
``{"_type": "tuple", ..}``.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
import warnings
from typing import Any

import torch

from pennyweight.core.formats import Format
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.planning import configs, granularity
from pennyweight.planning.configs import AOBaseConfig, FqnToConfig
from pennyweight.planning.name_patterns import check_keys

from . import enums, v0_8_configs, v0_8_layouts
from .algorithms import awq, gptq, smoothquant
from .configs import float8
from .mx import inference, training

__all__ = [
    "ALLOWED_AO_MODULES", "AOBaseConfig", "ConfigJSONEncoder", "VersionMismatchError", "config_from_dict",
    "config_to_dict", "register_config_type",
]  # fmt: skip

# Later entries win: those with torchao's name that also have the fields of its older releases.
_HOMES = (
    configs, granularity, enums, v0_8_layouts, v0_8_configs, float8, inference, training, awq, smoothquant, gptq,
)  # fmt: skip
_KINDS = (AOBaseConfig, enum.Enum, granularity.Granularity, v0_8_layouts.Layout, enums.Float8MMConfig)
_OURS = {v for home in _HOMES for v in vars(home).values() if isinstance(v, type) and issubclass(v, _KINDS)}
_SPECS: dict[str, Any] = {"QuantSpec": QuantSpec, "ActivationSpec": ActivationSpec}
_BUILT_IN: dict[str, Any] = dict(_SPECS)
for _home in _HOMES:
    _BUILT_IN.update(
        {name: v for name, v in vars(_home).items() if isinstance(v, type) and v in _OURS - {AOBaseConfig}}
    )
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_REGISTERED: dict[str, type] = {}
ALLOWED_AO_MODULES = {home.__name__ for home in _HOMES}

# Fields that are a string here and an enum member in torchao, by the name of the class.
# Float8DynamicActivationInt4WeightConfig has a string there too.
_INT4 = {
    "int4_packing_format": enums.Int4PackingFormat,
    "int4_choose_qparams_algorithm": enums.Int4ChooseQParamsAlgorithm,
}
_INTX = {
    "intx_packing_format": enums.IntxPackingFormat,
    "intx_choose_qparams_algorithm": enums.IntxChooseQParamsAlgorithm,
}
_MX = {"kernel_preference": enums.KernelPreference, "scaling_mode": enums.ScaleCalculationMode}
_ENUM_FIELDS: dict[str, dict[str, Any]] = {
    "Float8DynamicActivationFloat8WeightConfig": {
        "packing_format": enums.Float8PackingFormat, "kernel_preference": enums.KernelPreference,
    },
    "Int4WeightOnlyConfig": _INT4,
    "Int8DynamicActivationIntxWeightConfig": _INTX,
    "IntxWeightOnlyConfig": _INTX,
    "MXDynamicActivationMXWeightConfig": _MX,
    "MXWeightOnlyConfig": _MX,
    "PrototypeInt4WeightOnlyConfig": _INT4,
}  # fmt: skip

# torchao fields that ours lack, and their neutral value.
_MEANINGLESS = {"alg_id": 0}
# Fields of ours that some torchao release lacks and would reject: not written at this value.
_UNWRITTEN = {
    ("Float8DynamicActivationInt4WeightConfig", "group_size", 128),
    ("SmoothQuantConfig", "act_scales", None),
    ("SmoothQuantConfig", "set_inductor_config", True),
    ("SmoothQuantConfig", "smoothing_factor", None),
    ("SmoothQuantConfig", "wei_scales", None),
    ("Int4WeightOnlyConfig", "layout", None),
    ("Int4WeightOnlyConfig", "preserve_zero", None),
    ("Int4WeightOnlyConfig", "use_hqq", False),
    ("Int4WeightOnlyConfig", "zero_point_domain", None),
    ("Int4DynamicActivationInt4WeightConfig", "layout", None),
    ("Int8DynamicActivationInt4WeightConfig", "act_group_size", None),
    ("Int8DynamicActivationInt4WeightConfig", "layout", None),
    ("Int8DynamicActivationInt8WeightConfig", "act_group_size", None),
    ("Int8DynamicActivationInt8WeightConfig", "layout", None),
    ("Int8DynamicActivationIntxWeightConfig", "act_group_size", None),
    ("Int8DynamicActivationIntxWeightConfig", "layout", None),
    ("IntxWeightOnlyConfig", "layout", None),
    ("NVFP4DynamicActivationNVFP4WeightConfig", "act_scale", None),
    ("PrototypeInt4WeightOnlyConfig", "int4_packing_format", "plain"),
    ("PrototypeInt4WeightOnlyConfig", "int4_tile_packed_ntile", 8),
}


class VersionMismatchError(ValueError):
    """A config was stored with a version that this release cannot read."""

    def __init__(self, type_path: str, stored_version: Any, current_version: int) -> None:
        self.type_path, self.stored_version, self.current_version = type_path, stored_version, current_version
        super().__init__(
            f"Version mismatch for {type_path}: stored version {stored_version} != current version {current_version}"
        )


def register_config_type(cls: type) -> type:
    """Class decorator: allows :func:`config_from_dict` to build this config, enum or dataclass, by class name."""
    _REGISTERED[cls.__name__] = cls
    return cls


# -- writing -----------------------------------------------------------------------------------------------------------


class ConfigJSONEncoder(json.JSONEncoder):
    """``json.dumps(config, cls=ConfigJSONEncoder)``. Raises TypeError naming a field that is not JSON serializable."""

    def default(self, o: Any) -> Any:
        return _encode(o, type(o).__name__)

    def encode_value(self, value: Any) -> Any:
        return _encode(value, type(value).__name__)


def config_to_dict(config: AOBaseConfig) -> dict[str, Any]:
    """The config as plain dicts, lists, strings and numbers. Raises TypeError for anything but a config."""
    if not isinstance(config, AOBaseConfig):
        raise TypeError(f"expected a config, an instance of AOBaseConfig, got {type(config).__name__}")
    return _encode(config, type(config).__name__)


def _encode(value: Any, where: str) -> Any:
    """JSON form of a value; ``where`` names it in error messages."""
    if isinstance(value, enum.Enum):
        return {"_type": type(value).__name__, "_data": value.name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return {"_type": "torch.dtype", "_data": str(value).removeprefix("torch.")}
    if isinstance(value, Format):
        return _encode(value.code_dtype if value.native_float else _DTYPES.get(value.name, value.name), where)
    if isinstance(value, tuple(_SPECS.values())):
        return {"_type": type(value).__name__, "_version": 1, "_data": value.to_dict()}
    if isinstance(value, AOBaseConfig) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return _encode_object(value, where)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        data = {name: _encode(v, f"{where}.{name}") for name, v in value._asdict().items()}
        return {"_type": type(value).__name__, "_version": getattr(value, "version", 1), "_data": data}
    if isinstance(value, tuple):
        return {"_type": "tuple", "_data": [_encode(v, where) for v in value]}
    if isinstance(value, list):
        return [_encode(v, where) for v in value]
    if isinstance(value, dict):
        return {name: _encode(v, f"{where}[{name!r}]") for name, v in value.items()}
    raise TypeError(
        f"{where}: Object of type {type(value).__name__} is not JSON serializable; use a number or a string"
    )


def _encode_object(o: Any, where: str) -> dict[str, Any]:
    cls = type(o)
    names = [f.name for f in dataclasses.fields(o)] if dataclasses.is_dataclass(o) else list(vars(o))
    data = {}
    for name in names:
        value = getattr(o, name)
        if name == "version" or name.startswith("_"):
            continue
        if cls in _OURS:
            plain = value is None or isinstance(value, (str, int))
            if plain and (cls.__name__, name, value) in _UNWRITTEN:
                continue
            if type(value) is tuple:
                value = list(value)  # as in torchao; our constructors convert it back to a tuple
            elif isinstance(value, str):
                value = _torchaos(cls, name, value)
        data[name] = _encode(value, f"{where}.{name}")
    return {"_type": cls.__name__, "_version": _version(o), "_data": data}


def _torchaos(cls: type, name: str, value: str) -> Any:
    """torchao's value for a string field of ours: a dtype or an enum member."""
    if name.endswith("dtype"):
        return _DTYPES.get(value, value)
    kind = _ENUM_FIELDS.get(cls.__name__, {}).get(name)
    return kind(value) if kind is not None and value in [member.value for member in kind] else value


def _has_version_field(cls: Any) -> bool:
    return dataclasses.is_dataclass(cls) and any(f.name == "version" for f in dataclasses.fields(cls))


def _version(owner: Any) -> int:
    """Of an instance, or the current version of a class: the field ``version``, else the older attribute
    ``VERSION``."""
    return owner.version if _has_version_field(owner) else getattr(owner, "VERSION", 1)


# -- reading -----------------------------------------------------------------------------------------------------------


def config_from_dict(data: dict[str, Any]) -> Any:
    """The config from the output of :func:`config_to_dict`.

    A version older than the current one is read with a warning. Raises TypeError for anything but a dict,
    VersionMismatchError (a ValueError) for an unsupported version, and ValueError naming an unknown type, field or
    value.
    """
    if not isinstance(data, dict):
        raise TypeError(f"expected a dict, got {type(data).__name__}")
    if not _is_tagged(data):
        raise ValueError(f"a config has '_type' and '_data', this dict has {sorted(map(str, data))}")
    return _decode(data, "config")


def _is_tagged(value: Any) -> bool:
    return isinstance(value, dict) and "_type" in value and "_data" in value


def _decode(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [_decode(v, where) for v in value]
    if not isinstance(value, dict):
        return value
    if not _is_tagged(value):
        return {name: _decode(v, f"{where}[{name!r}]") for name, v in value.items()}
    kind, data, version = value["_type"], value["_data"], value.get("_version", 1)
    if kind == "tuple" and isinstance(data, list):
        return tuple(_decode(v, where) for v in data)
    if kind == "torch.dtype":
        return _member(kind, _DTYPES, data)
    if not isinstance(kind, str):
        raise ValueError(f"{where}: _type must be the name of a type, got {kind!r}")
    cls = _known().get(kind)
    if cls is None:
        raise ValueError(
            f"{where}: Failed to find class {kind} in any of the allowed modules: "
            f"{', '.join(sorted(_allowed()))}; register your own type with register_config_type"
        )
    if issubclass(cls, enum.Enum):
        return _member(kind, cls.__members__, data)
    if not isinstance(data, dict):
        raise ValueError(f"{where}: the data of {kind} must be a dict of its fields, got {data!r}")
    if kind in _SPECS:
        return _SPECS[kind].from_dict(data)
    return _build(kind, cls, version, data)


def _member(kind: str, members: Any, name: Any) -> Any:
    if not isinstance(name, str) or name not in members:
        raise ValueError(f"{kind} has no member {name!r}; it has {', '.join(sorted(members))}")
    return members[name]


def _allowed() -> set[str]:
    """ALLOWED_AO_MODULES, here and on the virtual modules that serve it, where a user may have replaced the set."""
    served = (sys.modules.get(f"{package}.core.config") for package in (__package__, "torchao"))
    return ALLOWED_AO_MODULES.union(*(vars(m).get("ALLOWED_AO_MODULES", ()) for m in served if m is not None))


def _known() -> dict[str, Any]:
    """All types that may be built, by name."""
    known: dict[str, Any] = {}
    for module in sorted(_allowed() - {home.__name__ for home in _HOMES}):
        if module in sys.modules:
            known.update({name: v for name, v in vars(sys.modules[module]).items() if _may_be_built(v)})
    return known | _BUILT_IN | _REGISTERED


def _may_be_built(value: Any) -> bool:
    return (
        isinstance(value, type)
        and value is not AOBaseConfig
        and (issubclass(value, (AOBaseConfig, enum.Enum)) or dataclasses.is_dataclass(value))
    )


def _build(kind: str, cls: Any, version: Any, data: dict[str, Any]) -> Any:
    fields = (
        [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else getattr(cls, "_fields", data)
    )
    given: dict[str, Any] = {} if version == _version(cls) else _older(kind, cls, version)
    for name, value in data.items():
        if name not in fields:
            if cls in _OURS and name in _MEANINGLESS and value == _MEANINGLESS[name]:
                continue
            raise ValueError(f"{kind} has no field {name!r}, which has the value {value!r}; it has {', '.join(fields)}")
        given[name] = _decode(value, f"{kind}.{name}")
        if cls in _OURS and name in _ENUM_FIELDS.get(kind, {}) and isinstance(given[name], enum.Enum):
            given[name] = given[name].value
    try:
        if cls is FqnToConfig:
            check_keys({**(given.get("fqn_to_config") or {}), **(given.get("module_fqn_to_config") or {})})
        return cls(**given)
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        raise ValueError(f"{kind} cannot be made from {sorted(data)}: {error}") from error


def _older(kind: str, cls: Any, version: Any) -> dict[str, Any]:
    """Constructor arguments if the stored version is not the current one. Ours are read as the current version."""
    current = _version(cls)
    if not _has_version_field(cls) or type(version) is not int or not 1 <= version < current:
        raise VersionMismatchError(kind, version, current)
    warnings.warn(
        f"Stored version is not the same as current default version of the config: {kind} was stored as version "
        f"{version}, the current one is {current}" + ("; it is read as that" if cls in _OURS else ""),
        stacklevel=2,
    )
    return {} if cls in _OURS else {"version": version}

"""Configs as JSON, in torchao's form: ``{"_type": class, "_version": n, "_data": {field: value}}``.

Dtypes and members of enums are ``{"_type": name of the type, "_data": name of the member}``. Reading builds only what
is known beforehand: the configs and granularities of this package, what :func:`register_config_type` was given, and the
configs, enums and dataclasses of the modules in ``ALLOWED_AO_MODULES`` that are already imported. Names in a file are
looked up in that table, and never imported or asked of a module.

Ours are written with the fields that torchao has, so that it reads them; what its constructors fill in (the granularity
of float8 configs) is written as it was given. A tuple in a config of your own is ``{"_type": "tuple", "_data": [..]}``.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
import warnings
from typing import Any, NamedTuple

import torch

from ...core.formats import Format
from ...core.spec import ActivationSpec, QuantSpec
from ...models import configs, granularity
from ...models.configs import AOBaseConfig

__all__ = [
    "ALLOWED_AO_MODULES",
    "AOBaseConfig",
    "ConfigJSONEncoder",
    "Float8MMConfig",
    "VersionMismatchError",
    "config_from_dict",
    "config_to_dict",
    "register_config_type",
]

ALLOWED_AO_MODULES = {configs.__name__, granularity.__name__}
_REGISTERED: dict[str, type] = {}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_SPECS: dict[str, Any] = {"QuantSpec": QuantSpec, "ActivationSpec": ActivationSpec}


class Float8MMConfig(NamedTuple):
    """How torchao's GPU kernels multiply float8. Accepted by configs; it changes no number here."""

    emulate: bool = False
    use_fast_accum: bool = False
    pad_inner_dim: bool = False


# Enums whose members our configs hold as strings, the member's name in lower case.
_ENUMS = {
    "Float8PackingFormat": {"PLAIN", "SPARSE_2D_DATA_2D_METADATA", "SPARSE_1D_DATA_1D_METADATA", "OPAQUE"},
    "Int4ChooseQParamsAlgorithm": {"TINYGEMM", "HQQ"},
    "Int4PackingFormat": {"PLAIN", "PRESHUFFLED", "PLAIN_INT32", "TILE_PACKED_TO_4D", "OPAQUE", "MARLIN_SPARSE"},
    "IntxChooseQParamsAlgorithm": {"AFFINE", "HQQ_SCALE_ONLY"},
    "IntxPackingFormat": {
        "UNPACKED_TO_INT8", "OPAQUE_ATEN_KLEIDIAI", "OPAQUE_TORCHAO_AUTO", "OPAQUE_TORCHAO_KLEIDIAI",
        "OPAQUE_TORCHAO_LOWBIT",
    },
    "KernelPreference": {"AUTO", "TORCH", "MSLK", "FBGEMM", "EMULATED", "DEEPGEMM", "TRITON", "CUTEDSL"},
    "ScaleCalculationMode": {"FLOOR", "CEIL", "EVEN", "RCEIL"},
}  # fmt: skip

# The fields that are written as their members. Float8DynamicActivationInt4WeightConfig holds a string in torchao too.
_INT4 = {
    "int4_packing_format": "Int4PackingFormat",
    "int4_choose_qparams_algorithm": "Int4ChooseQParamsAlgorithm",
}
_INTX = {
    "intx_packing_format": "IntxPackingFormat",
    "intx_choose_qparams_algorithm": "IntxChooseQParamsAlgorithm",
}
_MX = {"kernel_preference": "KernelPreference", "scaling_mode": "ScaleCalculationMode"}
_FLOAT8 = {"packing_format": "Float8PackingFormat", "kernel_preference": "KernelPreference"}
_ENUM_FIELDS: dict[type, dict[str, str]] = {
    configs.Int4WeightOnlyConfig: _INT4,
    configs.IntxWeightOnlyConfig: _INTX,
    configs.Int8DynamicActivationIntxWeightConfig: _INTX,
    configs.Float8DynamicActivationFloat8WeightConfig: _FLOAT8,
    configs.MXDynamicActivationMXWeightConfig: _MX,
    configs.MXWeightOnlyConfig: _MX,
}

# Fields that ours lack, by what they may hold without meaning anything here (as JSON): layouts that say where the codes
# lie and not which, and what torchao 0.9 to 0.18 write by default. torchao reads ours without them.
_MEANINGLESS: dict[str, tuple[Any, ...]] = {
    "alg_id": (0,),
    "layout": (
        None, "CutlassInt4PackedLayout", "Int4CPULayout", "Int4XPULayout", "Int8DynamicActInt4WeightCPULayout",
        "PackedLinearInt8DynamicActivationIntxWeightLayout", "PlainLayout", "QDQLayout", "TensorCoreTiledLayout",
    ),
    "preserve_zero": (None, False),
    "use_hqq": (False,),
    "zero_point_domain": (None, "FLOAT", "NONE"),
}  # fmt: skip
# Fields that torchao lacks, which would refuse them: not written where they hold this.
_UNWRITTEN = {(configs.Float8DynamicActivationInt4WeightConfig, "group_size", 128)}
_OURS = {v for module in (configs, granularity) for v in vars(module).values() if isinstance(v, type)}


class VersionMismatchError(ValueError):
    """A config was stored in a version that this release cannot read."""

    def __init__(self, type_path: str, stored_version: Any, current_version: int) -> None:
        self.type_path, self.stored_version, self.current_version = type_path, stored_version, current_version
        super().__init__(
            f"Version mismatch for {type_path}: stored version {stored_version} != current version {current_version}"
        )


def register_config_type(cls: type) -> type:
    """Class decorator: :func:`config_from_dict` may build this config, enum or dataclass, by the name of its class."""
    _REGISTERED[cls.__name__] = cls
    return cls


# -- writing -----------------------------------------------------------------------------------------------------------


class ConfigJSONEncoder(json.JSONEncoder):
    """``json.dumps(config, cls=ConfigJSONEncoder)``. Raises TypeError naming the field that JSON has no form for."""

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
    """JSON form of a value; ``where`` names it in errors."""
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
        f"{where}: Object of type {type(value).__name__} is not JSON serializable; give a number or a string"
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
            if type(value) is tuple:
                value = list(value)  # as torchao has it; our constructors make it a tuple again
            elif isinstance(value, str):
                value = _torchaos(cls, name, value)
            elif isinstance(value, int) and (cls, name, value) in _UNWRITTEN:
                continue
        data[name] = _encode(value, f"{where}.{name}")
    return {"_type": cls.__name__, "_version": _version(o), "_data": data}


def _torchaos(cls: type, name: str, value: str) -> Any:
    """What torchao holds where our config holds a string: a dtype or a member of an enum, in its JSON form."""
    if name.endswith("dtype"):
        return _DTYPES.get(value, value)
    kind = _ENUM_FIELDS.get(cls, {}).get(name, "")
    return {"_type": kind, "_data": value.upper()} if value.upper() in _ENUMS.get(kind, ()) else value


def _has_version_field(cls: Any) -> bool:
    return dataclasses.is_dataclass(cls) and any(f.name == "version" for f in dataclasses.fields(cls))


def _version(owner: Any) -> int:
    """Of an instance, or the current one of a class: the field ``version``, else the older ``VERSION`` of the class."""
    return owner.version if _has_version_field(owner) else getattr(owner, "VERSION", 1)


# -- reading -----------------------------------------------------------------------------------------------------------


def config_from_dict(data: dict[str, Any]) -> Any:
    """The config that :func:`config_to_dict` made ``data`` of.

    A version older than the current one is read with a warning. Raises TypeError for anything but a dict,
    VersionMismatchError (a ValueError) for a version that cannot be read, and ValueError for a type, field or value
    that is not known, naming it.
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
    if cls is None and kind in _ENUMS:
        return _member(kind, {name: name.lower() for name in _ENUMS[kind]}, data)
    if cls is None:
        raise ValueError(
            f"{where}: Failed to find class {kind} in any of the allowed modules: "
            f"{', '.join(sorted(ALLOWED_AO_MODULES))}; a type of your own is made known by register_config_type"
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


def _known() -> dict[str, Any]:
    """Every type that may be built, by its name."""
    known: dict[str, Any] = {"Float8MMConfig": Float8MMConfig, **_SPECS}
    for module in sorted(ALLOWED_AO_MODULES):
        if module in sys.modules:
            known.update({name: v for name, v in vars(sys.modules[module]).items() if _may_be_built(v)})
    return known | _REGISTERED


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
        if cls in _OURS and _is_meaningless(name, value) and (name == "layout" or name not in fields):
            continue
        if name not in fields:
            raise ValueError(f"{kind} has no field {name!r}, which holds {value!r}; it has {', '.join(fields)}")
        given[name] = _decode(value, f"{kind}.{name}")
    try:
        return cls(**given)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{kind} cannot be made from {sorted(data)}: {error}") from error


def _older(kind: str, cls: Any, version: Any) -> dict[str, Any]:
    """What to construct with where the stored version is not the current one. Ours are read as the current one."""
    current = _version(cls)
    if not _has_version_field(cls) or type(version) is not int or not 1 <= version < current:
        raise VersionMismatchError(kind, version, current)
    warnings.warn(
        f"Stored version is not the same as current default version of the config: {kind} was stored as version "
        f"{version}, the current one is {current}" + ("; it is read as that" if cls in _OURS else ""),
        stacklevel=2,
    )
    return {} if cls in _OURS else {"version": version}


def _is_meaningless(name: str, value: Any) -> bool:
    if _is_tagged(value):
        value = value["_type" if name == "layout" else "_data"]
    return name in _MEANINGLESS and not isinstance(value, (dict, list)) and value in _MEANINGLESS[name]

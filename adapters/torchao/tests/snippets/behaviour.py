"""What is printed, compared and raised: enums, granularities, reprs, assignments, modules, errors."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import torch

from adapters.torchao.tests.snippets.table import mlp, raised, snippet


def _members(kind: Any) -> list[str]:
    return [f"{m.name} {m.value!r} {m} {m!r}" for m in kind]


@snippet()
def mapping_types() -> dict[str, Any]:
    from torchao.quantization import MappingType

    return {"members": _members(MappingType)}


@snippet()
def zero_point_domains() -> dict[str, Any]:
    from torchao.quantization import ZeroPointDomain

    return {"members": _members(ZeroPointDomain)}


@snippet()
def enums_of_strings() -> dict[str, Any]:
    from torchao.quantization.quantize_.common import PackingFormat
    from torchao.quantization.quantize_.workflows import Float8PackingFormat, Int4ChooseQParamsAlgorithm

    return {
        "packing": _members(PackingFormat),
        "float8": _members(Float8PackingFormat),
        "int4": _members(Int4ChooseQParamsAlgorithm),
        "equal": PackingFormat.PLAIN == "plain",
    }


@snippet()
def recipes_of_float8_training() -> dict[str, Any]:
    from torchao.float8.config import Float8LinearRecipeName, ScalingGranularity, ScalingType

    return {
        "recipes": _members(Float8LinearRecipeName),
        "types": _members(ScalingType),
        "sizes": _members(ScalingGranularity),
    }


@snippet()
def scale_modes() -> dict[str, Any]:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    return {"members": _members(ScaleCalculationMode)}


@snippet()
def granularities() -> dict[str, Any]:
    from torchao.quantization import PerAxis, PerBlock, PerGroup, PerRow, PerTensor, PerToken

    each = [PerTensor(), PerAxis(0), PerGroup(32), PerRow(), PerToken(), PerBlock([1, 128])]
    return {
        "reprs": [*map(repr, each[:-1])],
        "strings": [*map(str, each[:-1])],
        "equal": PerGroup(32) == PerGroup(32),
        "hashed": len({*each[:-1], PerRow()}),
        "frozen": raised(lambda: setattr(PerGroup(32), "group_size", 1)),
    }


def _reprs(*calls: str) -> dict[str, Any]:
    import torchao.quantization as q

    names = {n: getattr(q, n) for n in dir(q)} | {"torch": torch}
    return {call: repr(eval(call, names)) for call in calls}


@snippet()
def reprs_of_integer_configs() -> dict[str, Any]:
    return _reprs(
        "Int8WeightOnlyConfig()",
        "Int8WeightOnlyConfig(granularity=PerGroup(32))",
        "Int4WeightOnlyConfig(group_size=64)",
        "Int8DynamicActivationInt8WeightConfig()",
        "IntxWeightOnlyConfig(torch.int4, PerGroup(32))",
        "Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32), MappingType.ASYMMETRIC)",
        "FqnToConfig({'_default': Int8WeightOnlyConfig(), 'lm_head': None})",
    )


@snippet()
def reprs_of_float_configs() -> dict[str, Any]:
    return _reprs(
        "Float8WeightOnlyConfig()",
        "Float8WeightOnlyConfig(torch.float8_e5m2)",
        "Float8DynamicActivationFloat8WeightConfig()",
        "Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())",
        "Float8DynamicActivationFloat8WeightConfig(granularity=[PerRow(), PerRow()])",
    )


@snippet()
def fields_are_assigned() -> dict[str, Any]:
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

    config = IntxWeightOnlyConfig(weight_dtype=torch.int4)
    config.granularity = PerGroup(32)
    eight = Int8WeightOnlyConfig()
    eight.set_inductor_config = False
    model = mlp()
    quantize_(model, config)
    return {
        "repr": repr(config),
        "codes": model[0].weight.qdata,
        "eight": repr(eight),
        "equal": eight == Int8WeightOnlyConfig(),
    }


@snippet()
def a_granularity_given_as_a_list() -> dict[str, Any]:
    from torchao.float8.inference import _normalize_granularity
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow

    config = Float8DynamicActivationFloat8WeightConfig(granularity=[PerRow(), PerRow()])
    return {
        "kept": repr(config.granularity),
        "again": [*map(repr, _normalize_granularity(config.granularity))],
        "one": [*map(repr, _normalize_granularity(None))],
    }


@snippet()
def wrong_arguments_raise() -> dict[str, Any]:
    from torchao.float8.inference import _normalize_granularity
    from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerRow, PerTensor

    return {
        "mixed": raised(lambda: _normalize_granularity([PerRow(), PerTensor()])),
        "argument": raised(lambda: Int8WeightOnlyConfig(no_such=1)),
        "dtype": raised(lambda: IntxWeightOnlyConfig(weight_dtype=torch.float32)) != "nothing",
        "both": raised(lambda: FqnToConfig({"a": None}, {"b": None})),
    }


@snippet()
def modules_have_files() -> dict[str, Any]:
    import torchao

    listed = {m.name for m in pkgutil.iter_modules(torchao.__path__)}
    return {
        "file": torchao.__file__.endswith("__init__.py"),
        "listed": sorted(listed & {"dtypes", "float8", "quantization", "utils"}),
        "source": inspect.getsourcefile(importlib.import_module("torchao.quantization")) is not None,
        "function": "def quantize_" in inspect.getsource(torchao.quantize_),
    }


@snippet()
def the_repr_of_a_layer_names_the_class() -> dict[str, Any]:
    from torchao.quantization import Float8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

    model = mlp()
    quantize_(model[0], Float8WeightOnlyConfig())
    quantize_(model[2], IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))
    return {
        "text": [repr(m).partition("weight=")[2].partition("(")[0] for m in (model[0], model[2])],
        "head": repr(model[2]).partition(", weight=")[0],
        "weight": [repr(m.weight.data).partition("(")[0] for m in (model[0], model[2])],
    }


@snippet(differs={"name": "one class: type(w) is AffineQuantizedTensor"})
def the_name_of_a_weights_class() -> dict[str, Any]:
    from torchao.quantization import Int8Tensor, Int8WeightOnlyConfig, quantize_

    model = mlp()
    quantize_(model, Int8WeightOnlyConfig())
    return {"name": type(model[0].weight).__name__, "is": isinstance(model[0].weight, Int8Tensor)}


@snippet()
def versions_and_helpers() -> dict[str, Any]:
    import torchao
    from torchao.utils import ceil_div, find_multiple, round_up, torch_version_at_least

    return {
        "version": torchao.__version__.split("+")[0],
        "divided": ceil_div(7, 2),
        "up": round_up(7, 4),
        "multiple": find_multiple(7, 4),
        "least": [torch_version_at_least("2.5.0"), torch_version_at_least("9.0.0")],
    }


@snippet()
def names_of_the_root() -> dict[str, Any]:
    import torchao

    return {
        "callable": [
            callable(torchao.quantize_),
            callable(torchao.autoquant) if hasattr(torchao, "autoquant") else True,
        ],
        "modules": [torchao.quantization.__name__, torchao.dtypes.__name__, torchao.utils.__name__],
    }

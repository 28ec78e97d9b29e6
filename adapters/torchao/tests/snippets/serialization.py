"""State dicts, torch.save, safetensors files, configs as JSON, copies, the meta device."""

from __future__ import annotations

import copy
import io
import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adapters.torchao.tests.snippets.table import Y, inputs, mlp, raised, snippet


def _eight() -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = mlp()
    quantize_(model, Int8WeightOnlyConfig())
    return model


@snippet()
def keys_of_a_state_dict() -> dict[str, Any]:
    state = _eight().state_dict()
    return {
        "keys": list(state),
        "shapes": [list(t.shape) for t in state.values()],
        "dtypes": [t.dtype for t in state.values()],
    }


@snippet(approx=Y)
def a_state_dict_is_assigned() -> dict[str, Any]:
    model = _eight()
    fresh = mlp()
    nn.init.zeros_(fresh[0].bias)
    result = fresh.load_state_dict(model.state_dict(), assign=True)
    return {"missing": result.missing_keys, "y": fresh(inputs()), "same": torch.equal(fresh(inputs()), model(inputs()))}


@snippet(approx=Y)
def torch_save_and_load() -> dict[str, Any]:
    model, file = _eight(), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    with torch.device("meta"):
        fresh = mlp_on_meta()
    fresh.load_state_dict(state, assign=True)
    return {"keys": list(state), "y": fresh(inputs()), "codes": fresh[0].weight.qdata}


def mlp_on_meta() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16, bias=False)).eval()


@snippet(approx=Y)
def a_meta_model_is_quantized_and_loaded() -> dict[str, Any]:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    state = _eight().state_dict()
    with torch.device("meta"):
        fresh = mlp_on_meta()
    quantize_(fresh, Int8WeightOnlyConfig())
    meta = fresh[0].weight.is_meta
    fresh.load_state_dict(state, assign=True)
    return {"meta": meta, "y": fresh(inputs()), "codes": fresh[0].weight.qdata}


@snippet(approx={"y": 1e-5})
def a_meta_model_with_dynamic_inputs() -> dict[str, Any]:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_

    config = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    model = mlp()
    quantize_(model, config)
    with torch.device("meta"):
        fresh = mlp_on_meta()
    quantize_(fresh, config)
    fresh.load_state_dict(model.state_dict(), assign=True)
    return {"y": fresh(inputs())}


@snippet(approx=Y)
def a_deep_copy() -> dict[str, Any]:
    model = _eight()
    other = copy.deepcopy(model)
    return {"y": other(inputs()), "shared": other[0].weight is model[0].weight}


@snippet(approx=Y)
def a_pickled_model() -> dict[str, Any]:
    other = pickle.loads(pickle.dumps(_eight()))
    return {"y": other(inputs()), "codes": other[0].weight.qdata}


@snippet(approx=Y)
def a_whole_model_through_torch_save() -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(_eight(), file)
    file.seek(0)
    return {"y": torch.load(file, weights_only=False)(inputs())}


@snippet(approx=Y)
def tensors_in_a_safetensors_file() -> dict[str, Any]:
    from safetensors import safe_open
    from safetensors.torch import save_file
    from torchao.prototype.safetensors.safetensors_support import (
        flatten_tensor_state_dict,
        unflatten_tensor_state_dict,
    )

    model = _eight()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.safetensors")
        tensors, metadata = flatten_tensor_state_dict(model.state_dict())
        save_file(tensors, path, metadata=metadata)
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            result = unflatten_tensor_state_dict(found, file.metadata())
    state = result[0] if isinstance(result, tuple) else result
    fresh = mlp()
    fresh.load_state_dict(state, assign=True)
    return {"names": sorted(tensors), "keys": sorted(state), "y": fresh(inputs()), "metadata": sorted(metadata)}


@snippet()
def a_file_is_known_by_its_metadata() -> dict[str, Any]:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.prototype.safetensors.safetensors_utils import is_metadata_torchao

    _, metadata = flatten_tensor_state_dict(_eight().state_dict())
    return {"ours": is_metadata_torchao(metadata), "other": is_metadata_torchao({"format": "pt"})}


def _config_json(make: Any) -> dict[str, Any]:
    from torchao.core.config import config_from_dict, config_to_dict

    config = make()
    data = config_to_dict(config)
    again = config_from_dict(json.loads(json.dumps(data)))
    return {"json": json.dumps(data, sort_keys=True), "equal": again == config, "class": type(again).__name__}


@snippet()
def an_int8_config_as_json() -> dict[str, Any]:
    from torchao.quantization import Int8WeightOnlyConfig

    return _config_json(Int8WeightOnlyConfig)


@snippet()
def a_dynamic_config_as_json() -> dict[str, Any]:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    return _config_json(Int8DynamicActivationInt8WeightConfig)


@snippet()
def an_intx_config_as_json() -> dict[str, Any]:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup

    return _config_json(lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))


@snippet()
def a_float8_config_as_json() -> dict[str, Any]:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow

    return _config_json(lambda: Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))


@snippet()
def a_table_of_configs_as_json() -> dict[str, Any]:
    from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig

    return _config_json(lambda: FqnToConfig({"_default": Int8WeightOnlyConfig(), "lm_head": None}))


@snippet()
def unknown_configs_are_refused() -> dict[str, Any]:
    from torchao.core.config import config_from_dict

    return {
        "type": raised(lambda: config_from_dict({"_type": "NoSuchConfig", "_version": 1, "_data": {}})),
        "field": raised(lambda: config_from_dict({"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {"a": 1}}))
        != "nothing",
        "kind": raised(lambda: config_from_dict("Int8WeightOnlyConfig")),
    }

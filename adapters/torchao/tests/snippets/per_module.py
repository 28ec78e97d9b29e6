"""Which layers: filters, names, patterns, parameters."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from adapters.torchao.tests.snippets.table import Y, filled, inputs, mlp, raised, snippet


def _net() -> nn.Module:
    return filled(
        nn.Sequential(
            OrderedDict(
                embed=nn.Embedding(10, 64),
                layers=nn.ModuleDict({"q": nn.Linear(64, 64), "k": nn.Linear(64, 32), "down": nn.Linear(64, 64)}),
                head=nn.Linear(64, 10, bias=False),
            )
        )
    )


def _quantized(model: nn.Module) -> list[str]:
    return [
        name
        for name, m in model.named_modules()
        if isinstance(m, (nn.Linear, nn.Embedding)) and type(m.weight.data) is not torch.Tensor
    ]


@snippet()
def a_filter() -> dict[str, Any]:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = _net()
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda m, name: isinstance(m, nn.Linear) and "layers" in name)
    return {"quantized": _quantized(model)}


@snippet()
def a_filter_by_position_and_a_device() -> dict[str, Any]:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = _net()
    quantize_(model, Int8WeightOnlyConfig(), lambda m, name: name.endswith("q"), "cpu")
    return {"quantized": _quantized(model)}


@snippet()
def the_default_is_linear_layers() -> dict[str, Any]:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = _net()
    quantize_(model, Int8WeightOnlyConfig())
    return {"quantized": _quantized(model)}


@snippet()
def a_filter_that_matches_nothing() -> dict[str, Any]:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = _net()
    result = quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda m, name: False)
    return {"quantized": _quantized(model), "result": result}


@snippet()
def the_default_filter_itself() -> dict[str, Any]:
    from torchao.quantization.quant_api import _is_linear

    return {"is": [_is_linear(m, "name") for m in _net().modules()]}


@snippet(approx=Y)
def names_to_configs() -> dict[str, Any]:
    from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

    model = mlp()
    four = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
    quantize_(model, FqnToConfig({"0": four, "2": Int8WeightOnlyConfig()}), filter_fn=None)
    return {"four": model[0].weight.qdata, "eight": model[2].weight.qdata, "y": model(inputs())}


@snippet()
def a_default_and_an_exception() -> dict[str, Any]:
    from torchao.quantization import Int8WeightOnlyConfig, ModuleFqnToConfig, quantize_

    model = _net()
    quantize_(model, ModuleFqnToConfig({"_default": Int8WeightOnlyConfig(), "head": None}), filter_fn=None)
    return {"quantized": _quantized(model)}


@snippet()
def patterns() -> dict[str, Any]:
    from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig, quantize_

    model = _net()
    quantize_(model, FqnToConfig({r"re:layers\.(q|down)": Int8WeightOnlyConfig()}), filter_fn=None)
    return {"quantized": _quantized(model)}


@snippet()
def a_pattern_matches_the_whole_name() -> dict[str, Any]:
    from torchao.quantization import FqnToConfig, fqn_matches_fqn_config

    config = FqnToConfig({r"re:layers\..*q": None, "head": None})
    return {"is": [fqn_matches_fqn_config(n, config) for n in ("layers.q", "layers.q.x", "head", "x.head")]}


@snippet()
def the_exact_name_comes_before_a_pattern() -> dict[str, Any]:
    from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

    model = _net()
    four = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
    quantize_(model, FqnToConfig({r"re:layers\.[a-z]+": Int8WeightOnlyConfig(), "layers.k": four}), filter_fn=None)
    return {"quantized": _quantized(model), "q": model.layers["q"].weight.qdata, "k": model.layers["k"].weight.qdata}


@snippet()
def a_parameter_by_its_name() -> dict[str, Any]:
    from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig, quantize_

    model = _net()
    quantize_(model, FqnToConfig({"layers.q.weight": Int8WeightOnlyConfig()}), filter_fn=None)
    return {"quantized": _quantized(model), "codes": model.layers["q"].weight.qdata}


@snippet()
def an_embedding_and_layers_in_two_calls() -> dict[str, Any]:
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerAxis, quantize_

    model = _net()
    quantize_(
        model,
        IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)),
        filter_fn=lambda m, name: isinstance(m, nn.Embedding),
    )
    quantize_(model, Int8WeightOnlyConfig())
    return {"quantized": _quantized(model), "embedding": model.embed(torch.tensor([0, 9]))}


@snippet()
def a_handler_of_ones_own() -> dict[str, Any]:
    from torchao.core.config import AOBaseConfig
    from torchao.quantization import quantize_
    from torchao.quantization.transform_module import register_quantize_module_handler

    class Halve(AOBaseConfig):
        factor = 0.5

    @register_quantize_module_handler(Halve)
    def halve(module: nn.Module, config: Halve) -> nn.Module:
        module.weight = nn.Parameter(module.weight * config.factor, requires_grad=False)
        return module

    model = mlp()
    quantize_(model, Halve())
    return {"weight": model[0].weight, "y": model(inputs()).shape}


@snippet()
def no_config_is_an_error() -> dict[str, Any]:
    from torchao.quantization import quantize_

    return {
        "none": raised(lambda: quantize_(mlp(), None)) != "nothing",
        "number": raised(lambda: quantize_(mlp(), 3)) != "nothing",
    }


@snippet()
def a_submodule_alone() -> dict[str, Any]:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = _net()
    quantize_(model.layers, Int8WeightOnlyConfig())
    return {"quantized": _quantized(model)}


@snippet("0.12")
def a_function_over_modules() -> dict[str, Any]:
    from torchao.quantization.quant_api import _replace_with_custom_fn_if_matches_filter

    model = mlp()
    _replace_with_custom_fn_if_matches_filter(model, lambda m: nn.Identity(), lambda m, name: isinstance(m, nn.ReLU))
    return {"classes": [type(m).__name__ for m in model]}

"""Small models in graph mode, for the tests of this folder."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pennyweight_torchao import graph_mode as gm


def x86(**config: bool) -> gm.X86InductorQuantizer:
    return gm.X86InductorQuantizer().set_global(gm.get_default_x86_inductor_quantization_config(**config))


def xnnpack(**config: bool) -> gm.XNNPACKQuantizer:
    return gm.XNNPACKQuantizer().set_global(gm.get_symmetric_quantization_config(**config))


def exported(model: nn.Module, *inputs: Tensor, free: bool = False) -> GraphModule:
    """The graph of a copy of the model; ``free``: any number of samples."""
    shapes = tuple({0: torch.export.Dim("samples")} for _ in inputs) if free else None
    graph: Any = torch.export.export(copy.deepcopy(model), inputs, dynamic_shapes=shapes).module()
    return graph  # type: ignore[no-any-return]


def converted(model: nn.Module, quantizer: Any, *inputs: Tensor, free: bool = False, **how: bool) -> GraphModule:
    """Exported, calibrated on the inputs and a larger copy, converted."""
    prepared = gm.prepare(exported(model.eval(), *inputs, free=free), quantizer)
    for factor in (1.0, 1.2):
        prepared(*(factor * x for x in inputs))
    return gm.convert(prepared, **how)


def targets(graph: GraphModule) -> list[str]:
    """Names of the operators that a graph calls."""
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]

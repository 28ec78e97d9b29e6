"""Base classes of tests of quantizers: prepare, convert, and count the operators of the graph."""

from __future__ import annotations

import copy
import unittest
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ....graph_mode.convert_graph import convert
from ....graph_mode.inductor_configs import get_default_x86_inductor_quantization_config
from ....graph_mode.inductor_quantizers import X86InductorQuantizer
from ....graph_mode.numeric_debugger import FROM_NODE_KEY, source_of
from ....graph_mode.partitions import bfs_trace_with_node_process
from ....graph_mode.prepare_graph import prepare, prepare_qat
from ....graph_mode.train_eval import move_exported_model_to_eval

__all__ = [
    "PT2ENumericDebuggerTestCase", "PT2EQuantizationTestCase", "_generate_ref_quantized_model",
    "check_torch_compiled_model", "get_default_x86_quantizer",
]  # fmt: skip


def _bases() -> tuple[Any, Any]:
    """torch's classes for tests of quantization, if its test dependencies are installed; else unittest's."""
    try:
        from torch.testing._internal.common_quantization import QuantizationTestCase
        from torch.testing._internal.common_utils import TestCase
    except ImportError:
        return unittest.TestCase, unittest.TestCase
    return QuantizationTestCase, TestCase


_Quantization, _Test = _bases()


class PT2EQuantizationTestCase(_Quantization):  # type: ignore[misc, valid-type]
    """A test of a quantizer."""

    def _test_quantizer(
        self, model: Any, example_inputs: tuple[Any, ...], quantizer: Any, expected_node_occurrence: dict[Any, int],
        expected_node_list: list[Any] | None = None, check_against_fx_quant: bool = False,
        fx_qconfig_mapping: Any = None, export_with_dynamic_shape: bool = False, is_qat: bool = False,
        is_debug_mode: bool = False, training_ir_node_occurrence: dict[Any, int] | None = None,
    ) -> GraphModule:  # fmt: skip
        """Export, prepare, run, convert; the graph must have so many calls of each operator, and these in this order.

        check_against_fx_quant: the output must equal that of torch's FX quantization with ``fx_qconfig_mapping``.
        """
        torch._dynamo.reset()
        eager = model.eval()
        free = tuple({0: torch.export.Dim("dim")} if i == 0 else None for i in range(len(example_inputs)))
        shapes = free if export_with_dynamic_shape else None
        m: Any = torch.export.export(copy.deepcopy(eager), example_inputs, dynamic_shapes=shapes, strict=True).module()
        m = prepare_qat(m, quantizer) if is_qat else prepare(m, quantizer)
        if is_debug_mode:
            print("prepared model:", m)
        m(*example_inputs)
        m = convert(m)
        if is_debug_mode:
            print("quantized model", m)
        found = [node.target for node in m.graph.nodes if node.op == "call_function"]
        for target, n in expected_node_occurrence.items():
            assert found.count(target) == n, f"calls of {target}: {found.count(target)}, not {n}, in\n{m.graph}"
        rest = iter(found)
        for target in expected_node_list or ():
            assert target in rest, f"{target} is missing, or not after the ones before it, in\n{m.graph}"
        if check_against_fx_quant:
            torch.testing.assert_close(m(*example_inputs), _fx_output(eager, example_inputs, fx_qconfig_mapping))
        return m  # type: ignore[no-any-return]


def _fx_output(model: Any, inputs: tuple[Any, ...], mapping: Any) -> Any:
    """The output of torch's FX graph mode for ExecuTorch."""
    from torch.ao.quantization.backend_config import get_executorch_backend_config
    from torch.ao.quantization.quantize_fx import _convert_to_reference_decomposed_fx, prepare_fx

    config = get_executorch_backend_config()
    fx: Any = prepare_fx(copy.deepcopy(model), mapping, inputs, backend_config=config)
    fx(*inputs)
    return _convert_to_reference_decomposed_fx(fx, backend_config=config)(*inputs)


class PT2ENumericDebuggerTestCase(_Test):  # type: ignore[misc, valid-type]
    """A test of the nodes that nodes come from."""

    def _assert_each_node_has_from_node_source(self, model: Any) -> None:
        def check(node: Node) -> None:
            if node.op not in ("placeholder", "output") and node.meta.get(FROM_NODE_KEY) is not None:
                assert node.meta[FROM_NODE_KEY], f"Node {node} doesn't have from_node info"

        bfs_trace_with_node_process(model, check)

    def _extract_from_node_source(self, model: Any) -> dict[str, Any]:
        """Name of a node -> name and graph of the node that it comes from."""
        found: dict[str, Any] = {}

        def add(node: Node) -> None:
            source = source_of(node)
            if source is not None:
                found[str(node)] = (source.name, source.graph_id)

        bfs_trace_with_node_process(model, add)
        return found

    def _extract_from_node_source_with_prev_decomp_op(self, model: Any) -> dict[str, Any]:
        """Modules of a node, as text -> the node that it comes from. Nodes of one module must come from one node."""
        found: dict[str, Any] = {}

        def add(node: Node) -> None:
            if node.meta.get(FROM_NODE_KEY) is not None:
                key, source = str(node.meta.get("nn_module_stack")), source_of(node)
                assert found.setdefault(key, source) == source, f"Node {node} comes from {source}, not {found[key]}"

        bfs_trace_with_node_process(model, add)
        return found

    def assertNodeSourcesEqual(self, node_source_1: Any, node_source_2: Any) -> None:
        """Both are the same node of the same graph."""
        assert (node_source_1.name, node_source_1.graph_id) == (node_source_2.name, node_source_2.graph_id)


def get_default_x86_quantizer(is_qat: bool, is_dynamic: bool) -> X86InductorQuantizer:
    """A quantizer with the default config."""
    return X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config(is_qat, is_dynamic))


def _generate_ref_quantized_model(
    mod: Any, inputs: tuple[Any, ...], is_qat: bool = False, is_dynamic: bool = False, quantizer: Any = None
) -> GraphModule:
    """Export, prepare, run once, convert."""
    with torch.set_grad_enabled(is_qat and torch.is_grad_enabled()):
        exported: Any = torch.export.export(mod, inputs, strict=True).module()
        quantizer = quantizer or get_default_x86_quantizer(is_qat, is_dynamic)
        prepared = prepare_qat(exported, quantizer) if is_qat else prepare(exported, quantizer)
        prepared(*inputs)
        move_exported_model_to_eval(prepared)
        return convert(prepared)


def check_torch_compiled_model(
    model: Any, example_inputs: tuple[Tensor, ...], kwargs: dict[str, Any] | None = None, *, aoti: bool = False,
    atol: float | None = None, rtol: float | None = None, fullgraph: bool = True, inductor_configs: Any = None,
    dynamic_shapes: Any = None,
) -> None:  # fmt: skip
    """Raise AssertionError unless the compiled model, ahead of time with ``aoti``, gives the output of the model."""
    torch._dynamo.reset()
    kwargs = kwargs or {}
    expected = model(*(x.clone() for x in example_inputs), **kwargs)
    with torch.no_grad():
        if aoti:
            program = torch.export.export(model, example_inputs, dynamic_shapes=dynamic_shapes, strict=True)
            package = torch._inductor.aoti_compile_and_package(program, inductor_configs=inductor_configs)
            compiled: Any = torch._inductor.aoti_load_package(package)
        else:
            compiled = torch.compile(model, fullgraph=fullgraph)
        actual = compiled(*example_inputs, **kwargs)
    torch.testing.assert_close(expected, actual, atol=atol, rtol=rtol)

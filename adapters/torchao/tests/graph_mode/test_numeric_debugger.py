"""Nodes of a converted graph compared with those of the exported one."""

from typing import Any

import pytest
import torch
from torch import nn

from pennyweight_torchao import graph_mode as gm
from pennyweight_torchao.graph_mode import numeric_debugger

from .graphs import x86


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own, of a deep copy of its graphs
def test_layers_are_compared() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(5, 8)
    program = torch.export.export(model, (x,))
    numeric_debugger.generate_numeric_debug_handle(program)
    handles = [n.meta["custom"]["numeric_debug_handle"] for n in program.graph.nodes if n.op == "call_function"]
    assert len(set(handles)) == len(handles) > 0
    graph: Any = program.module()
    reference = gm.prepare_for_propagation_comparison(graph)
    prepared = gm.prepare(graph, x86())
    prepared(x)
    logged = gm.prepare_for_propagation_comparison(gm.convert(prepared))
    reference(x), logged(x)
    summaries = gm.compare_results(gm.extract_results_from_loggers(reference), gm.extract_results_from_loggers(logged))
    by_name = {s.ref_node_name: s for s in summaries.values()}
    assert {"linear", "relu", "linear_1"} <= by_name.keys()
    for summary in summaries.values():
        (result,) = summary.results
        torch.testing.assert_close(result.mse_loss, (result.actual - result.ref).square().mean())
    assert by_name["linear_1"].results[0].sqnr > 20
    with pytest.raises(ValueError, match="different shapes"):
        numeric_debugger.QuantizationComparisonResult(torch.ones(2), torch.ones(3))
    with pytest.raises(ValueError, match=r"torch\.export\.export first"):
        numeric_debugger.generate_numeric_debug_handle(model)  # type: ignore[arg-type]

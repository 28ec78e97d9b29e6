"""Nodes of a converted graph compared with those of the exported one; patterns in graphs."""

from typing import Any

import pytest
import torch
from torch import nn

from pennyweight_torchao import graph_mode as gm
from pennyweight_torchao.graph_mode import numeric_debugger, partitions

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


def test_sequences_of_modules() -> None:
    model, x = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Conv2d(1, 1, 1)), torch.ones(1, 1, 2, 2)
    graph: Any = torch.export.export(model, (x,), strict=True).module()
    found = partitions.find_sequential_partitions(graph, [nn.Conv2d, nn.ReLU])
    assert [[p.output_nodes[0].name for p in pair] for pair in found] == [["conv2d", "relu"]]
    with pytest.raises(ValueError, match="must be unique"):
        partitions.find_sequential_partitions(graph, [nn.ReLU, torch.nn.functional.relu])
    names: list[str] = []
    partitions.bfs_trace_with_node_process(graph, lambda n: names.append(n.name))
    assert "conv2d_1" in names
    before = partitions.get_equivalent_types()
    try:
        partitions.update_equivalent_types_dict([{nn.Conv2d, nn.ReLU}])
        assert partitions.get_equivalent_types() == [{nn.Conv2d, nn.ReLU}]
    finally:
        partitions.update_equivalent_types_dict(before)

"""docs/ops.md says what every operator of torch does with a quantized operand, and says it truly."""

import difflib
import os

import pytest
import torch

from tests.every.ops_table import DOC, INCOMPARABLE, Row, entries, full_name, page, reordered, sweep, sweep_all

# Refusing is right where the operator asks for what a quantized tensor has not.
REFUSALS = {
    "as_strided": "no strided storage",
    "as_strided.partial_views": "no strided storage",
    "resize_": "cannot be resized",
}
# What has a way of its own with axes, parts or products, and so must mind that the last axis lies in another order.
NATIVE = [
    "__getitem__", "__rmatmul__", "add", "addbmm", "addmm", "addmv", "addr", "as_strided_copy",
    "as_strided_scatter", "atleast_2d", "baddbmm", "bmm", "cat", "chunk", "clone", "contiguous", "copysign",
    "diagonal", "dot", "einsum", "expand", "expand_as", "fill", "flatten", "flip", "gather", "index_add",
    "index_copy", "index_fill", "index_put", "index_select", "linalg.multi_dot", "masked_fill", "masked_select",
    "matmul", "mm", "movedim", "mul", "mv", "narrow", "nn.functional.bilinear", "nn.functional.conv1d",
    "nn.functional.conv2d", "nn.functional.embedding", "nn.functional.embedding_bag", "nn.functional.linear",
    "permute", "ravel", "repeat", "reshape", "roll", "rot90", "scatter", "select", "select_scatter", "slice",
    "slice_scatter", "split", "split_with_sizes", "squeeze", "squeeze.multiple", "stack", "sum", "t", "take",
    "tensor_split", "tile", "to", "transpose", "tril", "unbind", "unflatten", "unfold", "unsqueeze", "view",
    "view_as", "where", "zero_",
]  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return sweep_all(workers=min(4, os.cpu_count() or 1))


@pytest.mark.exhaustive
def test_every_operator_gives_the_result_of_the_dequantized_operand(rows: list[Row]) -> None:
    assert {row.name: row.wrong for row in rows if row.wrong} == {}
    assert {row.name for row in rows} == {full_name(op) for op in entries()}
    assert sum(row.native + row.counted + row.fallback for row in rows) > 1000


@pytest.mark.exhaustive
def test_refusals_are_meant(rows: list[Row]) -> None:
    refused = {row.name: row.reason for row in rows if row.refused}
    assert refused.keys() == REFUSALS.keys()
    for name, reason in refused.items():
        assert REFUSALS[name] in reason


@pytest.mark.exhaustive
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the page is about the operators of torch 2.13")
def test_the_page_is_current(rows: list[Row]) -> None:
    old, new = DOC.read_text(encoding="utf-8"), page(rows)
    changes = "\n".join(difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0))
    assert old == new, f"run python -m tests.every.ops_table\n{changes}"


def test_what_cannot_be_compared_is_still_there() -> None:
    assert INCOMPARABLE.keys() <= {full_name(op) for op in entries()}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # of torch's own samples, as in the processes of the sweep
def test_a_last_axis_in_another_order() -> None:
    rows = [sweep(op, reordered) for op in entries() if full_name(op) in NATIVE]
    assert {row.name: row.wrong for row in rows if row.wrong} == {}
    assert sum(row.native + row.counted for row in rows) > 100
    assert len(rows) > 70

"""The benchmark of one layer: who is measured, the gate, and the arithmetic of its report. No times are asserted."""

import dataclasses
import importlib.util
import json

import pytest
import torch

from benchmarks import linear, measure, report
from benchmarks.arithmetic import geometric_mean, limit_seconds, rows_of, steady, summarize
from benchmarks.peers import BASELINE, FAMILIES
from benchmarks.peers.base import Competitor, Run, eager, gate, relative_error, visit
from benchmarks.peers.pool import Pool
from benchmarks.peers.worker import Worker

N, K = 64, 128


@pytest.fixture
def case(tmp_path):
    path = tmp_path / "case.pt"
    measure.write_case(path, N, K, 16)
    return str(path)


def test_every_family_names_a_file_and_what_to_install():
    for family in FAMILIES.values():
        assert importlib.util.find_spec(family.module) is not None
        assert not family.needs or family.install


def test_a_missing_package_is_a_sentence():
    family = dataclasses.replace(FAMILIES["torchao"], needs=("no_such_package",))
    assert "no_such_package not installed; pip install torchao" in family.missing()


@pytest.mark.exhaustive
@pytest.mark.parametrize("m", [1, 5, 16])
@pytest.mark.parametrize("family", ["torch", "pennyweight"])
def test_competitors_pass_their_gate(case, family, m, monkeypatch):
    monkeypatch.setattr("benchmarks.peers.base.ROTATED_BYTES", 10_000)  # a few copies
    worker = Worker(family, 1)
    worker.load(case)
    passed = 0
    with torch.no_grad():
        for name, c in worker.competitors.items():
            if worker.accepts(name, m) is not True or "quantize_dynamic" in name:
                continue  # its warnings of deprecation are not ours
            worker.build(name)
            assert worker.check(name, m) <= c.bound, name
            took, steps = worker.visit(name, 0)
            assert took > 0
            assert steps >= 1
            passed += 1
    assert passed >= 4


def test_the_gate_looks_at_the_last_copy_and_at_every_row():
    weight, x = torch.randn(8, 16), torch.randn(4, 16)
    reference = x.double() @ weight.double().t()
    good, bad = (lambda x: x @ weight.t()), (lambda x: 2 * (x @ weight.t()))
    assert gate(eager([good, good], torch.float32)(x), [0, 1, 2, 3], reference) < 1e-6
    assert gate(eager([good, bad], torch.float32)(x), [0, 1, 2, 3], reference) == pytest.approx(1)
    rolled = eager([good, lambda x: x @ weight.roll(1, 0).t()], torch.float32, shift=1)
    assert gate(rolled(x), [0, 1, 2, 3], reference) < 1e-6
    late = eager([lambda x: torch.cat([good(x)[:3], bad(x)[3:]])], torch.float32)
    assert gate(late(x), [0, 1, 2, 3], reference) > 0.1


def test_errors_that_are_no_numbers_are_infinite():
    assert relative_error(torch.full((2, 2), torch.nan), torch.ones(2, 2).double()) == float("inf")
    assert relative_error(torch.ones(3, 2), torch.ones(2, 2).double()) == float("inf")


def test_a_visit_takes_the_copies_in_turn():
    seen = []
    run = Run(seen.append, 3, lambda some: [], 3)
    visit(run, 0, start=2, warm=False)
    visit(run, 0, start=3, warm=False)
    assert seen == [2, 0]


def test_as_many_copies_as_fill_the_cache_five_times():
    c = Competitor("c", "torch", 4, 4.5, "int8", 0.1, lambda w, n: None)
    assert c.copies(4096, 4096) * 4096 * 4096 * 4.5 / 8 >= 160e6
    assert c.copies(1 << 16, 1 << 16) == 1


def test_steady():
    assert steady([5, 1, 3]) == 3
    assert steady([5, 1, 3], largest=True) == 3
    assert steady([5, 1]) == 1
    assert geometric_mean([2, 8]) == pytest.approx(4)


def test_limits():
    limits = {"read": 10e9, "int8": 1e12, "fp32": 2e11}
    assert limit_seconds(1000, 1000, 1, 8, "int8", limits) == (pytest.approx(1e-4), "read")
    assert limit_seconds(1000, 1000, 100, 8, "int8", limits) == (pytest.approx(2e-4), "int8")
    assert limit_seconds(1000, 1000, 100, 8, "bf16", limits)[0] == pytest.approx(1e-3)  # no bf16: float32's peak
    assert limit_seconds(1000, 1000, 100, 8, "int8", {"read": 10e9}) is None


def data_of(ours: float) -> dict:
    def fields(family, bits, alone=False):
        return {"family": family, "bits": bits, "stored_bits": bits, "arithmetic": "int8", "bound": 1, "alone": alone}

    competitors = {
        BASELINE: fields("torch", 16), "fast": fields("torchao", 8),
        "slow": fields("torch", 8), "red": fields("torch", 8),
        "pennyweight a": fields("pennyweight", 8), "pennyweight b": fields("pennyweight", 8, alone=True),
    }  # fmt: skip
    results = {
        BASELINE: {"error": 0, "visits": [4e-4] * 3}, "fast": {"error": 0, "visits": [2e-4, 1e-4, 2e-4]},
        "slow": {"error": 0, "visits": [8e-4]}, "red": {"error": 2, "red": True},
        "pennyweight a": {"error": 0, "visits": [ours]}, "pennyweight b": {"error": 0, "visits": [4e-4]},
    }  # fmt: skip
    cell = {"n": 1000, "k": 1000, "m": 1, "quiet": True, "limits": {"read": [10e9]}, "results": results}
    machine = dict.fromkeys(("date", "cpu", "cpu_family_model", "cores", "threads", "memory_gib", "python"), "")
    method = {"rounds": 3, "visit_ms": 1, "cell_seconds": 1, "extra_rounds": 0, "rotated_mb": 200.0}
    return {
        "kind": "linear", "competitors": competitors, "cells": [cell], "missing": {"openvino": "not installed"},
        "machine": {**machine, "isa": [], "caches": {}}, "versions": {"torch": "1"}, "method": method, "command": "",
    }  # fmt: skip


def test_rows_compare_with_the_fastest_peer_at_equal_bits():
    data = data_of(1e-4)
    rows = {r.name: r for r in rows_of(data["cells"][0], data["competitors"])}
    ours = rows["pennyweight a"]
    assert ours.x_peer == pytest.approx(2)
    assert ours.x_alike == pytest.approx(2)
    assert ours.x_bf16 == pytest.approx(4)
    assert ours.fraction == pytest.approx(1)
    assert ours.limit == "read"
    assert rows["pennyweight b"].x_peer is None
    assert rows["red"].seconds is None
    assert "RED" in rows["red"].note
    first = summarize(data)[0]
    assert [first.peer[0][0], first.bf16[0][0], first.one_row[0][0]] == pytest.approx([2, 4, 1])


def test_peers_that_round_their_input_stand_apart():
    data = data_of(1e-4)
    data["competitors"]["fast"]["arithmetic"] = "bf16"
    ours = {r.name: r for r in rows_of(data["cells"][0], data["competitors"])}["pennyweight a"]
    assert ours.x_peer == pytest.approx(2)
    assert ours.x_alike == pytest.approx(8)


def test_the_report_is_written_from_the_data(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "DOCS", tmp_path)
    monkeypatch.setattr(report, "plot", lambda data, path: path.write_text("plot"))
    report.write(json.loads(json.dumps(data_of(1e-4))))
    text = (tmp_path / "benchmarks.md").read_text()
    assert "2.00, 4.00; fast" in text
    assert "openvino: not installed" in text
    assert "red: RED" in text
    assert "| a | 0 of 1 | 0 of 1 |" in text
    assert "copies of 200 MB" in text


def test_runs_of_other_shapes_stand_in_one_table_and_held_ones_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "DOCS", tmp_path)
    monkeypatch.setattr(report, "plot", lambda data, path: path.write_text("plot"))
    first, second, held = data_of(1e-4), data_of(8e-4), {**data_of(5e-5), "isa": "avx2"}
    second["cells"][0]["n"], second["method"]["rotated_mb"] = 2000, 320.0
    report.write(first, second, held)
    text = (tmp_path / "benchmarks.md").read_text()
    assert "| a | 1 of 2 (rows: min; 1: 0.25) | 1 of 2 (rows: min; 1: 0.50) |" in text
    assert "copies of 200 or 320 MB" in text
    assert "## Limited to avx2" in text
    assert "| pennyweight a | 8 | 8.00 |" in text.split("## Limited to avx2")[1]
    second["versions"] = {"torch": "2"}
    with pytest.raises(ValueError, match="different machines or versions"):
        report.write(first, second)


def test_options():
    quick, full = linear.parse([]), linear.parse(["--full", "--only", "int4"])
    assert (len(quick.shapes), len(full.shapes), full.rows) == (1, 5, linear.ROWS)
    some = linear.plan_of(linear.parse(["--shapes", "8x16,32x64", "--rows", "2"]), lambda cell, text: None)
    assert (some.shapes, some.rows, some.rounds, some.extra_rounds) == ([(8, 16), (32, 64)], [2], 5, 3)
    assert full.only == ["int4", "bf16 F.linear"]
    with pytest.raises(SystemExit):
        linear.parse(["--peers", "nobody"])


def test_a_whole_run_in_processes():
    pool = Pool(["limits", "torch"], 1)
    try:
        plan = measure.Plan(
            [(1024, 1024)], [1, 3], rounds=2, visit_ms=1, extra_rounds=0, only=["bf16 F.linear", "_int_mm"]
        )
        cells = list(measure.Measurement(pool, plan).cells())
        table = pool.competitors
    finally:
        pool.close()
    assert [c["m"] for c in cells] == [1, 3]
    for cell in cells:
        assert cell["limits"]["read"]
        rows = {r.name: r for r in rows_of(cell, table)}
        assert rows[BASELINE].x_bf16 == 1
        assert rows["torch _int_mm W8A8"].error < 0.017

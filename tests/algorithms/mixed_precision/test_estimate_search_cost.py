"""What a dry run says of a search: it runs the model a few times, quantizes no weight of it and changes nothing."""

import re
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import pennyweight as pw
from pennyweight.algorithms.calibration.estimate_cost import CalibrationCost
from pennyweight.algorithms.mixed_precision import sensitivity
from pennyweight.algorithms.mixed_precision.estimate_search_cost import SearchCost, estimate_search_cost
from pennyweight.algorithms.mixed_precision.latency import CallTimer
from pennyweight.algorithms.solvers.gptq import GPTQ
from pennyweight.core.spec import QuantSpec
from pennyweight.planning.config_resolution import PlanError
from pennyweight.planning.quantize_report import size
from tests.algorithms.models import blocks_only, llama, padded_tokens, t5, tokens

FEW = [pw.SpecConfig(QuantSpec(pw.get_format(f"int{b}"), (32,), torch.float16)) for b in (2, 4, 6)]


def said(model: Any, batches: Any, budget: Any = "4.5 bpw", **more: Any) -> tuple[SearchCost, Any, str]:
    how: dict[str, Any] = {"candidates": FEW, "filter_fn": blocks_only} | more
    return estimate_search_cost(model, batches, budget, **how)


def test_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = llama(3), tokens(6)
    before, state = {n: p.clone() for n, p in model.named_parameters()}, torch.get_rng_state()
    solved = pw.search(llama(3), tokens(6), "4.5 bpw", candidates=FEW, filter_fn=blocks_only).table
    monkeypatch.setattr(import_module("pennyweight.algorithms.mixed_precision.search"), "solve_in_model", None)
    monkeypatch.setattr(sensitivity.Chain, "measure", None)
    cost, config, note = said(model, batches, max_memory="1 GB")
    assert (cost.weights, cost.candidates) == (21, 3)
    assert (cost.trials, cost.alone) == (21 * 3 * 2, 21 * 3 * 2)  # 2 of 6 batches measure
    assert config == FEW[1]  # 4 bits and a float16 scale for 32 of them
    assert re.fullmatch(
        "nothing was searched: this plan has int4, groups of 32.* for each weight, the largest candidate within the "
        "budget; the search chooses for each", note,
    )  # fmt: skip
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert cost.solved == sum(option.nbytes for options in solved.values() for option in options)
    largest = (
        (7 + 4 * GPTQ().copies) * 128 * 64 + 12 * 128**2 + max(sum(o.nbytes for o in some) for some in solved.values())
    )
    statistics = 4 * (128**2 + 3 * 64**2)  # queries, keys and values have the same inputs; gate and up too
    time, memory = cost.notes(in_files=True)
    assert re.fullmatch(
        r"search, 21 weights under 3 candidates: about T \(quantizing T; trial runs, 126 from the block of the weight "
        r"on, by the time of one: T\); 2 processes T; 4 processes T".replace("T", r"\S+ [mµ]?s"), time,
    )  # fmt: skip
    hidden = 4 * 4 * 24 * 64 * 4  # 4 batches that quantize, 4 texts of 24 tokens, 64 channels
    assert memory == (
        f"memory of the search: about {size(largest + statistics)} beside mapped files, and what max_memory leaves for "
        f"hidden states of trials; disk until the end: {size(hidden)} of hidden states, {size(cost.solved)} of weights"
    )
    assert cost.notes(in_files=False)[1] == (
        f"memory of the search beside the model: about {size(largest + statistics + hidden + cost.solved)}, with "
        f"{size(hidden)} of hidden states and {size(cost.solved)} of weights"
    )


def test_the_trials_take_what_was_measured() -> None:
    """Trials of a weight in block b of 3 run 3 - b blocks; a model without chains runs whole."""
    cost, _, _ = said(llama(3), tokens(6))
    first, _, _ = said(llama(3), tokens(6), filter_fn=lambda module, name: ".0." in name and blocks_only(module, name))
    assert first.trials * 3 == cost.trials
    assert 0 < first.measuring < cost.measuring
    pairs = [{**batch, "decoder_input_ids": batch["input_ids"][:, :5]} for batch in padded_tokens()]
    whole, _, _ = said(t5(), pairs, filter_fn=None, algorithm="nearest")
    assert whole.alone == 0
    assert f"trial runs, {whole.trials} of the whole model, by" in whole.notes(in_files=False)[0]
    assert "processes" not in whole.notes(in_files=False)[0]


def test_time_of_several_processes() -> None:
    calibration = CalibrationCost(
        1000, inputs=60.0, outputs=30.0, statistics=10.0, solving=200.0, statistics_bytes=0, hidden_bytes=0
    )
    cost = SearchCost(10, 5, calibration, trials=500, alone=400, measuring=400.0, whole=20.0, largest=0, solved=0)
    assert [cost.seconds(n) for n in (1, 2, 4)] == [720, 400, 240]
    assert cost.notes(in_files=True)[0] == (
        "search, 10 weights under 5 candidates: about 12 min (quantizing 5 min; trial runs, 400 from the block of the "
        "weight on and 100 of the whole model, by the time of one: 7 min); 2 processes 7 min; 4 processes 4 min"
    )


def test_the_plan_that_is_shown() -> None:
    assert said(llama(), tokens(4), "2.6 bpw")[1] == FEW[0]
    assert said(llama(), tokens(4), "16 bpw")[1] == FEW[2]
    slow = CallTimer(lambda run, device: 1.0, lambda row, w, rows, limit: ())
    cost, config, _ = said(llama(), tokens(4), ["1x latency", "5 bpw"], clock=slow)
    assert config == FEW[1]
    assert cost.candidates == 3  # weights that stay float need no trials


def test_what_a_search_refuses_is_refused() -> None:
    with pytest.raises(PlanError, match="the candidates need"):
        said(llama(), tokens(4), "1 bpw")
    with pytest.raises(PlanError, match="max_memory is 10 kB"):
        said(llama(), tokens(4), max_memory="10 kB")
    with pytest.raises(PlanError, match="at least two batches"):
        said(llama(), list[Tensor](tokens(1)))

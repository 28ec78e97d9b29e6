"""search(): a budget is kept, a mixture is better than what is uniform, and what it says is what comes."""

import copy
import json
from itertools import product

import pytest
import torch

import pennyweight as pw
from pennyweight.algorithms.mixed_precision.search import Option, allocate, search
from pennyweight.algorithms.tuners import losses
from pennyweight.core.spec import QuantSpec
from pennyweight.planning.config_resolution import PlanError
from pennyweight.planning.configs.serialize import config_from_data
from tests.algorithms.models import blocks_only, inputs, llama, mlp, tokens

FEW = [pw.SpecConfig(QuantSpec(pw.get_format(f"int{b}"), (32,), torch.float16)) for b in (2, 4, 6)]


@pytest.fixture(scope="module")
def found():
    model, batches = llama(), tokens(4)
    before = {name: p.clone() for name, p in model.named_parameters()}
    result = search(model, batches, "4.5 bpw", candidates=FEW, algorithm="gptq", filter_fn=blocks_only)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    return model, batches, result


def test_the_budget_is_kept_and_used(found) -> None:
    model, _, result = found
    q = copy.deepcopy(model)
    report = pw.quantize_(q, result.config)
    numel = sum(torch.Size(r.shape).numel() for r in report.quantized)
    packed = sum(q.get_parameter(r.name).to_layout("bits").nbytes for r in report.quantized)
    assert packed == result.nbytes
    assert 8 * packed / numel == pytest.approx(result.bits)
    assert 4.0 < result.bits <= 4.5


def test_the_prediction_is_that_of_the_solved_mixture(found) -> None:
    model, batches, result = found
    q = copy.deepcopy(model)
    solving, measuring = losses.split_batches(batches, 0.25)
    pw.quantize_(q, result.config, calibration=solving, algorithm="gptq")
    measured = losses.mean_divergence(q, measuring, losses.references(model, measuring), losses.kl)
    assert result.predicted == pytest.approx(measured, rel=0.25)
    total = sum(result.table[name][i].loss for name, i in result.chosen.items())
    assert result.predicted == pytest.approx(total * result.interaction)


def test_a_mixture_loses_less_than_the_uniform_config_between(found) -> None:
    _, _, result = found
    (_, b0, l0), (_, b1, l1), (_, b2, l2) = result.uniform
    assert b0 < b1 < b2
    assert l0 > l1 > l2
    chosen = allocate(result.table, sum(o[1].nbytes for o in result.table.values()))
    assert sum(result.table[n][i].loss for n, i in chosen.items()) < l1
    front = result.front(5)
    assert [b for b, _ in front] == sorted(b for b, _ in front)
    assert [loss for _, loss in front] == sorted((loss for _, loss in front), reverse=True)


def test_another_budget_needs_no_other_run(found) -> None:
    model, _, result = found
    less = result.within("3 bpw")
    assert less.bits <= 3 < result.bits
    assert less.predicted > result.predicted
    assert less.within("4.5 bpw") == result
    rest = sum(t.nbytes for n, t in (*model.named_parameters(), *model.named_buffers()) if n not in result.table)
    same = result.within(f"{rest + less.nbytes} B")  # two weights of one size may take each other's place
    assert same.predicted == pytest.approx(less.predicted, rel=1e-3)
    with pytest.raises(PlanError, match="the candidates need"):
        result.within("1 bpw")


def test_the_config_is_data(found) -> None:
    _, _, result = found
    data = json.loads(result.to_json())
    assert config_from_data(data["config"]) == result.config
    for name, options in data["table"].items():
        assert [o["chosen"] for o in options].index(True) == result.chosen[name]
    assert "bits per weight" in str(result)


def test_allocation_is_the_best_of_all() -> None:
    g = torch.Generator().manual_seed(3)
    table = {}
    for name in "abcde":
        sizes = torch.randint(1, 30, (3,), generator=g).tolist()
        losses = torch.rand(3, generator=g).tolist()
        table[name] = [Option(FEW[i], str(i), sizes[i], losses[i]) for i in range(3)]
    least = sum(min(o.nbytes for o in options) for options in table.values())
    for limit in (least, least + 7, least + 20, least + 100):
        ways = [
            (sum(table[n][i].loss for n, i in zip(table, way, strict=True)), way)
            for way in product(range(3), repeat=5)
            if sum(table[n][i].nbytes for n, i in zip(table, way, strict=True)) <= limit
        ]
        chosen = allocate(table, limit)
        assert sum(table[n][i].nbytes for n, i in chosen.items()) <= limit
        assert sum(table[n][i].loss for n, i in chosen.items()) == pytest.approx(min(ways)[0], rel=1e-3)


def test_a_model_that_puts_out_a_tensor_is_measured_by_its_error() -> None:
    result = search(mlp(), inputs(batches=4), "5 kB", candidates=FEW)
    assert result.metric == "error"
    assert result.bits > 0


@pytest.mark.parametrize(
    ("budget", "message"),
    [("4", "budget must be"), ("big", "budget must be"), (4.25, "budget must be"), ("0.5 bpw", "the candidates need"),
     ("0 MB", "a memory limit is"), ("1 kB", "the candidates need")],
)  # fmt: skip
def test_a_budget_without_meaning_is_refused(budget, message) -> None:
    with pytest.raises(PlanError, match=message):
        search(mlp(), inputs(), budget, candidates=FEW)


def test_what_search_cannot_do_is_said() -> None:
    with pytest.raises(PlanError, match="two batches"):
        search(mlp(), inputs(batches=1), "4 bpw")
    with pytest.raises(PlanError, match="accepts only a solver"):
        search(mlp(), inputs(), "4 bpw", algorithm=["gptq", "tune"])
    with pytest.raises(ValueError, match="unknown metric"):
        search(mlp(), inputs(), "4 bpw", metric="bleu", candidates=FEW)

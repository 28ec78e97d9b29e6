"""The benchmark of whole models: its models, their costs, and the arithmetic of its report. No times are asserted."""

import dataclasses
import importlib.util
import json
import os
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from benchmarks import machine, report
from benchmarks.models import cases, costs, llama, page, subjects, vision, worker
from benchmarks.models.__main__ import parse
from benchmarks.models.base import MOST_STEPS, TASKS, Call, Case, Inputs, Timer, mean_error, visit
from benchmarks.models.measure import Measurement, Plan
from benchmarks.models.rows import rows_of, units, verdicts
from benchmarks.peers.pool import Died, Failed

DOCS = Path(__file__).resolve().parents[2] / "docs"


# The models


@pytest.mark.parametrize(
    ("name", "parameters", "products"),  # of the papers, and of other implementations
    [("resnet18", 11_689_512, 1.814e9), ("resnet50", 25_557_032, 4.089e9), ("mobilenet_v2", 3_504_872, 0.3008e9)],
)
def test_convolutional_models_have_the_published_size(name, parameters, products):
    net = vision.make(name).eval()
    assert sum(p.numel() for p in net.parameters()) == parameters
    image = vision.images(1, 0)
    assert net(image).shape == (1, vision.CLASSES)
    cost = costs.count(net, (image,))
    assert cost["linear"] / 2 == pytest.approx(products, rel=2e-3)
    assert cost["attention"] == 0
    assert cost["weights"] == sum(p.numel() for p in net.parameters() if p.ndim > 1)


def test_settled_models_are_the_same_every_time_and_stay_in_range():
    a, b = vision.settled("resnet18"), vision.settled("resnet18")
    image = vision.images(2, 3)
    with torch.no_grad():
        y = a(image)
        assert torch.equal(y, b(image))
    assert 0.05 < y.std() < 20
    assert not a.training
    assert not torch.equal(vision.images(1, 0), vision.images(1, 1))


def test_operations_of_an_encoder_are_its_formula():
    transformers = pytest.importorskip("transformers")
    h, f, layers, batch, n = 32, 64, 2, 3, 7
    config = transformers.BertConfig(
        hidden_size=h, intermediate_size=f, num_hidden_layers=layers, num_attention_heads=4, vocab_size=50,
        attn_implementation="eager",
    )  # fmt: skip
    model = transformers.BertModel(config, add_pooling_layer=False)
    net = subjects.LastHidden(model, ("input_ids", "attention_mask")).eval()
    ids = torch.zeros(batch, n, dtype=torch.long)
    cost = costs.count(net, (ids, torch.ones_like(ids)))
    weights = layers * (4 * h * h + 2 * h * f)
    expected = {"linear": 2 * batch * n * weights, "attention": 4 * layers * batch * n * n * h, "weights": weights}
    assert cost == expected | {"cache_bytes": 0}
    model.set_attn_implementation("sdpa")
    assert costs.count(net, (ids, torch.ones_like(ids))) == cost
    assert subjects.core(net) is model
    plain = nn.Linear(2, 2)
    assert subjects.core(plain) is plain


def test_inputs_are_kept_by_case(tmp_path):
    inputs, case = Inputs(tmp_path), Case("a", "resnet18")
    inputs.write({"a": (torch.ones(2),), "b": (torch.zeros(2),)}, [(torch.full((1,), 3.0),)])
    assert inputs.of(case)[0].tolist() == [1, 1]
    assert inputs.calibration[0][0].item() == 3


# What the language model costs


def test_the_language_model_costs_its_weights_once_a_token_and_its_cache():
    blocks, head = llama.SHAPES["llama"].linear_elements()
    assert (blocks, head) == (721_420_288, 65_536_000)
    decode = Case("", "llama", "decode", 8, 4096)
    cost = costs.of_language(decode)
    assert cost["linear"] == 2 * 8 * (blocks + head)
    assert cost["weights"] == blocks + head
    assert cost["cache_bytes"] == 8 * 4096 * 2 * 16 * 512 * 2
    assert costs.of_language(dataclasses.replace(decode, cache="int8"))["cache_bytes"] == cost["cache_bytes"] / 2
    prompt = costs.of_language(Case("", "llama", "prompt", 1, 128))
    assert prompt["linear"] == 2 * (blocks * 128 + head)
    assert prompt["attention"] == 4 * 16 * 2048 * 128 * 129 / 2
    assert prompt["cache_bytes"] == 0
    assert costs.of_language(Case("", "llama", "first token", 1, 1))["linear"] == 2 * (blocks + head)


def test_sequences_have_different_tokens_of_the_vocabulary():
    a, b = llama.tokens(2, 300)
    assert a != b
    assert a[:10] == llama.tokens(1, 10)[0]
    assert 0 <= min(a + b) <= max(a + b) < llama.VOCAB


def test_the_limit_is_the_longer_of_reading_and_computing():
    limits = {"read": 10e9, "int8": 1e12, "fp32": 2e11, "bf16": 4e11}
    cost = {"linear": 2e9, "attention": 0.0, "weights": 1e6, "cache_bytes": 0.0}
    assert costs.limit_seconds(cost, 8, "int8", limits) == (pytest.approx(2e-3), "int8")
    assert costs.limit_seconds(cost, 32, "fp32", limits) == (pytest.approx(1e-2), "fp32")
    more = cost | {"attention": 4e8}
    assert costs.limit_seconds(more, 8, "int8", limits)[0] == pytest.approx(3e-3)  # at bf16's peak
    assert costs.limit_seconds(more, 32, "fp32", limits)[0] == pytest.approx(1.2e-2)
    large = cost | {"weights": 1e9, "cache_bytes": 5e8}
    assert costs.limit_seconds(large, 4, "int8", limits) == (pytest.approx(0.1), "read")
    assert costs.limit_seconds(cost, 16, "bf16", {"read": 1e10, "fp32": 2e11})[0] == pytest.approx(1e-2)
    assert costs.limit_seconds(cost, 16, "bf16", {"fp32": 2e11}) is None


# Cases and ways


def test_cases_have_names_of_their_own_and_known_tasks():
    names = [c.name for c in cases.CASES]
    assert len(set(names)) == len(names)
    assert {c.task for c in cases.CASES} == set(TASKS)
    assert {c.model for c in cases.CASES} == {*cases.LANGUAGE, *cases.TRANSFORMERS, *cases.CONVOLUTIONAL}
    assert [c.name for c in cases.chosen(["vit"])] == ["ViT-B/16"]


def test_every_family_names_a_file_and_what_to_install():
    for family in worker.FAMILIES.values():
        assert importlib.util.find_spec(family.module.partition(":")[0]) is not None
        assert not family.needs or family.install


@pytest.mark.parametrize("family", ["torch", "compile", "pennyweight"])
def test_ways_serve_known_models_under_names_of_their_own(family):
    pytest.importorskip("transformers")
    made = worker.Worker(family, 1)
    described = made.describe()["competitors"]
    assert set(described) == {worker.key(c["model"], c["name"]) for c in described.values()}
    assert {c["model"] for c in described.values()} <= set(cases.MODELS)
    for name, way in made.ways.items():
        assert way.arithmetic in ("int8", "bf16", "fp32"), name
        assert way.stored_bits >= way.bits
        assert made.accepts(name, Case("", "llama", "decode", 1, 128)) is True
    if family == "torch":
        for refused in (Case("", "llama", "decode", 1, 128, "int8"), Case("", "llama", "first token", 1, 1)):
            assert isinstance(made.accepts("llama/torch bf16", refused), str)


def test_errors_are_means_of_magnitudes():
    reference = torch.tensor([1.0, -3.0])
    assert mean_error(torch.tensor([1.5, -3.5]), reference) == pytest.approx(0.25)
    assert mean_error(torch.tensor([1.0, torch.nan]), reference) == float("inf")
    assert mean_error(torch.ones(3), reference) == float("inf")


def test_a_visit_takes_a_bounded_number_of_steps():
    steps: list[int] = []
    assert visit(lambda: steps.append(1), 10.0, warm=False) > 0
    assert len(steps) == MOST_STEPS
    steps.clear()
    visit(lambda: steps.append(1), 0.0, warm=False)
    assert len(steps) == 1
    timer = Timer(Call(lambda: steps.append(1), lambda y: y))
    assert timer.visit(0.0) == timer.took


def test_visits_take_precedence_only_while_they_last(monkeypatch):
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(machine.os, "sched_setscheduler", lambda tid, policy, param: calls.append((tid, policy)))
    with machine.undisturbed():
        pass
    assert calls == []
    monkeypatch.setenv(machine.REALTIME, "1")

    def fail() -> None:
        with machine.undisturbed():
            assert (os.getpid(), os.SCHED_RR) in calls
            calls.clear()
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        fail()
    assert (os.getpid(), os.SCHED_OTHER) in calls


def test_options():
    o = parse([])
    assert (o.rounds, o.cases, "compile" in o.families) == (7, cases.CASES, True)
    quick = parse(["--quick", "--models", "llama", "--cases", "decode"])
    assert (quick.rounds, quick.extra_rounds, "compile" in quick.families) == (3, 0, False)
    assert {c.task for c in quick.cases} == {"decode"}
    assert parse(["--quick", "--families", "compile"]).families == ["compile"]
    assert parse(["--report"]).report == []
    for wrong in (["--models", "nobody"], ["--families", "nobody"], ["--cases", "nobody"]):
        with pytest.raises(SystemExit):
            parse(wrong)


# The measurement, with a pool that is made up


class MadeUp:
    """A pool whose ways answer at once; `broken` fails, `dying` ends its process at the first visit."""

    families, pids = ("torch", "a"), ()
    outputs: ClassVar = {"m/float": [1.0, 2.0], "m/good": [1.0, 2.1], "m/red": [5.0, 5.0], "m/dying": [1.0, 2.0]}

    def __init__(self):
        self.asked = []
        fields = {"model": "m", "bits": 8, "stored_bits": 8, "arithmetic": "int8", "bound": 0.1}
        names = ["float", "good", "red", "broken", "dying", "refusing"]
        self.competitors = {f"m/{n}": {**fields, "name": n, "family": "torch" if n == "float" else "a"} for n in names}

    def ask(self, family, method, *args):
        self.asked.append((family, method, args[0] if args else None))
        way = args[0] if args else ""
        if method == "write":
            return {c.name: {"linear": 1.0, "attention": 0.0, "weights": 1.0, "cache_bytes": 0.0} for c in args[2]}
        if method == "accepts":
            return "not this one" if way == "m/refusing" else True
        if method == "build":
            if way == "m/broken":
                raise Failed("no such thing")
            return {"nbytes": 7, "detail": ""}
        if method == "check":
            return torch.tensor(self.outputs[way]).numpy(), None
        if method == "reference":
            return torch.tensor([1.0, 2.0]).numpy()
        if method == "visit" and way == "m/dying":
            raise Died("the process ended")
        return {"visit": 0.5}.get(method)


def test_what_fails_becomes_a_sentence_and_the_others_go_on():
    pool = MadeUp()
    plan = Plan([Case("one", "m"), Case("two", "m")], rounds=4, extra_rounds=0)
    first, second = list(Measurement(pool, plan).rows())
    results = first["results"]
    assert results["float"]["visits"] == [0.5] * 4
    assert results["good"]["visits"] == [0.5] * 4
    assert results["good"]["error"] == pytest.approx(0.1 / 3, rel=1e-5)
    assert results["red"]["red"]
    assert "visits" not in results["red"]
    assert results["broken"] == {"failed": "build: no such thing"}
    assert "the process ended" in results["dying"]["failed"]
    assert results["refusing"] == {"refused": "not this one"}
    assert pool.asked.count(("a", "build", "m/good")) >= 2  # its process was gone
    assert second["results"]["good"]["visits"] == [0.5] * 4


def test_a_worker_runs_a_way_through_all_questions(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    made = worker.Worker("torch", 1)
    net, case = nn.Linear(3, 2), Case("a", "resnet18")
    x = torch.randn(2, 3)
    monkeypatch.setattr(subjects, "make", lambda name: net)
    monkeypatch.setattr(subjects, "inputs_of", lambda *a: (x,))
    monkeypatch.setattr(subjects, "export", lambda net, name, path: None)
    with torch.no_grad():
        cost = made.write("resnet18", str(tmp_path), [case])
        assert cost["a"] == {"linear": 24, "attention": 0, "weights": 6, "cache_bytes": 0}
        reference = torch.from_numpy(made.reference(case, str(tmp_path)))
        assert torch.equal(reference, net(x))
        for way, bound in (("torch fp32", 1e-6), ("torch bf16", 0.05)):
            name = worker.key("resnet18", way)
            assert made.build(name, str(tmp_path))["nbytes"] == 8 * (4 if "32" in way else 2)
            y, floor = made.check(name, case)
            assert mean_error(torch.from_numpy(y), reference) < bound
            assert floor is None
            assert made.visit(name, 0.0) > 0
            made.unbind(name)
            with pytest.raises(KeyError):
                made.visit(name, 0.0)
    made.drop()
    assert not made.loaded


# The page


def data_of(ours: float) -> dict:
    fields = {"model": "m", "stored_bits": 8, "arithmetic": "int8", "bound": 1}
    names = {"torch fp32": 32, "fast": 8, "slow": 8, "red": 8, "pennyweight a": 8, "pennyweight b": 8, "other": 4}
    competitors = {f"m/{n}": {**fields, "name": n, "family": "x", "bits": bits} for n, bits in names.items()}
    common = {"nbytes": 2_000_000, "detail": "", "error": 0.01}
    seconds = {
        "torch fp32": 4e-3,
        "fast": 1e-3,
        "slow": 3e-3,
        "pennyweight a": ours,
        "pennyweight b": 9e-3,
        "other": 1e-4,
    }
    results = {n: {**common, "visits": [s, s, s / 2]} for n, s in seconds.items()}
    results |= {"red": {**common, "red": True}}
    case = {
        **dataclasses.asdict(Case("a case", "m", "forward", 2, 16)), "others": [0.5, 0.5, 0.0],
        "cost": {"linear": 1e8, "attention": 0.0, "weights": 5e5, "cache_bytes": 0.0},
        "limits": {"read": [10e9], "int8": [1e12], "fp32": [1e11]}, "results": results,
    }  # fmt: skip
    machine = dict.fromkeys(("date", "cpu", "cpu_family_model", "cores", "threads", "memory_gib", "python"), "")
    return {
        "kind": "models", "competitors": competitors, "cases": [case], "missing": {"openvino": "not installed"},
        "machine": {**machine, "isa": [], "caches": {}}, "versions": {"torch": "1"}, "command": "it",
        "method": {"rounds": 3, "visit_ms": 200, "extra_rounds": 0, "case_seconds": 1},
    }  # fmt: skip


def test_rows_compare_with_the_fastest_peer_at_equal_bits():
    data = data_of(5e-4)
    rows = {r.name: r for r in rows_of(data["cases"][0], data["competitors"])}
    ours = rows["pennyweight a"]
    assert ours.x_peer == pytest.approx(2)
    assert ours.x_float == pytest.approx(8)
    assert ours.rate == pytest.approx(2 / 5e-4)
    assert ours.fraction == pytest.approx(0.2)
    assert ours.limit == "int8"
    assert rows["red"].seconds is None
    assert "RED" in rows["red"].note
    (verdict,) = verdicts(data["cases"][0], data["competitors"])
    assert (verdict.ours.name, verdict.peer.name) == ("pennyweight a", "fast")
    assert verdict.ratio == pytest.approx(2)
    results = data["cases"][0]["results"]
    for error, expected in ((0.0109, "pennyweight a"), (0.012, "pennyweight b")):  # the peer's is 0.01
        results["pennyweight a"]["error"] = error
        assert verdicts(data["cases"][0], data["competitors"])[0].ours.name == expected
    results["pennyweight b"]["error"] = 0.02  # none is as accurate
    assert verdicts(data["cases"][0], data["competitors"])[0].ours.name == "pennyweight a"
    data["cases"][0]["results"]["pennyweight a"]["floor"] = 4e-4
    ours = next(r for r in rows_of(data["cases"][0], data["competitors"]) if r.name == "pennyweight a")
    assert (ours.fraction, ours.limit) == (pytest.approx(0.8), "files")


def test_a_prompt_counts_tokens_and_decoding_counts_sequences():
    assert units(dataclasses.asdict(Case("", "llama", "prompt", 1, 128))) == 128
    assert units(dataclasses.asdict(Case("", "llama", "decode", 8, 4096))) == 8
    assert units(dataclasses.asdict(Case("", "minilm", "forward", 16, 64))) == 16


def test_the_section_is_written_from_the_data_and_the_others_stay(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(report, "DOCS", tmp_path)
    path = tmp_path / "benchmarks.md"
    path.write_text(
        "# Benchmarks\n\nold\n\n## One linear layer\n\nkept\n\n### Deeper\n\nkept too\n\n## Limited to x\n\nlast\n"
    )
    report.write(json.loads(json.dumps(data_of(5e-4))))
    text = path.read_text()
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == ["## Whole models", "## One linear layer", "## Limited to x"]
    assert "kept too\n\n## Limited to x\n\nlast\n" in text
    assert "\nold\n" not in text
    row = "| a case | random | 8 | a | 0.50 | 0.20 | 0.010 | fast | 1.00 | 0.10 | 0.010 | 2.00 | 8.00 |"
    assert row in text
    assert "openvino: not installed" in text
    assert "red: RED" in text
    assert "most rounds of: a case" in text
    picture = (tmp_path / page.PLOT).read_text()
    assert "a case, 8 bits" in picture
    report.write(json.loads(json.dumps(data_of(5e-4))))
    assert path.read_text() == text
    assert (tmp_path / page.PLOT).read_text() == picture


def test_runs_are_merged_case_by_case(tmp_path):
    first, second = data_of(5e-4), data_of(2e-3)
    second["cases"].append({**second["cases"][0], "name": "another"})
    second["versions"] = {"openvino": "2"}
    both = page.merged(first, second)
    assert [c["name"] for c in both["cases"]] == ["a case", "another"]
    assert page.all_verdicts(both)[0].ratio == pytest.approx(0.5)
    assert both["versions"] == {"torch": "1", "openvino": "2"}
    path = tmp_path / "models.json"
    page.dump(both, path)
    assert json.loads(path.read_text()) == json.loads(json.dumps(both))
    second["versions"] = {"torch": "2"}
    with pytest.raises(ValueError, match="different machines or versions"):
        page.merged(first, second)


@pytest.mark.skipif(not page.MEASURED.exists(), reason="nothing has been measured")
def test_the_page_is_that_of_the_rows_in_the_repository():
    data = json.loads(page.MEASURED.read_text(encoding="utf-8"))
    expected = "\n\n".join(page.section(data))
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert report.sections_of(text)[page.HEADING] == expected
    assert text.startswith(f"{report.TITLE}\n\n{page.HEADING}\n\n| ")  # tables first, then how they were measured
    assert expected.index("### Models: how they were measured") > expected.rindex(" |\n")

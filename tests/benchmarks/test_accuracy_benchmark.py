"""The benchmark of accuracy: its data, figures, bits, rows and page. No peer runs, nothing trains long."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import pennyweight as pw
from benchmarks.accuracy import (
    corpus,
    figures,
    gates,
    language_model,
    methods,
    multiple_choice,
    nets,
    outliers,
    page,
    smollm2,
    statistics,
    targets,
    worker,
)
from benchmarks.accuracy.__main__ import choice_of, main, parser
from benchmarks.accuracy.accounting import Bits, bits_of
from benchmarks.accuracy.language_model import Recipe
from benchmarks.accuracy.results import Results
from benchmarks.accuracy.rivals import FAMILIES, REFERENCE, Family, ggml_rival, reference_of
from benchmarks.accuracy.rivals.base import CONVOLUTIONS, Row, each_weight, second_moments
from benchmarks.accuracy.runner import Choice, kept, measure, run
from benchmarks.accuracy.subjects import KINDS, SUBJECTS, Sizes, Subject, byte_tokenizer, prepare

TINY = Recipe(hidden=128, inner=256, layers=2, heads=4, kv_heads=2, steps=0, length=32)
SIZES = Sizes(calibration=16, evaluation=6, length=32, texts=8, batch=2)


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A cache with an untrained language model in it."""
    folder = tmp_path_factory.mktemp("cache")
    model = folder / f"stdlib-lm-{TINY.digest()}"
    language_model.build(TINY).save_pretrained(model)
    (model / "recipe.json").write_text("{}")
    return folder


@pytest.fixture
def lm(cache, monkeypatch):
    monkeypatch.setenv("PENNYWEIGHT_CACHE", str(cache))
    return prepare("lm", cache, TINY, SIZES)


# -- data ------------------------------------------------------------------------------------------------------------


def test_splits_are_of_different_files_and_always_the_same():
    for path in ("ast.py", "json/decoder.py", "asyncio/locks.py"):
        assert corpus._split_of(path) == corpus._split_of(path)
    windows = {name: {bytes(w.tolist()) for w in corpus.sequences(name, 200, 256)} for name in corpus.SPLITS}
    for a in corpus.SPLITS:
        assert torch.equal(corpus.sequences(a, 5), corpus.sequences(a, 5))
        for b in corpus.SPLITS:
            # licences and the like stand in many files; a file in two splits would give most of its windows
            assert a == b or len(windows[a] & windows[b]) <= 2
    texts = [set(corpus.docstrings(name)) for name in ("calibration", "test")]
    assert min(map(len, texts)) > 100
    assert len(texts[0] & texts[1]) < 0.1 * len(texts[0])


def test_too_many_windows_are_refused():
    with pytest.raises(ValueError, match="windows of 256 bytes; 1000000 asked for"):
        corpus.sequences("test", 1_000_000)


def test_a_byte_is_its_number():
    tokenizer, text = byte_tokenizer(), "def f(x):\n\treturn 'é' + x  # \x00~\n"
    assert tokenizer(text)["input_ids"] == list(text.encode())


def test_a_subject_is_found_again_with_other_sizes_apart(lm, cache):
    again = prepare("lm", cache, TINY, SIZES, say=pytest.fail)
    assert again == lm
    assert Subject.open(lm.folder) == lm
    assert prepare("lm", cache, TINY, Sizes(**vars(SIZES) | {"evaluation": 4})).digest != lm.digest
    assert len(lm.layers) == 14
    assert all(name.startswith("model.layers.") for name in lm.layers)
    with pytest.raises(ValueError, match="unknown subject 'x'; known: smollm2, lm, lm-out"):
        prepare("x", cache, TINY, SIZES)


def test_outliers_change_the_weights_and_not_the_function(lm):
    model, changed = lm.model(), lm.model()
    outliers.add_(changed)
    assert 0 < lm.evaluate(changed).values["kl max"] < 1e-6
    for name, tensor in model.state_dict().items():
        quotient = changed.state_dict()[name] / tensor
        if any(part in name for part in ("embed_tokens", "q_norm")):
            continue
        assert quotient.max() / quotient.min() > 5, name
    gamma = changed.model.norm.weight
    assert gamma.max() / gamma.median() > 10


# -- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lm", "digits-conv"])
def test_an_exact_copy_has_no_error(lm, cache, name, monkeypatch):
    monkeypatch.setattr(nets, "_train", lambda name: nets.NETS[name]())
    subject = lm if name == "lm" else prepare(name, cache, TINY, SIZES)
    found = subject.evaluate(subject.model())
    perplexities = [found.values.pop(k, 0.0) for k in ("perplexity", "float perplexity")]
    assert perplexities[0] == perplexities[1]
    assert set(found.values.values()) == {0.0}
    assert set(found.per_sequence["kl"]) == {0.0}
    assert len(found.per_sequence["kl"]) == (6 if name == "lm" else 449)


def test_kl_is_that_of_the_definition():
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.25, 0.5]])
    found = figures.classification(p.log()[None], q.log()[None], torch.tensor([[2]]))
    assert found.values["kl"] == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
    assert found.values["flips"] == 1
    assert found.values["nll change"] == pytest.approx(-math.log(2))
    assert found.values["rms dp"] == pytest.approx(math.sqrt(2 / 3) / 4)


def test_embeddings_are_compared_with_themselves_and_each_other():
    a = torch.randn(30, 16)
    same = figures.embeddings(a, 3 * a)  # lengths do not count
    assert same.values["1-cos"] == pytest.approx(0, abs=1e-15)
    assert same.values["kl"] == pytest.approx(0, abs=1e-12)
    assert same.values["top-10 overlap"] == 1
    assert same.values["spearman"] == pytest.approx(1)
    turned = figures.embeddings(a, -a)
    assert turned.values["1-cos"] == pytest.approx(2)
    assert turned.values["kl"] == pytest.approx(0, abs=1e-12)  # similarities are those of before
    b = torch.randn(30, 16)
    expected = 1 - torch.nn.functional.cosine_similarity(a.double(), b.double())
    assert figures.embeddings(a, b).per_sequence["1-cos"] == pytest.approx(expected.tolist())
    assert figures.embeddings(a, b).values["top-10 overlap"] < 0.7


def test_ranks_share_what_is_equal():
    from scipy.stats import spearmanr

    a, b = torch.tensor([3.0, 1, 1, 2, 5, 5, 5]), torch.tensor([1.0, 2, 3, 3, 4, 1, 9])
    assert figures.spearman(a, b) == pytest.approx(spearmanr(a, b).statistic)


def test_outputs_that_cannot_be_compared_are_refused():
    a = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"shape \[2, 3, 5\], those of the float model \[2, 3, 4\]"):
        figures.classification(a, torch.zeros(2, 3, 5))
    with pytest.raises(ValueError, match="24 of 24 outputs are not finite"):
        figures.classification(a, a / 0)


def test_intervals_are_paired_and_repeatable():
    x = torch.rand(48, dtype=torch.float64) + 0.1
    half = statistics.ratio((x / 2).tolist(), x.tolist())
    assert half == pytest.approx((0.5, 0.5, 0.5))  # paired: no spread though x has one
    mean = statistics.mean(x.tolist())
    assert mean == statistics.mean(x.tolist())
    error = float(x.std()) / math.sqrt(48)
    assert mean.high - mean.low == pytest.approx(2 * 1.96 * error, rel=0.15)
    with pytest.raises(ValueError, match="47 sequences cannot be paired with 48"):
        statistics.ratio(x.tolist()[:47], x.tolist())


# -- bits ------------------------------------------------------------------------------------------------------------


SOLVED = ("gptq", "gptaq", "hqq", "imatrix", "awq")  # the same config is there without, and of as many bits


def solved(name):
    return any(word in name for word in SOLVED) or (name.endswith(" auto") and not name.startswith("mixed"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "row",
    [r for r in methods.ROWS if not solved(r.name) and r.subjects != CONVOLUTIONS],
    ids=lambda r: r.name,
)
def test_counted_bits_are_those_of_the_file(lm, row, tmp_path):
    seen = {}

    def keep(model, subject):
        pw.save({f"{n}.weight": model.get_submodule(n).weight for n in subject.layers}, tmp_path / "x.safetensors")
        seen["bits"] = bits_of(model, subject)
        return seen["bits"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "bits_of", keep)
        patch.setattr(methods, "STEPS", {"causal": 4})  # learning adds no bits
        patch.setattr(methods, "TWICE", 4)
        patch.setattr(methods, "WRITTEN", 4)
        _, bits = row.run(lm, lm.model())
    file = tmp_path / "x.safetensors"
    held = file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little")  # without the header
    weights = sum(math.prod(s) for s in lm.layer_shapes())
    assert bits == pytest.approx(8 * held / weights, rel=1e-3)


def test_what_is_added_to_a_model_is_counted(lm):
    model = lm.model()
    plain = bits_of(model, lm)
    assert plain == 32
    model.model.layers[0].self_attn.register_buffer("factors", torch.zeros(1000))
    weights = sum(math.prod(s) for s in lm.layer_shapes())
    assert bits_of(model, lm) == pytest.approx(32 + 32 * 1000 / weights)
    pw.quantize_(model, pw.Int8WeightOnlyConfig(), lambda module, name: name == "lm_head")
    with pytest.raises(ValueError, match=r"lm_head.weight is quantized, but it is to be left float"):
        bits_of(model, lm)


def test_formulas_of_peers():
    assert Bits(4, 128, 32).of([(64, 256), (128, 384)]) == 4.25
    assert Bits(8, per_row=32).of([(10, 100)]) == 8.32
    assert Bits(4, 128, 16, per_column=16, per_layer=64).of([(8, 256)]) == pytest.approx(4 + 16 / 128 + 2 + 64 / 2048)
    assert Bits(4, 128, 16).of([(1, 130)]) == pytest.approx((256 * 4 + 32) / 130)  # the last group is filled up


# -- rows ------------------------------------------------------------------------------------------------------------


def test_every_family_lists_its_rows_without_its_package():
    for family in FAMILIES.values():
        rows = family.rows()
        assert rows
        for row in rows.values():
            assert (row.bits is None) == (family.name == "pennyweight")
            assert row.bits is None or row.bits.why
    assert REFERENCE[1] in FAMILIES[REFERENCE[0]].rows()
    for rows in (gates.GPTQ, gates.SYM4, gates.SYM3, gates.W8A8, gates.W8):
        assert all(name in FAMILIES[family].rows() for family, name in rows)


def _half(subject, model):
    for name in subject.layers[1:]:
        model.get_submodule(name).weight.data *= 0.5
    return model


def test_a_layer_that_was_left_alone_is_told(lm, tmp_path):
    with pytest.raises(ValueError, match=r"1 of 14 layers were left as they were: model.layers.0.self_attn.q_proj"):
        worker.measure(Row("half", _half, Bits(1, why="x")), lm, tmp_path, hand_back=True)


def test_weights_come_back_as_they_were_made(lm, tmp_path):
    answer = worker.measure(Row("r", each_weight(torch.round), Bits(3, why="x")), lm, tmp_path, hand_back=True)
    weights = load_file(tmp_path / "weights.safetensors")
    assert answer["bits"] == 3
    assert set(weights) == {f"{n}.weight" for n in lm.layers}
    was = lm.model().state_dict()
    assert all(torch.equal(t, was[name].round()) for name, t in weights.items())


def test_second_moments_leave_padding_out(lm):
    model, name = lm.model(), lm.layers[0]
    seen = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    expected = second_moments(lm, model)[name]
    handle.remove()
    x = torch.cat(seen).flatten(0, 1)
    torch.testing.assert_close(expected, x.square().mean(0))


def test_a_row_is_measured_in_a_process_and_not_again(lm, tmp_path):
    file, said = tmp_path / "r.json", []
    choice = Choice(("pennyweight",), ("int4 g128 tinygemm",))
    run([lm], choice, Results(file), said.append)
    (row,) = Results(file).of("lm")
    assert row["bits"] == 4.25
    assert row["figures"]["values"]["kl"] > 0
    assert len(row["figures"]["per_sequence"]["kl"]) == 6
    assert len(said) == 1
    run([lm], choice, Results(file), said.append)
    assert len(said) == 1
    methods_row = FAMILIES["pennyweight"].rows()["int4 g128 tinygemm"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as there: sums of several threads are rounded in another order
    try:
        here = worker.measure(methods_row, lm, tmp_path, hand_back=False)["figures"]
    finally:
        torch.set_num_threads(threads)
    assert here["per_sequence"]["kl"] == pytest.approx(row["figures"]["per_sequence"]["kl"], rel=1e-6)
    assert here["values"] == pytest.approx(row["figures"]["values"], rel=1e-6, abs=1e-9)


def test_what_fails_is_listed_with_its_reason(lm, tmp_path, monkeypatch):
    absent = Family("torchao", FAMILIES["torchao"].module, ("no_such_package",), "it")
    monkeypatch.setitem(FAMILIES, "torchao", absent)
    file, said = tmp_path / "r.json", []
    # gguf's python is one that does not exist
    run([lm], Choice(("torchao", "gguf"), pythons={"gguf": "/no/such/python"}), Results(file), said.append)
    results = Results(file)
    out = "\n".join(page.left_out(results, "lm"))
    assert "- torchao: int4 g128 tinygemm (prototype), " in out
    assert "no_such_package is not installed; pip install it, or --python torchao=PYTHON" in out
    assert "- gguf: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4: its python does not run: " in out
    assert not page.lines(results, "lm")


def test_a_process_that_dies_takes_no_other_row_with_it(lm, tmp_path):
    dies, sleeps = tmp_path / "dies", tmp_path / "sleeps"
    # it answers the first row asked for, and then no more
    dies.write_text("""#!/bin/sh
if [ "$6" != last ]; then mkdir "$5/0"; echo '{"failed": "by itself"}' > "$5/0/answer.json"; fi
echo gone >&2; exit 3
""")
    sleeps.write_text("#!/bin/sh\nexec sleep 30\n")
    for script in (dies, sleeps):
        script.chmod(0o755)
    family = FAMILIES["gguf"]
    answers = dict(measure(str(dies), family, ["a", "b", "c", "last"], lm, 60))
    assert answers["a"] == {"failed": "by itself"}
    assert answers["b"] == answers["last"] == {"failed": "the process ended with code 3: gone"}
    assert answers["c"] == {"failed": "by itself"}  # a new process was asked for what was left
    assert dict(measure(str(sleeps), family, ["a"], lm, 0.2)) == {"a": {"failed": "not done after 0 s"}}


# -- page ------------------------------------------------------------------------------------------------------------


def _row(family, name, bits, kl, subject="lm", **fields):
    per_sequence = [kl * (1 + 0.1 * i) for i in range(8)]
    measures = KINDS[SUBJECTS[subject][0]].measures
    values = {"kl": sum(per_sequence) / 8, "kl p99": 2 * kl, "flips": 0.01, "1-cos": kl, "1-cos p99": kl,
              "spearman": 0.99, "top-10 overlap": 0.9, "perplexity": 21.0, "float perplexity": 20.0,
              "error": kl, "cents": 1.0, "cents p90": 2.0, "octaves": 0.01}  # fmt: skip
    return {"subject": subject, "digest": "d", "family": family, "name": name, "bits": bits, "seconds": 1.0,
            "inputs": "", "note": "", "date": "2026-01-01", "versions": {"torch": "2"},
            "figures": {"per_sequence": dict.fromkeys(measures, per_sequence), "values": values}} | fields  # fmt: skip


def _some():
    results = Results()
    results.rank = 0.1
    for row in (
        _row(*REFERENCE, 4.25, 0.004, bits_why="two numbers"),
        _row("torchao", "int4 g128", 4.125, 0.005),
        _row("torchao", "int3 g128", 3.125, 0.02),
        _row("torchao", "W8A8 dynamic", 8.1, 0.003, inputs="int8"),
        _row("torchao", "int8 weight-only", 8.1, 2e-5),
        _row("llm-compressor", "GPTQ W4A16 g128", 4.125, 0.0015, note="its flag"),
        _row("pennyweight", "int4 g128", 4.125, 0.002),
        _row(*REFERENCE, 4.25, 0.04, subject="minilm"),
        {"subject": "lm", "digest": "d", "family": "hqq", "name": "int2", "failed": "not there"},
    ):
        results.add(row)
    return results


def test_gates_pass_and_fail():
    results = _some()
    assert [g["passed"] for g in gates.check(results)] == [True] * 5
    results.rank = 0.2
    assert [g["passed"] for g in gates.check(results)] == [True, True, True, False, True]
    results.add(_row("torchao", "W8A8 dynamic", 8.1, 4e-5))
    assert not gates.check(results)[2]["passed"]
    little = Results()
    little.add(_row("torchao", "quite another", 4.0, 0.1))
    assert not any(g["passed"] for g in gates.check(little))
    assert {row[2] for row in page.gate_lines(gates.check(little))} == {"not measured"}
    assert gates.check(Results()) == []


def test_the_page_says_what_was_measured(tmp_path):
    results = _some()
    path = tmp_path / "accuracy.md"
    page.write(results, path)
    text = path.read_text()
    assert "| **pennyweight int4 g128** | 4.125 | 0.0027 |" in text
    assert "| 0.500 | 0.5 to 0.5 |" in text
    assert "llm-compressor GPTQ W4A16 g128 (its flag)" in text
    assert "- hqq: int2: not there" in text
    assert "**Weights and inputs**" in text
    assert "two numbers" in text
    assert "all-MiniLM" in text
    plot = (tmp_path / "accuracy-lm.svg").read_bytes()
    assert b"<svg" in plot
    page.write(results, path)
    assert (tmp_path / "accuracy-lm.svg").read_bytes() == plot


def test_a_page_says_which_tools_have_no_row(tmp_path):
    told = "\n".join(page.left_out(_some(), "minilm"))
    assert "- gptqmodel, auto-round: none of their rows supports this kind of model" in told
    assert "ggml: not run on this model" in told
    assert "torchao" not in told


def test_a_page_has_its_models_and_what_was_measured_before(tmp_path):
    results = Results()
    for row in (
        _row("pennyweight", "int4 g64", 4.25, 0.002, subject="smollm2", clock="process"),
        _row(*reference_of("smollm2"), 4.5, 0.004, subject="smollm2", clock="process"),
        _row("pennyweight", "int8", 8.1, 0.002, subject="minilm-2048"),
    ):
        results.add(row)
    page.write(results, tmp_path / "accuracy.md")
    text = (tmp_path / "accuracy.md").read_text()
    assert text.index("## smollm2: ") < text.index("\n## lm: ")
    assert "minilm-2048:" not in text
    assert "smollm2: processor time" in text
    assert "| **pennyweight int4 g64** | 4.250 | 0.0027 |" in text
    assert "| 0.500 | 0.5 to 0.5 | 0.004 | 1.00 | 21.000 | 1 |" in text
    assert "| lm-out | the same function" in text
    assert "128 does not divide rows of 576" in text
    assert "- pennyweight: int4 g64 zero point, " in text
    page.write(results, tmp_path / "accuracy-nets.md")
    text = (tmp_path / "accuracy-nets.md").read_text()
    assert "## minilm-2048: " in text
    assert "## smollm2: " not in text
    assert "minilm-2048: elapsed time" in text


def test_sequences_are_put_together_in_larger_batches():
    batches = [{"input_ids": torch.full((4, n), n), "attention_mask": torch.ones(4, n)} for n in range(1, 101)]
    found = methods._batches(SimpleNamespace(calibration=lambda: batches))
    assert [len(b["input_ids"]) for b in found] == [12] * 33 + [4]
    first = found[0]["input_ids"]
    assert first.tolist() == [[1, 0, 0]] * 4 + [[2, 2, 0]] * 4 + [[3, 3, 3]] * 4
    assert torch.equal(found[0]["attention_mask"].bool(), first > 0)


def test_the_page_waits_for_its_gates(tmp_path, capsys):
    results, file, path = _some(), tmp_path / "r.json", tmp_path / "accuracy.md"
    results.path, results.rank = file, 0.5
    results.write()
    arguments = ["--no-run", "--json", str(file), "--page", str(path)]
    assert main(arguments) == 1
    assert not path.exists()
    assert "1 gates failed or were not measured; --force" in capsys.readouterr().out
    assert main([*arguments, "--force"]) == 0
    assert path.exists()


def test_rows_of_other_data_are_not_shown():
    results = Results()
    results.add(_row(*REFERENCE, 4.25, 0.004))
    results.add(_row("torchao", "int4 g128", 4.125, 0.004, digest="e"))
    assert [r["name"] for r in results.of("lm")] == ["int4 g128"]
    assert results.find("lm", *REFERENCE) is None
    assert page.lines(results, "lm")[0].to_t == ()


def test_rows_of_another_run_are_taken_over():
    one, other = Results(), _some()
    one.add({"subject": "lm", "digest": "d", "family": REFERENCE[0], "name": REFERENCE[1], "failed": "not there"})
    one.add(_row("torchao", "int4 g128", 4.125, 0.123))
    one.take(other)
    assert one.find("lm", *REFERENCE)["figures"]["values"]["kl p99"] == 0.008  # the one that was measured
    assert one.find("lm", "torchao", "int4 g128")["figures"]["values"]["kl p99"] == 0.246  # its own
    assert set(one.rows) == set(other.rows)


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"kind": "linear"}))
    with pytest.raises(ValueError, match="not a file of this benchmark"):
        Results(tmp_path / "x.json")


def test_arguments():
    choice = choice_of(parser().parse_args(["--rivals", "none", "--methods", "gptq"]))
    assert choice.families == ("pennyweight",)
    assert choice.methods == ("gptq",)
    assert set(choice_of(parser().parse_args([])).families) == set(FAMILIES)
    assert choice_of(parser().parse_args(["--methods", "none", "--rivals", "hqq"])).families == ("hqq",)
    with pytest.raises(ValueError, match="unknown family 'x'"):
        choice_of(parser().parse_args(["--rivals", "x"]))
    with pytest.raises(ValueError, match="FAMILY=PYTHON"):
        choice_of(parser().parse_args(["--python", "hqq"]))


def test_the_nets_of_digits_can_be_called():
    for name, make in nets.NETS.items():
        net = make()
        assert net(torch.rand(3, 1, 8, 8)).shape == (3, 10)
        assert all(isinstance(net.get_submodule(layer), nn.Linear | nn.Conv2d) for layer in net.layers)
        assert name in SUBJECTS


def test_folded_norms_compute_the_same():
    net = nets.Conv()
    norms = nets._with_norms(net)
    for norm in norms.values():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        norm.weight.data.uniform_(0.5, 2)
        norm.bias.data.normal_()
    norms.eval()
    x = torch.rand(4, 1, 8, 8)
    expected = net.eval()(x)
    torch.testing.assert_close(nets._folded(net, norms)(x), expected)


def test_targets_name_rows_that_exist_and_are_judged_by_their_interval(tmp_path) -> None:
    def values(factor: float) -> dict:
        return {"per_sequence": {"kl": [factor * (1 + i / 10) for i in range(10)]}}

    known = {
        (family, name) for family in ("pennyweight", "torchao", "llm-compressor") for name in FAMILIES[family].rows()
    }
    results = Results(tmp_path / "r.json")
    for t in targets.TARGETS:
        assert ("pennyweight", t.ours) in known
        assert t.against in known
    first = targets.TARGETS[0]
    for family, name, factor in (("pennyweight", first.ours, 0.19), (*first.against, 1.0)):
        results.add(
            {"subject": "lm", "digest": "x", "family": family, "name": name, "bits": 4.0, "figures": values(factor)}
        )
    rows = targets.table(results)
    assert [(r[0], r[-1]) for r in rows] == [(first.work, "met")]
    assert rows[0][5] == "0.190 (0.190 to 0.190)"


# -- SmolLM2 ---------------------------------------------------------------------------------------------------------


def _words(text):
    """A tokenizer for tests: a letter or a space is a token."""
    return {"input_ids": [ord(c) for c in text]}


def _tokens(text, **_):
    return _words(text)


def test_smollm2_is_calibrated_and_evaluated_on_different_text(monkeypatch):
    pytest.importorskip("diffusers")  # READMEs of installed packages
    some = corpus.docstrings("calibration")
    monkeypatch.setattr(corpus, "docstrings", lambda name: some if name == "calibration" else ())  # train is large
    evaluated = smollm2.evaluation(_tokens, 16, 32)
    assert evaluated.shape == (16, 32)
    assert len({tuple(w.tolist()) for w in evaluated}) == 16
    texts = ["".join(map(chr, w.tolist())) for w in evaluated]
    sources = smollm2.evaluated()
    for part, source in ((texts[:10], "reference"), (texts[10:14], "readmes"), (texts[14:], "licences")):
        assert all(any(t in whole for whole in sources[source]) for t in part)
    calibrated = "".join(map(chr, smollm2.calibration(_tokens, 64, 32).flatten().tolist()))
    assert not any(t in calibrated for t in texts)
    with pytest.raises(ValueError, match="100000 windows of 256 asked for"):
        smollm2.calibration(_tokens, 100_000, 256)


def test_smollm2_has_rows_of_its_own():
    ours = {n for n, row in FAMILIES["pennyweight"].rows().items() if row.takes("causal", "smollm2")}
    assert {"int8", "int4 g64 zero point gptq", "mxfp4 auto", "mixed 4.25 auto"} <= ours
    for family in FAMILIES.values():
        for name, row in family.rows().items():
            if row.takes("causal", "smollm2"):
                assert "g128" not in name or name.startswith("AWQ"), name
                assert "g32" not in name, name
                assert (family.name, name) != ("gguf", "Q4_1")
    assert reference_of("smollm2")[1] in FAMILIES["torchao"].rows()
    assert reference_of("lm") == REFERENCE


def test_ggml_falls_back_as_llama_cpp_does():
    assert ggml_rival.type_for("Q3_K", 1536) == "Q3_K"
    assert [ggml_rival.type_for(n, 576) for n in ("Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0")] == [
        "IQ4_NL", "Q5_0", "Q5_1", "Q8_0", "Q4_0"
    ]  # fmt: skip
    assert ggml_rival._bits("Q3_K").of([(10, 576), (10, 512)]) == pytest.approx((576 * 4.5 + 512 * 3.4375) / 1088)


def test_weights_of_a_row_are_kept(lm, tmp_path):
    choice = Choice(("pennyweight",), ("int4 g128 tinygemm",), keep=tmp_path / "kept")
    run([lm], choice, Results(tmp_path / "r.json"), lambda _: None)
    weights = load_file(kept(tmp_path / "kept", "pennyweight", "int4 g128 tinygemm"))
    assert set(weights) == {f"{n}.weight" for n in lm.layers}


class _Successor(nn.Module):
    """Thinks that a letter's successor is likely to follow, by as much as is said for the letter."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, input_ids, attention_mask, use_cache):
        logits = torch.zeros(*input_ids.shape, 128)
        logits.scatter_(-1, ((input_ids + 1) % 128).unsqueeze(-1), self.factor)
        return SimpleNamespace(logits=logits)


def test_the_likeliest_continuation_is_chosen():
    lines = "# letters\nsay | bc | xbc | ca | zz\nab | pqr | wz | az | qa\n"
    some = multiple_choice.items(lines)
    assert [item.choices[item.right] for item in some] == ["bc", "pqr"]
    assert [item.right for item in some] == [0, 1]
    assert some[0].category == "letters"
    assert multiple_choice.choose(_Successor(3.0), _words, some) == [0, 1]
    found = multiple_choice.scores(_Successor(3.0), _words, some, batch=3)
    likely, not_likely = 3 - math.log(math.exp(3) + 127), -math.log(math.exp(3) + 127)
    # " bc": the space and b follow nothing, c follows b
    assert found[0, 0] == pytest.approx((2 * not_likely + likely) / 3, rel=1e-5)
    assert found[1, 1] == pytest.approx((2 * not_likely + 2 * likely) / 4, rel=1e-5)
    with pytest.raises(ValueError, match="not a text, its continuation"):
        multiple_choice.items("a | b | b | c | d")


def test_the_items_are_many_and_balanced():
    some = multiple_choice.items()
    assert len(some) >= 200
    places = [sum(item.right == i for item in some) for i in range(4)]
    assert max(places) - min(places) <= 1
    assert len({item.text + item.choices[item.right] for item in some}) == len(some)


def test_answers_are_kept_and_judged_beside_the_float_model(tmp_path):
    right = [item.right for item in multiple_choice.items()]
    answers = multiple_choice.Answers(tmp_path / "a.json", "d")
    answers.add(*multiple_choice.FLOAT, right)
    wrong = [(r + 1) % 4 if i % 2 else r for i, r in enumerate(right)]
    answers.add("torchao", "int4", wrong)
    found = multiple_choice.Answers(tmp_path / "a.json").scores()
    assert found[multiple_choice.FLOAT].right.value == 1
    score = found["torchao", "int4"]
    assert score.right.value == score.same.value == pytest.approx(0.5, abs=0.01)
    assert score.change.value == pytest.approx(-0.5, abs=0.01)
    assert score.change.low < -0.5 < score.change.high
    assert multiple_choice.Answers(tmp_path / "a.json", "other").rows == {}


def test_the_loss_of_every_kind_has_a_name() -> None:
    assert {kind.measure for kind in KINDS.values()} <= targets.LOSS.keys()

"""quantize --algorithm, --budget: what quantize_ makes of the model in memory, on disk."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import pennyweight as pw
from pennyweight.algorithms.mixed_precision.latency import CallTimer
from pennyweight.io.meta_model import load_tokenizer
from pennyweight.quantize import Latency
from pennyweight.report.evaluation_inputs import load_folder, read_texts, text_batches
from tests import forked
from tests.cli.conftest import snapshot

GROUPS = ("--config", "int3", "--group-size", "32", "--skip", "lm_head")


def test_it_writes_what_quantize_makes(run: Any, writer: Path, text: Path, tmp_path: Path) -> None:
    before = snapshot(writer)
    out = tmp_path / "out"
    result = run("quantize", writer, out, *GROUPS, "--algorithm", "gptq", "--calibration", text, "--json", "-")
    assert result.exit_code == 0, result.stderr
    rows = [r for r in json.loads(result.stdout)["rows"] if r["scheme"]]
    assert rows
    assert all(r["error"] <= 1.0001 for r in rows)
    assert snapshot(writer) == before
    model = load_folder(str(writer))
    batches = text_batches(model, load_tokenizer(str(writer)), read_texts([str(text)]), batch=1, length=512, limit=128)
    config = pw.IntxWeightOnlyConfig(torch.int3, pw.PerGroup(32))

    def but_head(module: torch.nn.Module, name: str) -> bool:
        return isinstance(module, torch.nn.Linear) and name != "lm_head"

    pw.quantize_(model, config, but_head, calibration=batches, algorithm="gptq")
    again = load_folder(str(out))
    ids = batches[0]["input_ids"][:1]
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert json.loads((out / "config.json").read_text())["quantization_config"]["modules_to_not_convert"] == ["lm_head"]
    assert (out / "tokenizer.json").exists()


def test_weights_that_stay_in_files(run: Any, writer: Path, text: Path, tmp_path: Path) -> None:
    arguments = (*GROUPS, "--algorithm", "gptq", "--calibration", text)
    whole, out = run("quantize", writer, tmp_path / "whole", *arguments), tmp_path / "out"
    assert whole.exit_code == 0, whole.stderr
    low = run("quantize", writer, out, *arguments, "--max-memory", "10kB")
    assert "raise max_memory" in low.stderr
    assert not out.exists()
    result = run("quantize", writer, out, *arguments, "--max-memory", "1GB")
    assert result.exit_code == 0, result.stderr
    assert snapshot(out) == snapshot(tmp_path / "whole")
    several = run("quantize", writer, tmp_path / "other", *GROUPS, "--max-memory", "1GB")
    assert "--max-memory is for --algorithm and --budget" in several.stderr
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["-m", "pennyweight", "quantize", writer, tmp_path / "two", *arguments, "--max-memory", "1GB"]
    two = forked.run([*torchrun, *command])
    assert two.returncode == 0, two.stderr
    assert snapshot(tmp_path / "two") == snapshot(tmp_path / "whole")


def test_a_budget_over_ranks(
    run: Any, writer: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text.write_text(text.read_text() * 4)
    budget = ("--budget", "5 bpw", "--calibration", text, "--algorithm", "gptq", "--skip", "lm_head")
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        patch.setenv("RANK", "0")
        refused = run("quantize", writer, tmp_path / "refused", *budget)
    assert "processes then share the weights of each block, and the trials of the search" in refused.stderr
    limits = (*budget, "--max-memory", "1GB", "--save-config")
    assert run("quantize", writer, tmp_path / "one", *limits, tmp_path / "one.yaml").exit_code == 0
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pennyweight"]
    two = forked.run([*torchrun, "quantize", writer, tmp_path / "two", *limits, tmp_path / "two.yaml"])
    assert two.returncode == 0, two.stderr
    assert two.stderr.count("bits per weight") == 1
    assert snapshot(tmp_path / "two") == snapshot(tmp_path / "one")
    assert (tmp_path / "two.yaml").read_bytes() == (tmp_path / "one.yaml").read_bytes()


def test_a_budget_and_a_gate(run: Any, writer: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text.write_text(text.read_text() * 8)
    arguments = ("--budget", "5 bpw", "--calibration", text, "--algorithm", "gptq", "--skip", "lm_head")
    refused = run("quantize", writer, out, *arguments, "--max-kl", 1e-9, "--text", text)
    assert refused.exit_code == 2
    assert "worst layers" in refused.stderr
    assert not out.exists()
    result = run("quantize", writer, out, *arguments)
    assert result.exit_code == 0, result.stderr
    assert "bits per weight" in result.stderr
    held = [t for t in pw.load(out).values() if isinstance(t, pw.AffineQuantizedTensor)]
    assert 8 * sum(t.nbytes for t in held) <= 5 * sum(t.numel() for t in held)


def test_a_budget_for_weights_that_stay_in_files(
    run: Any, writer: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text.write_text(text.read_text() * 8)
    monkeypatch.setattr("pennyweight.cli.quantize_in_memory.LENGTH", 32)
    arguments = ("--budget", "5 bpw", "--calibration", text, "--algorithm", "gptq", "--skip", "lm_head")
    whole = run("quantize", writer, tmp_path / "whole", *arguments)
    assert whole.exit_code == 0, whole.stderr
    out, low = tmp_path / "out", ("--max-memory", "1GB")
    for budget in ("10kB", "60kB"):
        refused = run("quantize", writer, out, *arguments, "--max-memory", budget)
        assert "raise max_memory" in refused.stderr
        assert not out.exists()
    refused = run("quantize", writer, out, *arguments, *low, "--budget", "1.1x latency")
    assert "give a budget of bits or bytes" in refused.stderr
    assert not out.exists()
    measured: list[str] = []
    module = import_module("pennyweight.algorithms.mixed_precision.sensitivity")
    measure = module.Chain.measure

    def measuring(self: Any, b: int, values: Any, until: int) -> Any:
        if len(measured) == until:
            raise KeyboardInterrupt
        measured.extend(dict.fromkeys(value.name for value in values))
        return measure(self, b, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.Chain, "measure", lambda *a: measuring(*a, until=7))
        stopped = run("quantize", writer, out, *arguments, *low)
    assert stopped.exit_code == 130
    assert "run the same command again to resume" in stopped.stderr
    with pytest.MonkeyPatch.context() as patch:  # the search goes on, and the second run stops later
        patch.setattr(module.Chain, "measure", lambda *a: measuring(*a, until=-1))
        solving(patch, until=3)
        assert run("quantize", writer, out, *arguments, *low).exit_code == 130
    assert len(measured) == len(set(measured))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.Chain, "measure", None)
        result = run("quantize", writer, out, *arguments, *low)
    assert result.exit_code == 0, result.stderr
    assert snapshot(out) == snapshot(tmp_path / "whole")


@pytest.mark.parametrize("memory", [(), ("--max-memory", "1GB")])
def test_a_dry_run_of_a_budget_does_not_search(
    memory: Any, run: Any, writer: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text.write_text(text.read_text() * 8)
    monkeypatch.setattr("pennyweight.cli.quantize_in_memory.LENGTH", 32)
    monkeypatch.setattr("pennyweight.algorithms.search", None)
    arguments = ("--budget", "4.5 bpw", "--calibration", text, "--algorithm", "gptq", "--skip", "lm_head", "--dry-run")
    result = run("quantize", writer, tmp_path / "out", *arguments, *memory, "--json", "-")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    note, search, used, quantizing, more = report["notes"][:5]
    assert note.endswith("the largest candidate within the budget; the search chooses for each")
    assert search.startswith("search, 14 weights under 5 candidates: about ")
    assert "from the block of the weight on, by the time of one: " in search
    assert used.startswith("memory of the search")
    assert quantizing.startswith("calibration with ")
    assert more.startswith("memory")
    assert ("2 processes" in search) is ("2 processes" in quantizing) is bool(memory)
    rows = [row for row in report["rows"] if row["scheme"]]
    assert len(rows) == 14
    assert all("int4" in row["scheme"] for row in rows)
    assert not (tmp_path / "out").exists()
    refused = run("quantize", writer, tmp_path / "out", *arguments, "--save-config", tmp_path / "found.yaml")
    assert "--save-config writes the config that --budget finds; leave it out, or --dry-run" in refused.stderr


def test_a_budget_of_time(run: Any, writer: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []

    def call(run: Any, device: torch.device) -> float:
        seen.append(run().logits.shape)
        return 1.0

    def layer(row: Any, w: Any, rows: tuple[int, ...], limit: Any) -> tuple[Latency, ...]:
        return tuple(Latency(m, 20_000.0, 20_000.0 / (16 - w.spec.format.bits)) for m in rows)

    module = import_module("pennyweight.algorithms.mixed_precision.candidates")
    monkeypatch.setattr(module, "CallTimer", lambda: CallTimer(call, layer))
    for name in ("CANDIDATES", "FASTEST"):
        monkeypatch.setattr(module, name, getattr(module, name)[2:3])
    monkeypatch.setattr("pennyweight.cli.quantize_in_memory.LENGTH", 32)
    arguments = ("--calibration", text, "--algorithm", "nearest", "--skip", "lm_head")
    result = run("quantize", writer, tmp_path / "a", "--budget", "1.1x latency", "--budget", "9 bpw", *arguments)
    assert result.exit_code == 0, result.stderr
    assert "faster than float" in result.stderr
    result = run("quantize", writer, tmp_path / "b", "--budget", "1 us", "--latency-tokens", 5, *arguments)
    assert result.exit_code == 2
    assert "er than float" in result.stderr
    assert list(dict.fromkeys(shape[:2] for shape in seen)) == [(1, 1), (1, 5)]
    assert not (tmp_path / "b").exists()


def solving(monkeypatch: pytest.MonkeyPatch, until: int | None = None) -> list[str]:
    """The names of the weights that are solved; Ctrl-C comes before number ``until``."""
    module, names = import_module("pennyweight.quantize.pipeline"), []
    whole = module.solve_in_model

    def solve(model: Any, row: Any, *rest: Any) -> Any:
        if len(names) == until:
            raise KeyboardInterrupt
        names.append(row.name)
        return whole(model, row, *rest)

    monkeypatch.setattr(module, "solve_in_model", solve)
    return names


def test_an_interrupted_job_goes_on(run: Any, writer: Path, text: Path, tmp_path: Path) -> None:
    arguments = (*GROUPS, "--algorithm", "gptq", "--calibration", text)
    with pytest.MonkeyPatch.context() as patch:
        every = solving(patch)
        assert run("quantize", writer, tmp_path / "whole", *arguments).exit_code == 0
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        solving(patch, until=len(every) - 2)
        stopped = run("quantize", writer, out, *arguments)
    assert stopped.exit_code == 130
    assert "run the same command again to resume" in stopped.stderr
    assert [p.name for p in out.iterdir()] == [".calibration"]
    another = run("quantize", writer, out, *GROUPS, "--algorithm", "nearest")
    assert "is of another run: recipe, data differ" in another.stderr
    with pytest.MonkeyPatch.context() as patch:
        again = solving(patch)
        result = run("quantize", writer, out, *arguments)
    assert result.exit_code == 0, result.stderr
    assert 0 < len(again) < len(every)
    assert snapshot(out) == snapshot(tmp_path / "whole")


def test_no_resume_begins_anew(run: Any, writer: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / ".calibration").mkdir(parents=True)
    (out / ".calibration" / "calibration.json").write_text("{}")
    arguments = (*GROUPS, "--algorithm", "nearest")
    assert "is of another run" in run("quantize", writer, out, *arguments).stderr
    (out / ".calibration").mkdir(exist_ok=True)
    result = run("quantize", writer, out, *arguments, "--no-resume")
    assert result.exit_code == 0, result.stderr
    assert not (out / ".calibration").exists()


def test_what_cannot_be_copied_leaves_no_half_checkpoint(run: Any, writer: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.json").write_text("{}")
    (writer / "more.json").symlink_to(tmp_path / "elsewhere.json")
    out = tmp_path / "sub" / "out"
    result = run("quantize", writer, out, *GROUPS, "--algorithm", "nearest")
    assert result.exit_code == 2
    assert "more.json" in result.stderr
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    assert [p.name for p in out.iterdir()] == [".calibration"]  # what was solved is not lost
    (writer / "more.json").unlink()
    assert run("quantize", writer, out, *GROUPS, "--algorithm", "nearest").exit_code == 0
    assert (out / "model.safetensors").exists()


def test_an_old_checkpoint_is_replaced_whole(run: Any, writer: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("quantize", writer, out, "--config", "int8", "--max-shard-size", "40kB").exit_code == 0
    arguments = (*GROUPS, "--algorithm", "nearest")
    assert "is not empty" in run("quantize", writer, out, *arguments).stderr
    assert run("quantize", writer, out, *arguments, "--force").exit_code == 0
    assert run("quantize", writer, tmp_path / "fresh", *arguments).exit_code == 0
    assert snapshot(out) == snapshot(tmp_path / "fresh")


def test_a_recipe_in_a_file_and_a_dry_run(run: Any, writer: Path, text: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("- gptq: {damping: 0.05, sweeps: 1}\n")
    out = tmp_path / "out"
    result = run("quantize", writer, out, *GROUPS, "--algorithm", recipe, "--calibration", text, "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert not out.exists()
    result = run("quantize", writer, out, *GROUPS, "--algorithm", recipe, "--calibration", text)
    assert "gptq(damping=0.05, sweeps=1)" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "int4", "--budget", "4 bpw"], "--budget chooses the config"),
        (["--budget", "4 bpw"], "pass text with --calibration"),
        (["--config", "int4", "--algorithm", "gptq"], "pass text with --calibration"),
        (["--config", "int4", "--algorithm", "gtpq"], "did you mean 'gptq'"),
        ([], "--config is required"),
        (["--config", "int4", "--latency-tokens", "1"], "--latency-tokens must be positive and needs --budget"),
    ],
)
def test_what_does_not_fit_is_refused(run: Any, writer: Path, tmp_path: Path, arguments: Any, message: str) -> None:
    result = run("quantize", writer, tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()

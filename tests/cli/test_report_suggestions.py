"""report: every suggested option, given to quantize, has the bytes and the error that the page promises."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import pennyweight as pw
from pennyweight.report.evaluation_inputs import load_folder
from pennyweight.report.layers import model_bytes
from pennyweight.report.page_assembly import gather
from pennyweight.report.page_data import Page
from pennyweight.report.suggestions import Change, replaced, suggest, try_change
from tests.report.small import llama, prompts, quantized


def page_of(folder: Path, writer: Path, text: Path, **how: Any) -> Page:
    return gather(
        str(folder), str(writer), [str(text)], command="", batch=8, length=16, limit=None, **{"trials": 12, **how}
    )


def check_suggestions(run: Any, writer: Path, text: Path, tmp_path: Path, base: list[str]) -> list[str]:
    """Quantize by each suggestion; the options that were suggested."""
    at = base.index("--layer") if "--layer" in base else len(base)
    config, rest = base[:at], base[at:]
    assert run("quantize", writer, tmp_path / "small", *base).exit_code == 0
    model = page_of(tmp_path / "small", writer, text).models[0]
    assert model.suggestions
    for i, s in enumerate(model.suggestions):
        options = list(s.change.options)
        options += [] if s.change.whole else config
        options += [] if s.change.note else rest
        assert run("quantize", writer, tmp_path / f"s{i}", *options).exit_code == 0
        exact = load_folder(str(writer))
        changed = load_folder(str(tmp_path / f"s{i}"), str(writer))
        assert model.bytes - model_bytes(changed) == s.saves, s.change.text
        again = page_of(tmp_path / f"s{i}", writer, text, trials=0).models[0].comparison
        assert again is not None
        assert again.kl is not None
        assert again.kl.mean == pytest.approx(s.error_after, rel=1e-6), s.change.text
        assert model_bytes(exact) == model.bytes_float
    gains = [s.gain for s in model.suggestions]
    assert gains == sorted(gains, reverse=True)
    shown = [shlex.split(step.options) for step in model.verdict.steps if step.options]
    assert shown == [list(s.change.options) for s in model.suggestions][: len(shown)]
    return [s.change.text for s in model.suggestions]


def test_four_bits(run: Any, writer: Path, text: Path, tmp_path: Path) -> None:
    options = check_suggestions(run, writer, text, tmp_path, ["--config", "int4", "--group-size", "64"])
    assert "--embeddings int8" in options
    assert "--config int6" in options
    assert any("--layer" in text for text in options)


def test_eight_bits_with_room(run: Any, encoder: Path, text: Path, tmp_path: Path) -> None:
    options = check_suggestions(run, encoder, text, tmp_path, ["--config", "int8"])
    assert "--embeddings int8" in options


def test_tied_embeddings(run: Any, writer: Path, text: Path, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig.from_pretrained(writer)
    config.tie_word_embeddings = True
    transformers.LlamaForCausalLM(config).save_pretrained(writer)
    options = check_suggestions(run, writer, text, tmp_path, ["--config", "8da4w", "--layer", "lm_head=none"])
    assert "--embeddings int8" in options
    steps = page_of(tmp_path / "small", writer, text).models[0].verdict.steps
    assert any(step.text.endswith("Leave out the option that excludes lm_head.") for step in steps)


def test_a_trial_leaves_the_model_as_it_was() -> None:
    model = llama()
    small = quantized(model)
    comparison = pw.compare(model, small, prompts())
    before = {name: id(p) for name, p in small.named_parameters()}
    change = Change(("--layer", "model.layers.*.mlp.down_proj=int8"), "")
    found = try_change(model, small, comparison, prompts(), change, kind="logits", pooling="mean")
    assert found is not None
    assert found.saves < 0
    assert found.error_after < found.error_before == comparison.kl.mean
    assert {name: id(p) for name, p in small.named_parameters()} == before
    small.again = small.lm_head  # a module with two names
    with replaced(small, dict.fromkeys(("lm_head.weight", "again.weight"), model.lm_head.weight)):
        assert small.lm_head.weight is model.lm_head.weight
    assert {name: id(p) for name, p in small.named_parameters()} == before


def test_changes_that_do_not_fit_are_left_out() -> None:
    model = llama()
    small = quantized(model)
    comparison = pw.compare(model, small, prompts())
    for options in (("--layer", "nothing=int8"), ("--config", "int4", "--group-size", "32")):  # as it is already
        change = Change(options, "", options[0] == "--config")
        assert try_change(model, small, comparison, prompts(), change, kind="logits", pooling="mean") is None


def test_trials_end_in_time() -> None:
    model = llama()
    small = quantized(model)
    comparison = pw.compare(model, small, prompts())
    said: list[str] = []
    how: dict[str, Any] = {"kind": "logits", "pooling": "mean", "notify": said.append}
    assert suggest(model, small, comparison, prompts(), {}, seconds=-1.0, **how) == []
    assert said == ["no time for more trials; --trials N sets their number"]

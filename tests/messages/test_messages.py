"""Every message of the tables names the argument, layer or file, what was given, what is expected, and what to do;
nothing has changed when it is raised."""

from __future__ import annotations

import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import pennyweight as pw
from pennyweight.cli.app import app
from pennyweight.core.model_arguments import KINDS
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.support.arguments import check_number, close_names, did_you_mean, show
from tests import forked
from tests.messages import world
from tests.messages.commands import COMMANDS, USAGE
from tests.messages.table import TABLE, Row

LONGEST = 420  # characters
INTERNALS = (
    "object has no attribute", "not supported between instances", "positional argument", "is not callable",
    "not iterable", "unhashable", "NoneType", "<class ", "<function", "<lambda>", "_orig_mod.lm_head'", "Traceback",
    "pennyweight.core", "pennyweight.planning", "torch/", "site-packages", "must be str, bytes", " at 0x",
)  # fmt: skip
# How messages show the objects behind the names of a row
SHOWN = (
    " in layer '", "a tensor of shape", "a model (", "a list of", "got None", "got {}", ".weight", "Linear:",
    "the model", "Sequential", "FakeQuantizedLinear", "is required", "got 'm'", "takes (m)", "the budget",
    "calibration", "not JSON", " a Report", " a Plan",
)  # fmt: skip
COMMON = {"pw", "torch", "nn", "x", "m", "n", "lambda", "True", "None"}
ROWS = [pytest.param(row, id=f"{group}: {row[0]}") for group, rows in TABLE.items() for row in rows]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    world.write_files(folder)
    return folder


@pytest.fixture
def here(files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the files as the current one; a mistake writes nothing to it."""
    monkeypatch.chdir(files)
    before = contents(files)
    yield files
    assert contents(files) == before


def contents(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def state(model: nn.Module) -> dict[str, Any]:
    """What a call could change: classes, modes, hooks, and the bits of every tensor."""
    out: dict[str, Any] = {
        name: (type(module), module.training, len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    }
    for name, p in model.named_parameters():
        value = p.dequantize() if isinstance(p, AffineQuantizedTensor) else p.detach()
        bits = None if p.is_meta else value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        out[name] = (id(p), type(p), p.dtype, p.requires_grad, bits)
    return out


def check_text(text: str, pieces: tuple[str, ...], written: str) -> None:
    for piece in pieces:
        assert piece in text, f"{piece!r} is missing in: {text}"
    for phrase in INTERNALS:
        assert phrase not in text, f"{phrase!r} is about the implementation: {text}"
    assert len(text) <= LONGEST, f"{len(text)} characters: {text}"
    words = set(re.findall(r"[A-Za-z_][\w-]*|\d+", written)) - COMMON
    assert any(word in text for word in (*words, *SHOWN)), f"nothing of {sorted(words)} is in: {text}"


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_mistake_in_python(row: Row, here: Path) -> None:
    code, kind, pieces = row
    if "ennyweightConfig" in code or "llama" in code:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    used = set(re.findall(r"\w+", code))
    models = {name: make() for name, make in world.MODELS.items() if name in used}
    before = {name: state(model) for name, model in models.items()}
    with pytest.raises(kind) as caught:
        exec(code, {**world.values(), **models})
    if kind not in (KeyError, AttributeError):  # which c[name] and pw.name must raise
        assert not isinstance(caught.value, (KeyError, AttributeError, AssertionError, NotImplementedError))
    check_text(str(caught.value.args[0]) if kind is KeyError else str(caught.value), pieces, code)
    if ".half()" not in code:
        assert {name: state(model) for name, model in models.items()} == before


@pytest.mark.parametrize(("command", "pieces"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_mistake_on_the_command_line(
    command: str, pieces: tuple[str, ...], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = CliRunner().invoke(app, shlex.split(command), catch_exceptions=False)
    assert result.exit_code == 2
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("pennyweight: ")
    check_text(lines[0], pieces, command)
    for name in ("calibration=", "group_size", "on_indivisible", "for_=", "skip="):
        assert name not in lines[0], f"a Python argument: {lines[0]}"


@pytest.mark.parametrize(("command", "text"), USAGE, ids=[command for command, _ in USAGE])
def test_a_mistake_that_the_parser_reports(command: str, text: str, here: Path) -> None:
    result = CliRunner().invoke(app, shlex.split(command), catch_exceptions=False)
    assert result.exit_code == 2
    assert text in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("quantize saved out --config int4", "already quantized"),
        ("convert saved out --to gptqq", "did you mean 'gptq'"),
    ],
)
def test_the_process_prints_one_line(command: str, text: str, here: Path) -> None:
    run = forked.run(["-m", "pennyweight", *shlex.split(command)])
    assert run.returncode == 2
    assert run.stdout == ""
    assert len(run.stderr.splitlines()) == 1
    assert text in run.stderr


# -- the pieces --------------------------------------------------------------------------------------------------------


def public_functions() -> list[Any]:
    found = [(name, getattr(pw, name)) for name in pw.__all__]
    return [pytest.param(f, id=name) for name, f in found if inspect.isfunction(f) and f.__module__ != "contextlib"]


@pytest.mark.parametrize("function", public_functions())
def test_every_public_function_checks_its_arguments(function: Any) -> None:
    """A parameter with the name of a kind of argument is checked: no function has its own rule, or none."""
    named = [name for name in inspect.signature(function).parameters if name in KINDS]
    if named:
        with pytest.raises(TypeError, match=f"^{function.__name__} "):
            function(misspelt_argument=1)


def test_similar_names() -> None:
    assert close_names("int44", ["int8", "int4", "uint4", "nf4"]) == ["int4", "uint4", "int8"]
    assert close_names("INT4", ["int4"]) == ["int4"]
    assert did_you_mean("lm_heat", ["lm_head", "embed"]) == " (did you mean 'lm_head'?)"
    assert did_you_mean("lm_heat", ["wholly", "unlike"]) == ""
    assert did_you_mean(5, ["int4"]) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (nn.Linear(2, 3), "a model (Linear)"),
        (torch.zeros(2, 3), "a tensor of shape (2, 3), torch.float32"),
        (nn.Linear, "the class Linear"),
        ({"w": torch.zeros(1)}, "a state dict of 1 tensors"),
        (list(range(100)), "a list of 100"),
        ("a" * 100, f"'{'a' * 56}..."),
        (object(), "object"),
        (pw.Int8WeightOnlyConfig(), "Int8WeightOnlyConfig()"),
        (abs, "the function abs"),
    ],
)
def test_how_values_are_shown(value: Any, text: str) -> None:
    assert show(value) == text


def test_numbers() -> None:
    check_number("n", 3, 1, integer=True)
    check_number("n", 0.5, 0, below=1)
    for value in (True, "3", None, torch.ones(1)):
        with pytest.raises(TypeError, match="n must be an integer"):
            check_number("n", value, integer=True)
    for value in (float("nan"), -1, 0):
        with pytest.raises(ValueError, match="n must be a positive number"):
            check_number("n", value, positive=True)
    for value in (float("nan"), 1, -0.1):
        with pytest.raises(ValueError, match="of at least 0 and below 1"):
            check_number("n", value, 0, below=1)


def test_a_wrong_type_is_also_a_wrong_value() -> None:
    """Code that catches ValueError around a call sees every invalid argument."""
    with pytest.raises(ValueError, match="model must be"):
        pw.quantize_("model", "int8")  # type: ignore[arg-type]


def test_an_error_of_the_model_keeps_its_cause() -> None:
    with pytest.raises(RuntimeError, match="cannot run on a batch") as caught:
        pw.report.golden(world.mlp(), [torch.randn(4, 63)])
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "mat1 and mat2" in str(caught.value.__cause__)


def test_missing_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The message names the extra."""
    batches = [torch.randn(8, 64) for _ in range(2)]
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ImportError, match=r"pip install scipy"):
        pw.search(world.mlp(), batches, "6 bpw")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"pip install huggingface_hub"):
        pw.push_to_hub(tmp_path, "me/model")

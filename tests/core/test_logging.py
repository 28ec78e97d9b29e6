"""What the library records, and that it prints nothing."""

import ast
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import pennyweight as pw
from tests import forked


class Recorded(logging.Handler):
    """Keeps what the library records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def text(self) -> str:
        return "\n".join(record.getMessage() for record in self.records)


@pytest.fixture
def recorded():
    handler, logger = Recorded(), logging.getLogger("pennyweight")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def test_quantize_and_dequantize(recorded):
    model = net()
    report = pw.quantize_(model, "int8")
    assert f"quantize_: {report.config}: {report.summary()}" in recorded.text
    assert "2.weight: int8[*] scale=f32" in recorded.text
    pw.dequantize_(model)
    assert "dequantize_: 2 parameters are plain tensors again" in recorded.text
    loggers = {r.name: r.levelno for r in recorded.records}
    assert loggers["pennyweight.quantize.dequantize"] == logging.INFO


def test_files_and_resumed_runs(recorded, tmp_path):
    model, data = net(), [torch.randn(16, 64) for _ in range(2)]
    pw.quantize_(model, "int8", calibration=data, algorithm="gptq", resume=tmp_path / "run")
    pw.save(model, tmp_path / "model")
    assert "save: 4 tensors" in recorded.text
    pw.load(tmp_path / "model", net())
    assert "load: 4 tensors, 2 of them quantized" in recorded.text
    state = {name: torch.randn(shape) for name, shape in (("weight", (64, 64)), ("bias", (64,)))}
    for _ in range(2):  # as after an interruption: the same model, data and options
        again = nn.Linear(64, 64)
        again.load_state_dict(state)
        pw.quantize_(nn.Sequential(again), "int8", calibration=data, algorithm="gptq", resume=tmp_path / "second")
    assert f"resume: 1 weights were solved before, in {tmp_path / 'second'}" in recorded.text
    assert "0.weight: taken from the interrupted run" in recorded.text


def test_fallbacks(recorded):
    model = net()
    pw.quantize_(model, "int8")
    pw.reset_fallbacks()
    with pytest.warns(pw.FallbackWarning):
        torch.special.expit(model[0].weight)
    assert "runs on a dequantized copy" in recorded.text


def test_nothing_is_shown_unless_asked_for():
    code = "import torch, pennyweight as pw{}\nm = torch.nn.Linear(64, 64)\npw.quantize_(m, 'int8')\npw.dequantize_(m)"
    ask = "\nimport logging; logging.basicConfig(); logging.getLogger('pennyweight').setLevel(logging.INFO)"
    for setup, lines in (("", 0), (ask, 2)):
        run = forked.run(["-c", code.format(setup)], check=True)
        assert run.stdout == ""
        shown = [line for line in run.stderr.splitlines() if "quantize" in line]
        assert len(shown) == lines
        assert all(line.startswith("INFO:pennyweight.quantize.") for line in shown)


def test_library_code_does_not_print():
    """Commands print; nothing else does."""
    package = Path(pw.__file__).parent
    printing = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                printing.add(file.relative_to(package).as_posix())
    assert {name for name in printing if not name.startswith("cli/")} == set()

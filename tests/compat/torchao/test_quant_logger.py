"""quant_logger: what is printed, saved and written; quantized weights; compiled models."""

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.compat.torchao.algorithms import quant_logger
from pennyweight.compat.torchao.algorithms.quant_logger import (
    ActivationLoggingTensor,
    add_activation_loggers,
    enable_log_stats_to_file,
    enable_log_tensor_save_tensors_to_disk,
    get_default_stats,
    log_parameter_info,
    reset_counter,
)

X = torch.tensor([[[1.0, -2.0]], [[3.0, 0.0]]])


@pytest.fixture
def model() -> Iterator[nn.Sequential]:
    reset_counter()
    made = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 1, bias=False)))
    for p in made.parameters():
        nn.init.constant_(p, 0.5)
    yield made
    quant_logger._define(quant_logger._print)


def test_what_is_printed(model: nn.Sequential, capsys: pytest.CaptureFixture[str]) -> None:
    y = model(X)
    log_parameter_info(model)
    add_activation_loggers(model)
    assert torch.equal(model(X), y)
    assert capsys.readouterr().out.splitlines() == [
        "t=param, c=0, fqn='0.weight', op='', max_abs=0.50, avg=0.50, std=0.00",
        "t=param, c=1, fqn='0.bias', op='', max_abs=0.50, avg=0.50, std=0.00",
        "t=param, c=2, fqn='1.0.weight', op='', max_abs=0.50, avg=0.50, std=0.00",
        "t=act, c=3, fqn='0.weight', op='linear', extra='MKN=2|2|3', max_abs=3.00, avg=0.50, std=1.80",
        "t=act, c=4, fqn='1.0.weight', op='linear', extra='MKN=2|3|1', max_abs=2.00, avg=1.00, std=1.00",
    ]
    reset_counter()
    model[0](X)
    assert "c=0" in capsys.readouterr().out


def test_statistics() -> None:
    assert get_default_stats(X) == (3.0, 0.5, pytest.approx(3.25**0.5))
    assert get_default_stats(torch.empty(0)) == (0.0, 0.0, 0.0)


def test_tensors_on_disk(model: nn.Sequential, tmp_path: Path) -> None:
    enable_log_tensor_save_tensors_to_disk(tmp_path / "new")
    add_activation_loggers(model)
    model(X)
    log_parameter_info(model)
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == [
        "0.bias__param.pt", "0.weight__param.pt", "0.weight_linear_act.pt", "1.0.weight__param.pt",
        "1.0.weight_linear_act.pt",
    ]  # fmt: skip
    assert torch.equal(torch.load(tmp_path / "new" / "0.weight_linear_act.pt"), X)


def test_statistics_in_a_file(model: nn.Sequential, tmp_path: Path) -> None:
    enable_log_stats_to_file(tmp_path / "log.csv")
    add_activation_loggers(model)
    model(X)
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [(r["tag"], r["counter_val"], r["fqn"], r["extra"]) for r in rows] == [
        ("act", "0", "0.weight", "MKN=2|2|3"), ("act", "1", "1.0.weight", "MKN=2|3|1"),
    ]  # fmt: skip
    assert float(rows[0]["max_abs"]) == 3.0


def test_the_weight(model: nn.Sequential, capsys: pytest.CaptureFixture[str]) -> None:
    layer = model[0]
    add_activation_loggers(model)
    first = layer.weight
    add_activation_loggers(model)
    assert layer.weight is first
    assert isinstance(layer.weight, ActivationLoggingTensor)
    assert repr(layer.weight).startswith("ActivationLoggingTensor(fqn=0.weight")
    assert torch.equal(layer.weight + 1, torch.full((3, 2), 1.5))
    assert torch.equal(layer.weight.t(), torch.full((2, 3), 0.5))
    capsys.readouterr()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(X), model(X))
    assert capsys.readouterr().out.count("t=act") == 4


def test_quantized_weights(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    pw.quantize_(model, pw.Int8WeightOnlyConfig())
    y = model(torch.ones(1, 64))
    log_parameter_info(model)
    add_activation_loggers(model)
    assert torch.equal(model(torch.ones(1, 64)), y)
    assert "MKN=1|64|8" in capsys.readouterr().out

"""When Triton kernels are used on a device: switched off, trusted, proven, refused. Without a device and Triton."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pennyweight.core.formats import INT4
from pennyweight.core.spec import QuantSpec
from pennyweight.kernels.table import Case, select
from pennyweight.kernels.triton import self_test, self_test_verdict
from pennyweight.support import environment
from pennyweight.support.errors import ArgumentError

TARGET = "cuda:sm_90"


class Device:
    """Two cards, and what the cases of each family give there."""

    def __init__(self) -> None:
        self.results: dict[str, dict[str, str | None]] = {
            "weight_only": {"int4, 1 row": None},
            "other": {"first": None},
        }
        self.runs: list[str] = []
        self.capturing = False

    def prove(self, device: torch.device, family: str) -> dict[str, str | None]:
        self.runs.append(family)
        return self.results[family]


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    found = Device()
    monkeypatch.delenv(environment.GPU.name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="Card"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    monkeypatch.setattr(self_test_verdict, "target_of", lambda device: TARGET)
    monkeypatch.setattr(self_test_verdict, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(self_test_verdict.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.7"))  # type: ignore[arg-type]
    monkeypatch.setattr(self_test_verdict, "_PROVERS", [found.prove])
    monkeypatch.setitem(self_test_verdict.FAMILIES, "other", ("triton_other", "torch's kernel runs"))
    self_test_verdict.verdict.cache_clear()
    yield found
    self_test_verdict.verdict.cache_clear()


def next_process() -> None:
    self_test_verdict.verdict.cache_clear()


def test_the_cases_are_registered() -> None:
    assert len(self_test_verdict._PROVERS) == 1
    assert {case.family for case in self_test.cases(full=True)} <= self_test_verdict.FAMILIES.keys()
    assert {case.family for case in self_test.cases()} == self_test_verdict.FAMILIES.keys()


def test_names_of_cases_are_different() -> None:
    names = [case.name for case in self_test.cases(full=True)]
    assert len(set(names)) == len(names)


def test_a_verdict_is_kept(device: Device, tmp_path: Path) -> None:
    for _ in range(3):
        assert self_test_verdict.refusal(TARGET, "weight_only") is None
        next_process()
    assert device.runs == ["weight_only"]
    (kept,) = tmp_path.iterdir()
    assert json.loads(kept.read_text("utf-8")) == {"weight_only": None}


def test_the_cases_run_outside_of_modes(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among fake tensors every case would fail, and that verdict would be kept."""
    made: list[Any] = []

    def prove(device: torch.device, family: str) -> dict[str, str | None]:
        made.append(torch.zeros(1))
        return {"int4, 1 row": None}

    monkeypatch.setattr(self_test_verdict, "_PROVERS", [prove])
    with FakeTensorMode(), torch.inference_mode():
        assert self_test_verdict.refusal(TARGET, "weight_only") is None
    assert type(made[0]) is torch.Tensor
    assert not made[0].is_inference()


def test_a_refusal_is_a_constant_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that traced it would read the environment, files and the device."""
    monkeypatch.setenv(environment.GPU.name, "0")

    def product(x: torch.Tensor) -> torch.Tensor:
        return x if self_test_verdict.refusal(TARGET, "weight_only") is None else x + 1

    assert self_test_verdict.refusal._dynamo_marked_constant  # type: ignore[attr-defined]
    assert torch.equal(torch.compile(product, fullgraph=True, backend="eager")(torch.zeros(2)), torch.ones(2))


def test_a_family_that_fails_is_refused_alone(device: Device, tmp_path: Path) -> None:
    device.results["weight_only"] = {"int4, 1 row": None, "nf4, 3 rows": "two runs differ", "more": "wrong"}
    words = (
        r"does not use its kernel triton_weight_only on Card: it failed its self-test on this device \(nf4, 3 rows: "
        r"two runs differ\); .* are dequantized at each call\. `pennyweight doctor --device cuda` shows all cases"
    )
    with pytest.warns(UserWarning, match=words):
        why = self_test_verdict.refusal(TARGET, "weight_only")
    assert why == "it failed its self-test on this device (nf4, 3 rows: two runs differ)"
    assert self_test_verdict.refusal(TARGET, "other") is None
    next_process()
    assert self_test_verdict.refusal(TARGET, "weight_only") == why  # without a second warning
    assert self_test_verdict.refusal(TARGET, "other") is None
    assert device.runs == ["weight_only", "other"]
    (kept,) = tmp_path.iterdir()
    assert json.loads(kept.read_text("utf-8")) == {"weight_only": why, "other": None}


def test_the_next_row_runs(device: Device) -> None:
    spec = QuantSpec(INT4, (64,), scale=torch.bfloat16, layout="gpu")
    case = Case(spec, None, (64, 192), torch.bfloat16, TARGET)
    assert select("linear", case).name == "triton_weight_only"
    next_process()
    for kept in self_test_verdict.cache_folder().iterdir():
        kept.unlink()
    device.results["weight_only"] = {"int4, 1 row": "wrong"}
    other = Case(spec, None, (64, 320), torch.bfloat16, TARGET)
    with pytest.warns(UserWarning, match="triton_weight_only"):
        assert select("linear", other).name != "triton_weight_only"


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"weight_only": 3}', '{"failed": null}'])
def test_a_file_that_is_no_verdict_is_written_again(device: Device, tmp_path: Path, text: str) -> None:
    self_test_verdict.refusal(TARGET, "weight_only")
    (kept,) = tmp_path.iterdir()
    kept.write_text(text, "utf-8")
    next_process()
    assert self_test_verdict.refusal(TARGET, "weight_only") is None
    assert device.runs == ["weight_only", "weight_only"]
    assert "weight_only" in json.loads(kept.read_text("utf-8"))


def test_a_folder_that_cannot_be_written(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    monkeypatch.setattr(self_test_verdict, "cache_folder", lambda: tmp_path / "file")
    assert self_test_verdict.refusal(TARGET, "weight_only") is None
    next_process()
    assert self_test_verdict.refusal(TARGET, "weight_only") is None
    assert len(device.runs) == 2


def test_switched_off_and_trusted(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    device.results["weight_only"] = {"int4, 1 row": "wrong"}
    monkeypatch.setenv(environment.GPU.name, "0")
    assert self_test_verdict.refusal(TARGET, "weight_only") == "Triton kernels are switched off: PENNYWEIGHT_GPU=0"
    monkeypatch.setenv(environment.GPU.name, "1")
    assert self_test_verdict.refusal(TARGET, "weight_only") is None
    assert device.runs == []


def test_nothing_is_proven_while_a_graph_is_captured(device: Device) -> None:
    device.capturing = True
    with pytest.raises(ArgumentError, match="cannot be while a CUDA graph is captured; run the model once before"):
        self_test_verdict.refusal(TARGET, "weight_only")
    assert device.runs == []


def test_targets_that_are_not_here(device: Device) -> None:
    for target in ("cuda:sm_80", "cpu", "hip:gfx942"):
        assert self_test_verdict.refusal(target, "weight_only") is None
    assert device.runs == []


def test_without_triton(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test_verdict.importlib.util, "find_spec", lambda name: None)
    why = self_test_verdict.refusal(TARGET, "weight_only")
    assert why == "needs triton: pip install 'triton>=3.6'"
    assert device.runs == []


def test_a_case_that_raises_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(case: Any, device: Any) -> str | None:
        if case.name == "int4, 1 row":
            raise RuntimeError("out of resources\nmore")
        return "wrong" if case.name == "nf4, 3 rows" else None

    monkeypatch.setattr(self_test, "run", run)
    found = self_test.prove("cpu", family="weight_only")
    assert found["int4, 1 row"] == "RuntimeError: out of resources"
    assert [name for name, why in found.items() if why is not None] == ["int4, 1 row", "nf4, 3 rows"]
    assert self_test.prove("cpu", family="none") == {}

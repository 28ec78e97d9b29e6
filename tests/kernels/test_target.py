"""Targets: what names them, which rows fit them, and questions about devices that this machine lacks."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import pennyweight as pw
from pennyweight.kernels import target
from pennyweight.kernels.table import kernels
from pennyweight.kernels.target import KNOWN, assume_target, capability, fits, read_target, target_of
from pennyweight.support.errors import ArgumentError

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


@pytest.fixture
def asked() -> Iterator[None]:
    """Whatever torch answers is asked again, in the test and after it."""
    target.forget_targets()
    yield
    target.forget_targets()


def test_devices_of_this_machine() -> None:
    assert target_of("cpu") == target_of(torch.device("cpu")) == "cpu"
    assert (target_of("meta"), target_of("mps:0"), target_of("xpu:1")) == ("meta", "mps", "xpu")


@NO_CUDA
def test_a_fake_device_has_no_capability() -> None:
    with FakeTensorMode():
        x = torch.empty(2, device="cuda")
    assert target_of(x.device) == target_of("cuda") == target_of("cuda:7") == "cuda"


@pytest.mark.parametrize(
    ("properties", "hip", "expected"),
    [
        ({"major": 9, "minor": 0}, None, "cuda:sm_90"), ({"major": 12, "minor": 1}, None, "cuda:sm_121"),
        ({"major": 9, "minor": 4, "gcnArchName": "gfx942:sramecc+:xnack-"}, "7.0", "hip:gfx942"),
    ],
)  # fmt: skip
def test_a_device_that_is_there(
    properties: dict[str, Any], hip: Any, expected: str, monkeypatch: pytest.MonkeyPatch, asked: None
) -> None:
    for name, value in {"is_available": True, "device_count": 2, "current_device": 0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    seen: list[int] = []
    answer = types.SimpleNamespace(**properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: seen.append(i) or answer)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert [target_of("cuda:1"), target_of("cuda:1"), target_of("cuda"), target_of("cuda:3")] == [
        *[expected] * 3,
        "cuda",
    ]
    assert seen == [1, 0], "torch is asked once per device"


@pytest.mark.parametrize(
    ("entry", "inside", "outside"),
    [
        ("cpu", ("cpu",), ("cuda", "cuda:sm_90", "mps")),
        ("cuda", ("cuda", "cuda:sm_80", "cuda:sm_120"), ("cpu", "hip:gfx942")),
        ("cuda:sm_90", ("cuda:sm_90",), ("cuda", "cuda:sm_89", "cuda:sm_100")),
        ("cuda:sm_89+", ("cuda:sm_89", "cuda:sm_90", "cuda:sm_100"), ("cuda", "cuda:sm_80", "hip:gfx942", "cpu")),
        ("hip", ("hip:gfx942",), ("cuda:sm_90",)),
        ("hip:gfx942", ("hip:gfx942",), ("hip:gfx950", "hip")),
    ],
)
def test_entries_of_devices(entry: str, inside: tuple[str, ...], outside: tuple[str, ...]) -> None:
    assert [t for t in (*inside, *outside) if fits((entry,), t)] == list(inside)
    assert fits(None, outside[0])
    assert not fits((), inside[0])


def test_every_row_and_layout_names_targets() -> None:
    """A misspelled entry would never fit anything, in silence."""
    entries = {entry for kernel in kernels() for entry in kernel.devices or ()}
    entries |= {entry for layout in pw.core.layouts.layouts() for entry in layout.devices or ()}
    assert [e for e in sorted(entries) if not any(fits((e,), t) for t in KNOWN)] == []


def test_capability() -> None:
    assert [capability(t) for t in ("cuda:sm_89", "cuda:sm_100", "cuda", "hip:gfx942", "cpu")] == [89, 100, 0, 0, 0]


@pytest.mark.parametrize("text", [*KNOWN, "cuda:sm_103", "hip:gfx1100"])
def test_a_named_target_need_not_be_there(text: str) -> None:
    assert read_target(text) == text


@NO_CUDA
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("sm_90", ("did you mean 'cuda:sm_90'?",)), ("cuda:sm90", ("did you mean 'cuda:sm_90'",)),
        ("gfx942", ("did you mean 'hip:gfx942'?",)), ("cuda", ("no CUDA device", "'cuda:sm_90'")),
        ("gpu", ("no CUDA device", "'cuda:sm_90'")), ("cuda:0", ("neither a target", "cuda:sm_80")),
        ("", ("neither a target",)), ("tpu", ("did you mean",)), ("cuda:sm_9", ("did you mean 'cuda:sm_90'",)),
    ],
)  # fmt: skip
def test_a_wrong_target_is_refused(wrong: str, words: tuple[str, ...]) -> None:
    w = quantized("int4")
    for call in (
        lambda: pw.explain(torch.bfloat16, w, device=wrong),
        lambda: pw.explain(torch.bfloat16, nn.Sequential(nn.Linear(8, 8)), device=wrong),
        lambda: pw.plan(nn.Sequential(nn.Linear(64, 64)), "int8", device=wrong),
    ):
        with pytest.raises(ArgumentError) as error:
            call()
        assert all(word in str(error.value) for word in ("device=", *words)), error.value


def test_a_target_must_be_text() -> None:
    with pytest.raises(TypeError, match="device or a target such as"):
        pw.explain(torch.bfloat16, quantized("int4"), device=0.5)  # type: ignore[call-overload]


def quantized(config: Any, n: int = 512, k: int = 256) -> Any:
    layer = nn.Sequential(nn.Linear(k, n, bias=False, dtype=torch.bfloat16))
    pw.quantize_(layer, config)
    return layer[0].weight


def test_explain_does_not_depend_on_where_the_weight_is() -> None:
    """Packed for the CPU or not: it would be packed on arrival."""
    w = quantized("int4")
    packed, plain = (pw.explain(torch.bfloat16, v, device="cuda:sm_90") for v in (w, w.to_layout("plain")))
    assert packed.rows == plain.rows
    assert packed.case.device == "cuda:sm_90"
    assert "on cuda:sm_90" in str(packed)


def test_explain_on_the_cpu_is_that_without_a_device() -> None:
    w = quantized("int8")
    told = [pw.explain(torch.bfloat16, w, device=d) for d in (None, "cpu", torch.device("cpu"))]
    assert len({next(name for name, _, verdict in t.rows if verdict == "RUNS") for t in told}) == 1


def test_a_model_is_explained_for_a_target() -> None:
    model = nn.Sequential(nn.Linear(256, 512, dtype=torch.bfloat16))
    pw.quantize_(model, "int4")
    here, there = (pw.explain(torch.bfloat16, model, device=d) for d in (None, "mps"))
    assert here.rows[0].kernel != there.rows[0].kernel == "dequantize"
    assert "cpu" not in there.rows[0].note.partition("at each call")[2], "rows for other devices are no reason"


def test_the_text_lists_rows_of_other_devices_in_one_line() -> None:
    text = str(pw.explain(torch.bfloat16, quantized("int4"), device="mps"))
    assert "  for other devices: " in text
    assert "runs on cpu only" not in text


def test_plan_names_bytes_and_kernel_of_a_target() -> None:
    def planned(device: Any) -> Any:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(256, 512, dtype=torch.bfloat16))
        return pw.plan(model, "int4", device=device).rows[0]

    assert planned(None).kernel == planned("cpu").kernel != "dequantize"
    assert (planned("mps").kernel, planned("mps").layout) == ("dequantize", "bits")
    assert planned("mps").bytes_after > 0


def test_plan_of_a_quantized_weight_for_another_target() -> None:
    model = nn.Sequential(nn.Linear(256, 512, dtype=torch.bfloat16))
    pw.quantize_(model, "int4")
    here, there = (pw.plan(model, "int4", device=d).rows[0].kernel for d in (None, "mps"))
    assert here != there == "dequantize"


def test_assumed_targets_end_with_their_context() -> None:
    assert target_of("cpu") == "cpu"
    with assume_target("cuda:sm_90"), assume_target("cuda:sm_100"):
        assert target_of("cuda:3") == "cuda:sm_100"
    with assume_target("hip:gfx942"):
        assert target_of("cuda") == "hip:gfx942"
    assert not target._ASSUMED

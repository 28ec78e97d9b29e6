"""Pickles are read as files are: parts that mean nothing are refused, and all that is written can be read."""

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pennyweight as pw
from pennyweight.core.formats import INT4, INT8, UINT4
from pennyweight.core.spec import FP8_ROW, MXFP8, NF4_DOUBLE, NVFP4, TINYGEMM, ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.core.tensor import rebuild

INT8_ROW = QuantSpec(INT8, (-1,))
NF4 = NF4_DOUBLE.with_(scale=torch.float32)
POINTS = QuantSpec(UINT4, (16,), zero_point=True)
STATIC = ActivationSpec(QuantSpec(INT8, None, zero_point=True), "static")


def made(spec: QuantSpec, **kwargs: Any) -> QT:
    return QT.from_float(torch.randn(8, 64), spec, **kwargs)


def static() -> QT:
    w = made(INT8_ROW, act=STATIC)
    return w.with_(act_scale=torch.tensor([0.5]), act_zero_point=torch.tensor([3], dtype=torch.int8))


def again(w: QT) -> QT:
    file = io.BytesIO()
    torch.save({"w": w}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["w"]


def put(slot: str, value: float) -> Callable[[dict[str, Tensor]], None]:
    def change(parts: dict[str, Tensor]) -> None:
        parts[slot] = parts[slot].clone()
        parts[slot].view(-1)[1 if parts[slot].numel() > 1 else 0] = value

    return change


CASES = {
    "scale NaN": (lambda: made(INT8_ROW), put("scale", float("nan")), "scale: 1 of 8 values are NaN or inf"),
    "scale inf": (lambda: made(INT8_ROW), put("scale", float("inf")), "scale: 1 of 8 values are NaN or inf"),
    "scale negative": (lambda: made(INT8_ROW), put("scale", -0.5), "scale: 1 of 8 values are negative"),
    "offset NaN": (lambda: made(TINYGEMM.with_(block=(32,))), put("offset", float("nan")), "offset: 1 of"),
    "zero point": (lambda: made(POINTS), put("zero_point", 99), "zero_point: values"),
    "code of no number": (lambda: made(NF4), put("codes", 200), "codes: a code is not valid for nf4"),
    "int4 code": (lambda: made(QuantSpec(INT4, (32,))), put("codes", 100), "codes: values"),
    "float8 NaN": (lambda: made(FP8_ROW), put("codes", 0x7F), "codes: a code is not valid for e4m3"),
    "input's scale": (static, put("act_scale", 0.0), "act_scale is zero"),
    "input's scale NaN": (static, put("act_scale", float("nan")), "act_scale: 1 of 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_parts_that_mean_nothing_are_refused(name: str) -> None:
    make, change, said = CASES[name]
    w = make()
    function, args = w.__reduce_ex__(2)[:2]
    assert function is rebuild
    assert torch.equal(rebuild(*args).dequantize(), w.dequantize())
    parts = dict(args[1])
    change(parts)
    with pytest.raises(ValueError, match=said):
        rebuild(args[0], parts, *args[2:])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_would_not_be_read_is_not_written(value: float) -> None:
    w = made(INT8_ROW)
    assert w.scale is not None
    w.scale[1] = value
    with pytest.raises(ValueError, match="scale: 1 of 8 values are NaN or inf"):
        torch.save({"w": w}, io.BytesIO())


def test_negative_scales_of_our_own_are_announced() -> None:
    """GGUF's blocks and other libraries' weights have them."""
    w = made(INT8_ROW)
    assert w.scale is not None
    w.scale.neg_()
    assert torch.equal(again(w).dequantize(), w.dequantize())
    data = json.loads(w.__reduce_ex__(2)[1][0])
    assert data["signed_scale"] is True
    assert json.loads(made(INT8_ROW).__reduce_ex__(2)[1][0])["signed_scale"] is False


def test_pickles_of_older_releases_are_read() -> None:
    w = made(INT8_ROW)
    function, (text, *rest) = w.__reduce_ex__(2)[:2]
    data = json.loads(text)
    del data["signed_scale"]
    assert torch.equal(function(json.dumps(data), *rest).dequantize(), w.dequantize())


KINDS = [INT8_ROW, QuantSpec(INT4, (32,)), POINTS, TINYGEMM, NF4_DOUBLE, NVFP4, MXFP8, FP8_ROW]
STREAMS = [spec.with_(layout="bits") for spec in (POINTS, QuantSpec(INT4, (5,)))]


@pytest.mark.parametrize("spec", KINDS + STREAMS, ids=str)
@pytest.mark.parametrize("numbers", ["normal", "zero", "huge"])
def test_all_that_is_made_is_read(spec: QuantSpec, numbers: str) -> None:
    x = {"normal": torch.randn(8, 64), "zero": torch.zeros(8, 64), "huge": torch.randn(8, 64) * 1e4}[numbers]
    w = QT.from_float(x, spec.with_(layout="plain")).to_layout(spec.layout)
    assert torch.equal(again(w).dequantize(), w.dequantize())


def test_a_kernels_packing_is_pickled_and_read() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(128, 64))
    pw.quantize_(model, pw.Int4WeightOnlyConfig(group_size=32))
    assert torch.equal(again(model[0].weight).dequantize(), model[0].weight.dequantize())
    assert again(model[0].weight.to("meta")).is_meta

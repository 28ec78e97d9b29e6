"""AutoAWQ's gemm files: values by a formula of its own, bytes written back, and everything bad refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pennyweight.core.formats import INT4, UINT4, UINT8
from pennyweight.core.numerics import dequantize, quantize
from pennyweight.core.spec import FP8_ROW, INT8_ROW, TINYGEMM, ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io.codecs.awq import AWQ
from pennyweight.io.file import KeyedError
from pennyweight.io.manifest import Meta
from tests.io.codecs.kept import Tensors, changed, find, read, same_bytes, write

WRITING = AWQ.writing
assert WRITING is not None
# (out, in, group_size)
SIZES = [(8, 128, 128), (16, 96, 32), (24, 40, 8), (8, 30, -1), (64, 256, 64), (8, 3, 1)]


def config(group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm", **more}


def layer(outputs: int, inputs: int, group: int) -> Tensors:
    """Random words: every bit pattern is a weight."""
    groups = 1 if group == -1 else inputs // group
    words = [torch.randint(-(2**31), 2**31, (n, outputs // 8)).to(torch.int32) for n in (inputs, groups)]
    scales = (torch.rand(groups, outputs) * 0.1).half()
    return {"m.qweight": words[0], "m.qzeros": words[1], "m.scales": scales, "m.bias": torch.zeros(outputs).half()}


def numpy_codes(words: Tensor) -> np.ndarray:
    """Output 8 w + k of a row is the nibble of word w that holds output k: a loop over all of them."""
    out = np.zeros((words.shape[0], words.shape[1] * 8), dtype=np.int64)
    unsigned = words.numpy().astype(np.int64) & 0xFFFFFFFF
    for nibble, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        out[:, output::8] = unsigned // 16**nibble % 16
    return out


def formula(tensors: Tensors, group: int) -> Tensor:
    """(q - z) * s, [out, in], in float64 and rounded once to float16."""
    q, z = numpy_codes(tensors["m.qweight"]), numpy_codes(tensors["m.qzeros"])
    s = tensors["m.scales"].numpy().astype(np.float64)
    each = len(q) if group == -1 else group
    value = (q - z.repeat(each, 0)) * s.repeat(each, 0)
    return torch.from_numpy(value.T.astype(np.float16))


@pytest.mark.parametrize(("outputs", "inputs", "group"), SIZES)
def test_values_and_bytes(outputs: int, inputs: int, group: int) -> None:
    tensors = layer(outputs, inputs, group)
    w = read(AWQ, tensors, config(group))["m.weight"]
    assert (w.shape, w.dtype) == ((outputs, inputs), torch.float16)
    assert w.spec == QuantSpec(UINT4, (group,), scale=torch.float16, zero_point=UINT4)
    assert torch.equal(w.dequantize(), formula(tensors, group))
    out = write(AWQ, tensors, config(group))
    assert out.keys() == {"m.qweight", "m.qzeros", "m.scales"}
    assert all(same_bytes(out[name], tensors[name]) for name in out)


def test_the_order_of_a_word() -> None:
    """Word 0x76543210: by hand, output 1 is nibble 4, output 2 nibble 1."""
    tensors = layer(8, 1, -1) | {
        "m.qweight": torch.tensor([[0x76543210]], dtype=torch.int32),
        "m.qzeros": torch.zeros(1, 1, dtype=torch.int32),
        "m.scales": torch.ones(1, 8).half(),
    }
    assert read(AWQ, tensors, config(-1))["m.weight"].dequantize().flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_configs_that_say_the_same() -> None:
    tensors = layer(8, 128, 64)
    value = read(AWQ, tensors, config(64))["m.weight"].dequantize()
    for other in (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"},
        {"quant_method": "awq", "bits": 4, "group_size": 64, "format": "gemm", "version": None, "zero_point": False},
    ):
        assert torch.equal(read(AWQ, tensors, other)["m.weight"].dequantize(), value)
    tensors["m.scales"] = tensors["m.scales"].bfloat16()
    assert read(AWQ, tensors, config(64))["m.weight"].dtype is torch.bfloat16


@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec(UINT4, (32,), scale=torch.float16, zero_point=True),
        QuantSpec(UINT4, (32,), scale=torch.float16, mid=8),
        QuantSpec(INT4, (32,), scale=torch.float16),
        QuantSpec(INT4, (32,), scale=torch.float16, zero_point=True),
        QuantSpec(INT4, (1, -1), scale=torch.float16),
    ],
    ids=str,
)
def test_our_own_tensors_are_written(spec: QuantSpec) -> None:
    meta = Meta(spec, (16, 96), torch.float16)
    assert WRITING.refuses("m.weight", meta) is None
    parts = quantize(torch.randn(16, 96).half(), spec)
    out = WRITING.pack("m.weight", parts, meta)
    assert {n: (t.dtype, tuple(t.shape)) for n, t in out.items()} == WRITING.stored("m.weight", meta)
    method = WRITING.method({"m.weight": meta}, ("lm_head.weight",))
    assert method["modules_to_not_convert"] == ["lm_head"]
    expected = dequantize(parts, spec, (16, 96), torch.float16)
    assert torch.equal(read(AWQ, out, method)["m.weight"].dequantize(), expected)
    assert torch.equal(formula(out, method["group_size"]), expected)


def test_what_cannot_be_written_says_why() -> None:
    good = QuantSpec(UINT4, (32,), scale=torch.float16, zero_point=True)
    act = ActivationSpec(INT8_ROW)
    for spec, shape, more, reason in (
        (good, (8, 64), {"act": act}, "its activation is quantized"),
        (good, (2, 8, 64), {}, "[out, in]"),
        (good, (64, 8), {"axes": (1, 0)}, "[out, in]"),
        (good, (9, 64), {}, "9 outputs is not a multiple"),
        (good, (8, 65), {}, "whole groups of inputs"),
        (good.with_(block=(8, 32)), (8, 64), {}, "whole groups of inputs"),
        (good.with_(scale=torch.float32), (8, 64), {}, "float16 scales"),
        (QuantSpec(UINT8, (32,), scale=torch.float16), (8, 64), {}, "4-bit"),
        (TINYGEMM.with_(scale=torch.float16), (8, 128), {}, "4-bit"),
        (FP8_ROW, (8, 128), {}, "4-bit"),
    ):
        said = WRITING.refuses("m.weight", Meta(spec, shape, torch.float16, **more))
        assert said is not None
        assert reason in said
    assert WRITING.refuses("m.table", Meta(good, (8, 64), torch.float16)) is not None
    for shape in ((8, 256), (8, 128), (64, 384)):
        nearest = WRITING.nearest("m.weight", Meta(TINYGEMM, shape, torch.bfloat16))
        assert nearest is not None
        assert WRITING.refuses("m.weight", Meta(nearest, shape, torch.bfloat16)) is None
        w = QT.from_float(torch.randn(shape), nearest)
        assert w.error(w.dequantize()) > 60
    assert WRITING.nearest("m.weight", Meta(TINYGEMM, (8, 100), torch.bfloat16)) is None
    metas = {f"{g}.weight": Meta(good.with_(block=(g,)), (8, 64), torch.float16) for g in (16, 32)}
    with pytest.raises(ValueError, match=r"several: .*16\.weight.*32\.weight"):
        WRITING.method(metas, ())


BAD: list[tuple[str, Callable[[Tensor], Tensor] | None, str, str]] = [
    ("m.qweight", None, "m.q", "is unexpected"),
    ("m.qzeros", None, "m.weight", "m.qzeros is missing"),
    ("m.scales", None, "m.weight", "m.scales is missing"),
    ("m.qweight", lambda t: t.long(), "m.weight", "m.qweight is int64"),
    ("m.qweight", lambda t: t[0], "m.weight", "expected int32 [in, out / 8]"),
    ("m.qweight", lambda t: t[:, :0], "m.weight", "expected int32 [in, out / 8]"),
    ("m.qweight", lambda t: t[1:], "m.weight", "127 inputs, which quantization_config.group_size 64 does not divide"),
    ("m.qweight", lambda t: t[64:], "m.weight", "m.qzeros is int32 [2, 2], expected int32 [1, 2]"),
    ("m.qweight", lambda t: t[:, :1], "m.weight", "m.qzeros is int32 [2, 2], expected int32 [2, 1]"),
    ("m.qzeros", lambda t: t.T.contiguous()[:1], "m.weight", "m.qzeros is int32 [1, 2]"),
    ("m.qzeros", lambda t: t.to(torch.uint8), "m.weight", "m.qzeros is uint8"),
    ("m.scales", lambda t: t[:, 1:], "m.weight", "m.scales is float16 [2, 15]"),
    ("m.scales", lambda t: t.double(), "m.weight", "m.scales is float64"),
]


@pytest.mark.parametrize(("name", "change", "owner", "reason"), BAD)
def test_bad_files(name: str, change: Callable[[Tensor], Tensor] | None, owner: str, reason: str) -> None:
    tensors = layer(16, 128, 64)
    with pytest.raises(KeyedError) as e:
        find(AWQ, changed(tensors, name, change), config(64))
    assert reason in str(e.value)
    assert e.value.name.startswith(owner)


def test_bad_names_and_configs() -> None:
    tensors = layer(16, 128, 64)
    for more, settings, reason in (
        ({}, config(32), "m.qzeros is int32 [2, 2], expected int32 [4, 2]"),
        ({}, config(-1), "m.qzeros is int32 [2, 2], expected int32 [1, 2]"),
        ({}, config(48), "group_size 48 does not divide"),
        ({}, config(0), "group_size 0 does not divide"),
        ({}, config(-2), "group_size -2 does not divide"),
        ({}, config(64, group_size="64"), "group_size must be int"),
        ({}, config(64, bits=8), "AWQ of 8 bits"),
        ({}, config(64, bits=True), "bits must be int"),
        ({}, config(64, version="gemv"), "'gemv' uses another packing order"),
        ({}, config(64, version="gemv_fast"), "uses another packing order"),
        ({}, config(64, version=4), "version must be str"),
        ({}, config(64, backend="llm-awq"), "uses another packing order"),
        ({"act.scales": torch.ones(16)}, config(64), "is unexpected"),
        ({"n.qzeros": torch.ones(16)}, config(64), "is unexpected"),
    ):
        with pytest.raises(ValueError, match=r".") as e:
            find(AWQ, {**tensors, **more}, settings)
        assert reason in str(e.value)

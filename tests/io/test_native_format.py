"""What is saved is what is loaded, bit for bit, for every spec; a reader that shares no code sees the same numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

from pennyweight.core import blocks
from pennyweight.core.formats import INT3, INT4, INT8, UINT5, all_formats
from pennyweight.core.layouts import get_layout, layouts
from pennyweight.core.numerics import Parts
from pennyweight.core.spec import FP8_ROW, NF4_DOUBLE, SPECS, TINYGEMM, ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io import CheckpointError, flatten, load, save, unflatten
from tests.io import numpy_reader

EVERY_FORMAT = {
    f"every {f.name}": QuantSpec(f, (7,)) for f in all_formats() if f.name != "e8m0" and not f.name.startswith("test_")
}
EVERY_SPEC = {**SPECS, **EVERY_FORMAT}
SHAPES = [(8, 256), (5, 37), (3, 4, 50), (300,), (2, 0), (1, 1)]


def assert_same_bits(a: Any, b: Any) -> None:
    """Plain parts equal in dtype, shape and every bit (NaN codes and signed zeros too)."""
    if isinstance(a, Parts):
        for mine, theirs in zip(a, b, strict=True):
            assert_same_bits(mine, theirs)
    elif a is None:
        assert b is None
    else:
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.contiguous().reshape(-1).view(torch.uint8).equal(b.contiguous().reshape(-1).view(torch.uint8))


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert type(a) is type(b)
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    if not isinstance(a, QT):
        return assert_same_bits(a, b)
    assert (a.spec.with_(layout="plain"), a.act, a.axes) == (b.spec.with_(layout="plain"), b.act, b.axes)
    assert_same_bits(a.plain_parts(), b.plain_parts())
    return assert_same_bits(a.dequantize(), b.dequantize())


def quantized(spec: QuantSpec, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> QT:
    return QT.from_float(torch.randn(shape).to(dtype), spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", EVERY_SPEC)
def test_every_spec_comes_back_bit_for_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    spec = EVERY_SPEC[name]
    fits = [s for s in SHAPES if spec.block is None or len(spec.block) <= len(s)]
    state = {"x".join(map(str, s)): quantized(spec, s, dtype) for s in fits}
    state["turned"] = quantized(spec, (6, 40), dtype).t()
    save(state, tmp_path)
    out = load(tmp_path)
    assert out.keys() == state.keys()
    for key, tensor in state.items():
        assert_same(tensor, out[key])


@pytest.mark.parametrize("name", EVERY_SPEC)
def test_numpy_reader_sees_the_same_numbers(name: str, tmp_path: Path) -> None:
    spec = EVERY_SPEC[name]
    state = {"weight": quantized(spec, (6, 300)), "turned": quantized(spec, (5, 70)).t()}
    save(state, tmp_path / "a.safetensors")
    out = numpy_reader.read(tmp_path / "a.safetensors")
    for key, tensor in state.items():
        np.testing.assert_array_equal(out[key], tensor.dequantize(torch.float32).numpy())


def test_numpy_reader_sees_plain_tensors_and_ties(tmp_path: Path) -> None:
    weight = quantized(SPECS["int4_group"], (8, 64))
    state = {
        "a": torch.randn(3).bfloat16(),
        "b": torch.arange(4),
        "w": weight,
        "head": weight,
        "m": torch.tensor([True]),
    }
    save(state, tmp_path / "a.safetensors")
    out = numpy_reader.read(tmp_path / "a.safetensors")
    assert out["head"] is out["w"]
    np.testing.assert_array_equal(out["w"], weight.dequantize(torch.float32).numpy())
    np.testing.assert_array_equal(out["a"], state["a"].float().numpy())
    np.testing.assert_array_equal(out["b"], state["b"].numpy())


@pytest.mark.parametrize("spec", [INT3, INT4, INT8, UINT5], ids=str)
def test_a_single_number(spec: Any, tmp_path: Path) -> None:
    state = {"x": quantized(QuantSpec(spec, None), ())}
    save(state, tmp_path)
    assert_same(state["x"], load(tmp_path)["x"])


@pytest.mark.parametrize("layout", [layout.name for layout in layouts()])
def test_a_kernels_packing_never_reaches_the_file(layout: str, tmp_path: Path) -> None:
    examples = get_layout(layout).examples or ((SPECS["int4_group"], (8, 64)),)
    for i, (spec, shape) in enumerate(examples):
        plain = quantized(spec.with_(layout="plain"), shape)
        packed = plain.to_layout(layout)
        save({"w": plain}, tmp_path / f"{i}-plain.safetensors")
        save({"w": packed}, tmp_path / f"{i}-packed.safetensors")
        content = (tmp_path / f"{i}-plain.safetensors").read_bytes()
        assert content == (tmp_path / f"{i}-packed.safetensors").read_bytes()
        assert b"layout" not in content


def test_codes_take_their_bits_and_no_more(tmp_path: Path) -> None:
    save({"w": quantized(QuantSpec(INT3, None), (64, 512))}, tmp_path)
    payload = 64 * 512 * 3 // 8
    assert payload <= (tmp_path / "model.safetensors").stat().st_size <= payload + 600


def test_same_input_same_bytes(tmp_path: Path) -> None:
    torch.manual_seed(3)
    state = {"b": quantized(TINYGEMM, (8, 256)), "a": torch.randn(4), "c": quantized(NF4_DOUBLE, (8, 256))}
    save(state, tmp_path / "1.safetensors")
    save(dict(reversed(state.items())), tmp_path / "2.safetensors")
    assert (tmp_path / "1.safetensors").read_bytes() == (tmp_path / "2.safetensors").read_bytes()


@pytest.mark.parametrize("static", [True, False])
def test_activation_specs(static: bool, tmp_path: Path) -> None:
    spec = QuantSpec(INT8, None, scale=torch.bfloat16, zero_point=True)
    act = ActivationSpec(spec, "static") if static else ActivationSpec(FP8_ROW, "dynamic", "symmetric", 1e-5)
    w = quantized(SPECS["int8_row"], (4, 8)).with_(act=act)
    if static:
        w = w.with_(act_scale=torch.tensor([0.25]), act_zero_point=torch.tensor([-3], dtype=torch.int8))
    save({"w": w}, tmp_path)
    out = load(tmp_path)["w"]
    assert out.act == act
    x = torch.randn(5, 8)
    torch.testing.assert_close(nn.functional.linear(x, out), nn.functional.linear(x, w), rtol=0, atol=0)
    assert not static or (float(out.act_scale), int(out.act_zero_point)) == (0.25, -3)


def test_negative_scales_are_announced(tmp_path: Path) -> None:
    w = quantized(SPECS["int4_group"], (2, 64))
    w = w.with_(scale=w.scale * torch.tensor([1.0, -1.0]))
    save({"w": w}, tmp_path)
    assert b"signed_scale" in (tmp_path / "model.safetensors").read_bytes()
    assert_same(w, load(tmp_path)["w"])
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as f:
        tensors, metadata = {k: f.get_tensor(k) for k in f.keys()}, f.metadata()  # noqa: SIM118
    metadata["pennyweight"] = metadata["pennyweight"].replace('"signed_scale":true,', "")
    with pytest.raises(CheckpointError, match="negative"):
        unflatten(tensors, metadata)


def test_zero_and_constant_blocks(tmp_path: Path) -> None:
    state = {name: QT.from_float(torch.zeros(4, 256, dtype=torch.float16), spec) for name, spec in SPECS.items()}
    state |= {f"{name} ones": QT.from_float(torch.full((4, 256), 3.0), spec) for name, spec in SPECS.items()}
    half = QT.from_float(torch.zeros(4, 8), QuantSpec(INT8, (-1,), scale=torch.float16))
    save(state | {"half": half}, tmp_path)
    out = load(tmp_path)
    for name, tensor in state.items():
        assert_same(tensor, out[name])
    assert_same(half, out["half"])


def test_slices_and_views(tmp_path: Path) -> None:
    w = quantized(SPECS["int4_group"], (8, 128)).to_layout("bits")
    state = {"rows": w[2:5], "groups": w[:, 32:96], "half a group": w[:, :16], "one": w[3], "turned": w[1:].t()}
    save(state, tmp_path)
    out = load(tmp_path)
    for name, tensor in state.items():
        assert torch.equal(tensor.dequantize(), out[name].dequantize()), name


def test_flatten_and_unflatten_are_inverse() -> None:
    state: dict[str, torch.Tensor] = {name: quantized(spec, (4, 256)) for name, spec in SPECS.items()}
    state |= {"plain": torch.randn(2, 3), "again": state["tinygemm"]}
    tensors, metadata = flatten(state)
    assert all(type(t) is torch.Tensor for t in tensors.values())
    assert all(isinstance(v, str) for v in metadata.values())
    out = unflatten(safetensors.torch.load(safetensors.torch.save(tensors, metadata)), metadata)
    assert out.keys() == state.keys()
    for name, tensor in state.items():
        assert_same(tensor, out[name])
    assert out["again"] is out["tinygemm"]


def test_safetensors_own_reader_opens_the_files(tmp_path: Path) -> None:
    state = {name: quantized(spec, (4, 256)) for name, spec in SPECS.items()} | {"plain": torch.randn(2, 3)}
    save(state, tmp_path, metadata={"license": "BSD-3-Clause"})
    theirs = safetensors.torch.load_file(tmp_path / "model.safetensors")
    ours, _ = flatten(state)
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        assert_same_bits(tensor, theirs[name])
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as f:
        assert f.metadata()["format"] == "pt"
        assert f.metadata()["license"] == "BSD-3-Clause"


def test_files_of_other_writers_are_plain_tensors(tmp_path: Path) -> None:
    """Every dtype that safetensors and torch share, and a header order of their own."""
    names = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
             "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64", "complex64", "float8_e8m0fnu")  # fmt: skip
    state = {n: torch.arange(6).reshape(2, 3).to(torch.float32).to(getattr(torch, n)) for n in names}
    state |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 7)}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    out = load(tmp_path)
    assert out.keys() == state.keys()
    for name, tensor in state.items():
        assert_same(tensor, out[name])


def test_saving_under_inference_mode(tmp_path: Path) -> None:
    with torch.inference_mode():
        state = {"w": quantized(SPECS["int4_group"], (4, 64)), "t": quantized(TINYGEMM, (4, 64)), "b": torch.randn(3)}
        save(state, tmp_path)
        inside = load(tmp_path)
    for name, tensor in load(tmp_path).items():
        assert_same(tensor, inside[name])
        assert_same(tensor, state[name])


def test_counts_of_blocks_agree_with_the_page() -> None:
    """docs/format.md: g = ceil(n / b), codes padded to g * b."""
    assert blocks.counts((2, 32), (5, 100)) == (3, 4)
    assert blocks.padded((2, 32), (5, 100)) == (6, 128)
    assert blocks.padded((200,), (5, 100)) == (5, 100)

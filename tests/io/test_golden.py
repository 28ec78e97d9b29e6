"""Files of format versions 1 to 5, written once, read for ever: by the library and by the numpy reader."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from pennyweight.core.spec import NF4_DOUBLE, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io import load, save
from tests.io import numpy_reader

GOLDEN = Path(__file__).parent.parent / "golden" / "native" / "v1"
EXPECTED = safetensors.torch.load_file(GOLDEN / "expected.safetensors")
PLAIN = {name for name in EXPECTED if name.startswith("plain.")}
ALL_SHA256 = "6f2261e6095ee757234a9062b72fa5bad6b70369edca8eb5ca59cb827ddc5203"

SECOND = GOLDEN.parent / "v2"
SECOND_SHA256 = "54b47587db67943ae02e57575f6e1c4ea63c19d4151bafffcb62ce0ab8b53620"

THIRD = GOLDEN.parent / "v3"
FOURTH = GOLDEN.parent / "v4"
FOURTH_SHA256 = "fbb0fafaac839516ad46558fdbb051995986c0c6abc5ade181f49e61f5d214e1"

FIFTH = GOLDEN.parent / "v5"
FIFTH_SHA256 = "fb5b721566e02732640807fffe502e9ca6b35e8b429af5eba30249fe711628b2"
THIRD_SHA256 = "d0b52361758c1d845710f5171e9479822e09767bb8d34f0aef60aea9324747fb"


def test_the_files_are_the_ones_that_were_written_then() -> None:
    """If this fails the golden file was changed. Restore it, and mend the reader instead."""
    assert hashlib.sha256((GOLDEN / "all.safetensors").read_bytes()).hexdigest() == ALL_SHA256
    assert hashlib.sha256((SECOND / "all.safetensors").read_bytes()).hexdigest() == SECOND_SHA256
    assert hashlib.sha256((THIRD / "all.safetensors").read_bytes()).hexdigest() == THIRD_SHA256
    assert hashlib.sha256((FOURTH / "all.safetensors").read_bytes()).hexdigest() == FOURTH_SHA256
    assert hashlib.sha256((FIFTH / "all.safetensors").read_bytes()).hexdigest() == FIFTH_SHA256


@pytest.mark.parametrize("path", ["all.safetensors", "sharded"])
def test_values(path: str) -> None:
    out = load(GOLDEN / path)
    assert out.keys() == EXPECTED.keys()
    for name, expected in EXPECTED.items():
        assert isinstance(out[name], QT) == (name not in PLAIN)
        value = out[name] if name in PLAIN else out[name].dequantize(torch.float32)
        assert torch.equal(value, expected), name
        assert value.dtype == expected.dtype


def test_meaning() -> None:
    out = load(GOLDEN / "all.safetensors")
    assert out["tied"] is out["int4.padded"]
    assert out["plain.tied"] is out["plain.float"]
    assert out["nf4.nested_offset"].spec.with_(layout="plain") == NF4_DOUBLE
    assert out["axes.turned"].axes == (1, 0)
    assert out["axes.permuted"].axes == (2, 0, 1)
    assert [out[n].dtype for n in ("int8", "int4.padded", "uint4.zero_point")] == [
        torch.bfloat16, torch.float16, torch.float32,
    ]  # fmt: skip
    static, dynamic = out["act.static"], out["act.dynamic"]
    assert (static.act.mode, float(static.act_scale), int(static.act_zero_point)) == ("static", 0.75, -5)
    assert isinstance(static.act.spec, QuantSpec)
    assert static.act.spec.zero_point
    assert (dynamic.act.mode, dynamic.act.rule, dynamic.act.eps) == ("dynamic", "symmetric", 2.0**-40)
    assert float(out["signed_scale"].scale.min()) < 0


def test_numpy_reader() -> None:
    out = numpy_reader.read(GOLDEN / "all.safetensors")
    assert out.keys() == EXPECTED.keys()
    for name, expected in EXPECTED.items():
        np.testing.assert_array_equal(out[name], expected.float().numpy() if expected.is_floating_point() else expected)


def read(folder: Path) -> dict[str, torch.Tensor]:
    """What the library reads, after the values were compared: its own, the numpy reader's and those written down."""
    expected = safetensors.torch.load_file(folder / "expected.safetensors")
    out, plain = load(folder / "all.safetensors"), numpy_reader.read(folder / "all.safetensors")
    assert out.keys() == plain.keys() == expected.keys()
    for name, value in expected.items():
        mine = out[name].dequantize(torch.float32) if isinstance(out[name], QT) else out[name]
        assert torch.equal(mine, value), name
        np.testing.assert_array_equal(plain[name], value.float().numpy())
    return out


@pytest.mark.parametrize("folder", [FOURTH, FIFTH], ids=lambda folder: folder.name)
def test_saving_what_was_read_gives_the_same_file(folder: Path, tmp_path: Path) -> None:
    save(load(folder / "all.safetensors"), tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (folder / "all.safetensors").read_bytes()


@pytest.mark.parametrize("folder", [GOLDEN, SECOND, THIRD], ids=lambda folder: folder.name)
def test_older_files_are_saved_as_version_4_with_the_same_parts(folder: Path, tmp_path: Path) -> None:
    old = load(folder / "all.safetensors")
    save(old, tmp_path / "again.safetensors")
    before = safetensors.torch.load_file(folder / "all.safetensors")
    after = safetensors.torch.load_file(tmp_path / "again.safetensors")
    quantized = {name for name, w in old.items() if isinstance(w, QT)}
    guards = after.keys() - before.keys()
    assert guards <= quantized
    assert all(after[name].shape == (0,) for name in guards)
    for name, part in before.items():
        assert after[name].reshape(-1).view(torch.uint8).tolist() == part.reshape(-1).view(torch.uint8).tolist() or (
            after[name].numel() < part.numel()  # packed flat now
        )
    for name, value in load(tmp_path / "again.safetensors").items():
        same, mine = (t.dequantize() if isinstance(t, QT) else t for t in (value, old[name]))
        assert torch.equal(same, mine), name


def test_version_2() -> None:
    """Tensors whose contracted axis is stored in another order."""
    out = read(SECOND)
    assert [n for n in out if isinstance(out[n], QT) and out[n].perm is None] == ["in_order"]
    assert out["tied"] is out["int4"]
    assert out["turned"].axes == (1, 0)


def test_version_3() -> None:
    """Zero points in a format of their own, and learned numbers."""
    out = read(THIRD)
    zeros = {n: str(w.spec.zero_point) for n, w in out.items() if isinstance(w, QT) and w.spec.zero_point}
    assert zeros == {
        "bytes": "True", "uint4": "uint4", "int4": "int4", "uint3": "uint3", "wide": "uint5", "ternary": "ternary",
        "tensor": "uint4",
    }  # fmt: skip
    assert out["scales"].spec.scale.zero_point.name == "uint4"


def test_version_4() -> None:
    """Guards, and codes of convolutions in one stream per output channel."""
    out = read(FOURTH)
    with safetensors.safe_open(FOURTH / "all.safetensors", "pt") as f:
        stored = {name: f.get_slice(name).get_shape() for name in f.keys()}  # noqa: SIM118, it is no mapping
    for name, w in out.items():
        if isinstance(w, QT) and name != "tied":
            assert stored[name] == [0]
            assert stored[f"{name}.codes"] == list(
                w.spec.stream_shape(w.spec.codes_shape(w.stored_shape), w.spec.format.bits)
            )
    assert {n for n, w in out.items() if isinstance(w, QT) and w.spec.layout == "flat_bits"} == {
        "conv1x1",
        "tied",
        "conv3x3",
        "conv1d",
        "conv.zeros",
        "conv.nested",
        "conv.learned",
        "conv.ternary",
    }
    assert out["tied"] is out["conv1x1"]


def test_version_5() -> None:
    """Factors of the contracted axis."""
    out = read(FIFTH)
    assert [n for n in out if isinstance(out[n], QT) and out[n].pre_scale is None] == ["bare"]
    assert out["tied"] is out["int4"]
    assert out["reordered"].perm is not None

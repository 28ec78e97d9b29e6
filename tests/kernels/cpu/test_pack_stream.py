"""Bit streams of a file packed into tiles: the same bytes as from plain codes, which are never written."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.core import layouts, packing
from pennyweight.core.formats import INT3, INT4, NF4, UINT4
from pennyweight.core.packing import pack_bits
from pennyweight.core.spec import QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.kernels.cpu import library
from pennyweight.kernels.cpu.int_linear import tile_rows
from pennyweight.kernels.cpu.pack_ops import pack_codes, pack_stream
from pennyweight.kernels.native import convert as native_convert
from pennyweight.support.errors import ArgumentError

pytestmark = pytest.mark.skipif(library.available() is not True, reason=f"native library: {library.available()}")

# rows and columns: whole tiles; a part of a tile at either end; less than a byte; one number
SHAPES = ((32, 96), (33, 100), (16, 31), (5, 64), (48, 1), (1, 33), (1, 1))


@pytest.fixture(params=[(isa, threads) for isa in library.isas() for threads in (1, 2)], ids=str)
def machine(request: pytest.FixtureRequest) -> Iterator[None]:
    isa, threads = request.param
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    library.use_isa(isa)
    yield
    library.use_isa("")
    torch.set_num_threads(before)


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_tiles_are_those_of_plain_codes(bits: int, machine: None) -> None:
    for n, k in SHAPES:
        for columns in (-(-k // 32) * 32, -(-k // 32) * 32 + 64):
            codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8)
            for pad in {0, 1 << (bits - 1), (1 << bits) - 1}:
                # codes as signed numbers whose least is -pad: 0 is code `pad`
                plain = pack_codes((codes.int() - pad & 255).to(torch.uint8), columns, bits, pad)
                got = pack_stream(pack_bits(codes, bits), k, columns, bits, pad)
                assert torch.equal(got, plain), (n, k, columns, pad)


def test_memory_that_is_not_aligned(machine: None) -> None:
    """A tensor of a mapped file may begin at any byte."""
    codes = torch.randint(0, 16, (35, 90), dtype=torch.uint8)
    stream = pack_bits(codes, 4)
    room = torch.zeros(stream.numel() + 3, dtype=torch.uint8)
    room[3:] = stream.flatten()
    moved = room[3:].view(stream.shape)
    assert moved.data_ptr() % 4
    assert torch.equal(pack_stream(moved, 90, 96, 4, 8), pack_stream(stream, 90, 96, 4, 8))


def test_a_stream_of_other_columns_is_refused() -> None:
    stream, out = torch.zeros(20, 32, dtype=torch.uint8), torch.zeros(2, 2 * 64 * 4, dtype=torch.uint8)
    native_convert.pack_stream(stream, 64, 64, 4, 0, out)
    for k, columns, bits, pad in (
        (65, 96, 4, 0), (62, 64, 4, 0), (64, 64, 3, 0), (64, 32, 4, 0), (64, 70, 4, 0), (64, 64, 4, 16),
        (64, 64, 4, -1), (-64, 64, 4, 0), (64, 64, 0, 0), (64, 64, 9, 0),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match="pack"):
            native_convert.pack_stream(stream, k, columns, bits, pad, out)
    with pytest.raises(ArgumentError, match="expected a matrix"):
        native_convert.pack_stream(stream.flatten(), 64, 64, 4, 0, out)


@pytest.mark.parametrize("n", [16, 48, 33])
@pytest.mark.parametrize("groups", [1, 3])
def test_tiled_scales_have_their_own_memory(n: int, groups: int) -> None:
    """One group per row needs no transposition, and a view would hold the mapped file."""
    p = torch.randn(n, groups)
    tiled = tile_rows(p)
    assert tiled.is_contiguous()
    assert tiled.untyped_storage().data_ptr() != p.untyped_storage().data_ptr()
    for source in (p, torch.randn(n, 2 * groups)[:, ::2], torch.randn(groups, n).t()):
        padded = torch.zeros(-(-n // 16) * 16, groups)
        padded[:n] = source
        assert torch.equal(tile_rows(source), padded.view(-1, 16, groups).transpose(1, 2).contiguous())


@pytest.mark.parametrize("spec", [QuantSpec(f, (32,)) for f in (INT3, INT4, NF4)], ids=str)
def test_loading_writes_no_plain_codes(spec: QuantSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = nn.Linear(96, 40, bias=False)
    model.weight = nn.Parameter(QT.from_float(model.weight.detach(), spec), requires_grad=False)
    pw.save(model, tmp_path / "m.safetensors")

    def refuse(*args: Any) -> None:
        raise AssertionError("codes were unpacked")

    with torch.device("meta"):
        loaded = nn.Linear(96, 40, bias=False)
    with monkeypatch.context() as m:
        for module in (packing, layouts):
            m.setattr(module, "unpack_bits", refuse)
        pw.load(tmp_path / "m.safetensors", loaded)
    assert loaded.weight.spec.layout in ("cpu", "cpu_float")
    assert torch.equal(loaded.weight.dequantize(), model.weight.dequantize())


def test_zero_points_of_a_file_are_unpacked() -> None:
    w = QT.from_float(torch.rand(40, 96), QuantSpec(UINT4, (32,), zero_point=UINT4))
    assert torch.equal(w.to_layout("bits").to_layout("cpu").dequantize(), w.dequantize())

"""Any weight that a format says it keeps exactly: written there by pw.convert, and read back the same."""

import tempfile
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pennyweight as pw
from pennyweight.core import formats as f
from pennyweight.core import spec as specs
from pennyweight.core.spec import QuantSpec
from pennyweight.io.codecs import CODECS
from pennyweight.io.manifest import Meta

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTS = (f.INT2, f.INT3, f.INT4, f.INT5, f.INT8, f.UINT2, f.UINT3, f.UINT4, f.UINT8)
BLOCKS: tuple[tuple[int, ...] | None, ...] = (None, (-1,), (16,), (32,), (64,), (128,))
SPECS = [
    specs.NVFP4, specs.MXFP4, specs.MXFP6, specs.MXFP8, specs.FP8_BLOCK, QuantSpec(f.E4M3, (2, 64)),
    *(QuantSpec(fmt, b, s) for fmt, b, s in product((f.E4M3, f.NF4, f.FP4_TWELFTHS), BLOCKS, FLOATS)),
    *(QuantSpec(fmt, b, s, zero_point=z) for fmt, b, s, z in product(INTS, BLOCKS, FLOATS, (False, True))),
    *(QuantSpec(fmt, b, torch.float16, mid=1 << (fmt.bits - 1)) for fmt, b in product(INTS[5:], BLOCKS)),
]  # fmt: skip
NAMES = [codec.name for codec in CODECS if codec.writing is not None]
SIZES = st.sampled_from([1, 7, 8, 16, 24, 32, 40, 64, 96, 128, 130, 192])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_refused_comes_back(name: str) -> None:
    writing = next(codec.writing for codec in CODECS if codec.name == name)
    assert writing is not None
    experts = name == "mxfp4"
    key = "mlp.experts.down_proj" if experts else "m.weight"
    axes = (0, 2, 1) if experts else None
    tried: set[QuantSpec] = set()

    @settings(max_examples=30, deadline=None, derandomize=True, database=None)
    @given(st.data(), SIZES, SIZES, st.sampled_from(FLOATS), st.integers(0, 9))
    def check(data: st.DataObject, rows: int, columns: int, dtype: torch.dtype, seed: int) -> None:
        stored = (2, rows, columns) if experts else (rows, columns)
        shape = (2, columns, rows) if experts else stored
        kept = [s for s in SPECS if fits(s, stored) and writing.refuses(key, Meta(s, shape, dtype, None, axes)) is None]
        if not kept:
            return
        spec = data.draw(st.sampled_from(kept))
        w = pw.AffineQuantizedTensor.from_float(
            torch.randn(stored, generator=torch.Generator().manual_seed(seed)).to(dtype), spec
        )
        w = w.transpose(-2, -1) if experts else w  # type: ignore[assignment]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            pw.save({key: w, "norm.weight": torch.ones(4, dtype=dtype)}, folder / "own")
            (folder / "own" / "config.json").write_text("{}")
            report = pw.convert(folder / "own", folder / "there", to=name)
            assert [row.note for row in report.quantized] == ["exact"]
            back = pw.load(folder / "there")[key]
        assert isinstance(back, pw.AffineQuantizedTensor)
        assert back.shape == w.shape
        assert torch.equal(back.dequantize(torch.float32), w.dequantize(torch.float32))
        tried.add(spec)

    check()
    assert tried


def fits(spec: QuantSpec, shape: tuple[int, ...]) -> bool:
    """Whether blocks lie within the tensor; what is left of the last one is padding."""
    return spec.block is None or len(spec.block) <= len(shape)

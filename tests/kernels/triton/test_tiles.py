"""The table of tiles and its rule, without Triton; that its tiles compile is in test_ahead.py."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu import aot_compile
from pennyweight.kernels.triton import tiles
from pennyweight.kernels.triton.codes import PIECES, Decoding
from pennyweight.kernels.triton.layout import columns
from pennyweight.kernels.triton.tiles import Tile

DECODINGS = [Decoding(pieces, "int") for pieces in PIECES.values()]
DECODINGS += [Decoding((4,), "table"), Decoding((8,), "float", mantissa=3), Decoding((4, 2), "float", mantissa=2)]
ROWS = tiles.BUCKETS


def check_tile(tile: Tile, target: str, d: Decoding, small: bool) -> None:
    for size in (tile.bm, tile.bn, tile.w, tile.warps):
        assert size & (size - 1) == 0, tile
    assert tile.bm >= 8
    assert tile.w <= 32
    assert not small or tile.w == 32
    # a pipeline of n stages holds n - 1 steps in shared memory; on AMD inputs only, codes go to registers
    bits = 0 if target.startswith("hip") else d.bits
    step = columns(d) * tile.w // 32 * (bits * tile.bn // 8 + 2 * tile.bm)
    assert step * max(1, tile.stages - 1) <= tiles.shared_memory(target), tile


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("target", [*aot_compile.TARGETS, "cuda", "cpu", "hip:gfx90a", "cuda:sm_86", "cuda:sm_103"])
def test_the_rule_fits_every_target(target: str, small: bool) -> None:
    for d in DECODINGS:
        for m in ROWS:
            check_tile(tiles.by_rule(target, d, m, small=small), target, d, small)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("target", aot_compile.TARGETS)
def test_candidates_fit_and_begin_with_the_rule(target: str, small: bool) -> None:
    for d in DECODINGS:
        for m in ROWS:
            found = tiles.candidates(target, d, m, small=small)
            assert found[0] == tiles.by_rule(target, d, m, small=small)
            assert len(set(found)) == len(found)
            for tile in found:
                check_tile(tile, target, d, small)


def test_buckets() -> None:
    assert [tiles.bucket(m) for m in (1, 8, 9, 16, 17, 128, 129, 4096, 100_000)] == [
        8, 8, 16, 16, 32, 128, 256, 4096, 4096,
    ]  # fmt: skip


def test_programs_share_a_tile_when_there_are_few() -> None:
    for programs, steps, most in ((1, 1, 264), (64, 64, 264), (1, 1024, 264), (500, 64, 264), (3, 7, 32)):
        parts = tiles.split(programs, steps, most)
        assert parts & (parts - 1) == 0
        assert parts == 1 or (programs * parts <= most and parts * 2 <= steps)
    assert tiles.split(64, 64, 264) == 4
    assert tiles.split(1, 1, 264) == 1


def test_a_line_of_the_card_comes_before_its_target_and_the_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, path = Decoding((4,), "int", 8.0), tmp_path / "tiles.json"
    card, target = Tile(8, 128, 32, 4, 3), Tile(8, 32, 32, 1, 4)
    common = {"family": "int4", "m": 8}
    monkeypatch.setattr(tiles, "user_file", lambda: path)
    monkeypatch.setattr(tiles, "SHIPPED", tmp_path / "none.json")
    try:
        tiles.write(path, [
            {**common, "target": "cuda:sm_90", "tile": target.__dict__},
            {**common, "device": "Card", "tile": card.__dict__},
            {**common, "m": 64, "device": "Card", "tile": None},
        ])  # fmt: skip
        assert tiles.choose("cuda:sm_90", "Card", d, 8, small=False) == card
        assert tiles.choose("cuda:sm_90", "Other", d, 8, small=False) == target
        assert tiles.choose("cuda:sm_80", "Other", d, 8, small=False) == tiles.by_rule("cuda:sm_80", d, 8, small=False)
        assert tiles.choose("cuda:sm_90", "Card", d, 64, small=False) is None
        assert tiles.choose("cuda:sm_90", "Card", d, 8, small=False, offset=True) == card
        path.write_text('{"lines": [{"tile": {"bm": 8}}]}', "utf-8")
        with pytest.raises(ValueError, match=r"is not a file of tiles .*delete it, or write it again"):
            tiles.read(path)
    finally:
        tiles.lines.cache_clear()
        tiles.choose.cache_clear()


def test_shipped_lines_are_tiles() -> None:
    for line in json.loads(tiles.SHIPPED.read_text("utf-8"))["lines"]:
        assert line["tile"] is None or Tile(**line["tile"])
        assert line["m"] in tiles.BUCKETS

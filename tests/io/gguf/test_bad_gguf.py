"""Every bad file is refused, with CheckpointError and nothing else, quickly, and in little memory."""

import os
import re
import struct
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pennyweight.core.numerics import dequantize
from pennyweight.io import CheckpointError
from pennyweight.io.gguf.gguf_file import MAX_TENSORS, File
from pennyweight.io.gguf.metadata import MAX_KEYS, MAX_STRINGS
from tests.io.gguf.bad_gguf import BAD
from tests.io.gguf.samples import GOOD_KV, array, build, info, kv, text

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_the_good_file_is_good(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    for content in (build(), build(version=2)):
        path.write_bytes(content)
        with File(str(path)) as f:
            assert {n: (e.type.name, e.shape, e.rows, e.row_bytes) for n, e in f.entries.items()} == {
                "a.weight": ("Q4_0", (3, 64), 3, 36),
                "b.weight": ("F32", (4,), 1, 16),
                "c.weight": ("F32", (0, 2), 0, 8),
                "d.weight": ("Q4_K", (2, 1, 256), 2, 144),
            }
            assert f.metadata["tokens"].data == ["a", "", "ü"]
            assert f.metadata["scores"].data.tolist() == [0.5, -1.0]
            assert f.metadata["flag"].data is True


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused(name: str, tmp_path: Path) -> None:
    make, words = BAD[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(make())
    start = time.process_time()
    with pytest.raises(CheckpointError) as error:
        File(str(path))
    assert time.process_time() - start < 1
    assert error.value.path == str(path)
    assert re.search(words, str(error.value)), str(error.value)


EIGHTH = MAX_STRINGS // 8  # tracemalloc is slow with many small objects
LARGE = {
    "tensors": lambda: build(infos=[info(f"{i}", [], 24, 0) for i in range(MAX_TENSORS)], data=b""),
    "keys": lambda: build(kv=[kv(f"{i}", 9, array(7, 1, b"\1")) for i in range(MAX_KEYS)], infos=[], data=bytes(99)),
    "strings": lambda: build(kv=[kv("s", 9, array(8, EIGHTH, text("é") * EIGHTH))], infos=[], data=bytes(99)),
    "numbers": lambda: build(kv=[kv("n", 9, array(0, 33_000_000, bytes(33_000_000)))], infos=[], data=bytes(99)),
    "one string": lambda: build(kv=[kv("n", 8, text("n" * 33_000_000))], infos=[], data=bytes(99)),
    "too many strings": lambda: build(
        kv=[kv("s", 9, array(8, MAX_STRINGS + 1, bytes(8 * MAX_STRINGS + 8)))], infos=[], data=b""
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_refusing_takes_little_memory(name: str, tmp_path: Path) -> None:
    """At most the size of the file and 64 MB, at the limit of every count (an eighth of both for strings)."""
    path = tmp_path / "large.gguf"
    path.write_bytes(LARGE[name]())
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            File(str(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= os.path.getsize(path) + ((8 if name == "strings" else 64) << 20)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "good.gguf").write_bytes(build())
    (tmp_path / "link").symlink_to(tmp_path / "good.gguf")
    for name in ("pipe", "link", "missing", "."):
        with pytest.raises(CheckpointError):
            File(str(tmp_path / name))


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "shrinks.gguf"
    path.write_bytes(build())
    with File(str(path)) as f:
        os.truncate(path, f.entries["d.weight"].begin)
        with pytest.raises(CheckpointError, match="was truncated"):
            f.rows("d.weight", 0, 2)
        with pytest.raises(CheckpointError, match="cannot be mapped"):
            f.mapped("d.weight")


# -- damage ------------------------------------------------------------------------------------------------------------


def attempt(path: Path, content: bytes) -> None:
    """Open, and decode every tensor: success, or CheckpointError; ValueError for codes that are no numbers."""
    path.write_bytes(content)
    with suppress(CheckpointError), File(str(path)) as f:
        for value in f.metadata.values():
            assert value.data is not None
        for name, e in f.entries.items():
            raw = f.rows(name, 0, e.rows)
            assert raw.equal(f.mapped(name))
            with suppress(ValueError):
                parts = e.type.decode(raw, e.shape)
                if not e.type.plain:
                    assert dequantize(parts, e.type.spec, e.shape).shape == e.shape


@FUZZ
@given(changes=st.lists(st.tuples(st.integers(0, 1 << 12), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    content = bytearray(build())
    for at, byte in changes:
        content[at % len(content)] = byte
    attempt(tmp_path / "fuzzed.gguf", bytes(content))


def test_each_byte_of_the_header_flipped(tmp_path: Path) -> None:
    good = build()
    for at in range(len(good) - 460):
        for bit in (0, 7):
            content = bytearray(good)
            content[at] ^= 1 << bit
            attempt(tmp_path / "fuzzed.gguf", bytes(content))


@FUZZ
@given(start=st.integers(0, 1 << 12), count=st.integers(0, 64), new=st.binary(max_size=16))
def test_cut_and_inserted_bytes(tmp_path: Path, start: int, count: int, new: bytes) -> None:
    good = build()
    start %= len(good)
    attempt(tmp_path / "fuzzed.gguf", good[:start] + new + good[start + count :])


@FUZZ
@given(
    dims=st.lists(st.one_of(st.integers(0, 600), st.integers(0, (1 << 64) - 1)), max_size=4),
    kind=st.integers(0, 45), offset=st.one_of(st.just(0), st.integers(0, (1 << 64) - 1)), data=st.binary(max_size=600),
)  # fmt: skip
def test_any_tensor(tmp_path: Path, dims: list[int], kind: int, offset: int, data: bytes) -> None:
    attempt(tmp_path / "fuzzed.gguf", build(kv=GOOD_KV[:1], infos=[info("t", dims, kind, offset)], data=data))


@FUZZ
@given(kind=st.integers(0, 13), raw=st.binary(max_size=40), count=st.integers(0, 5))
def test_any_value(tmp_path: Path, kind: int, raw: bytes, count: int) -> None:
    entries = [kv("x", kind, raw), kv("y", 9, struct.pack("<IQ", kind, count) + raw)]
    for entry in entries:
        attempt(tmp_path / "fuzzed.gguf", build(kv=[entry], infos=[], data=b""))

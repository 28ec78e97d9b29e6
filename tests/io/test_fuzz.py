"""Damaged files: whatever is changed, the reader accepts the file or raises CheckpointError, and nothing else."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pennyweight.io import CheckpointError, load
from tests.io.samples import Model, join, sample_file, split

FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return sample_file(tmp_path_factory.mktemp("good")).read_bytes()


def attempt(folder: Path, content: bytes) -> None:
    path = folder / "fuzzed.safetensors"
    path.write_bytes(content)
    for model in (None, Model()):
        with suppress(CheckpointError):
            load(path, model)


@FUZZ
@given(changes=st.lists(st.tuples(st.integers(0, 1 << 14), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes(good: bytes, tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    content = bytearray(good)
    for at, byte in changes:
        content[at % len(content)] = byte
    attempt(tmp_path, bytes(content))


@FUZZ
@given(start=st.integers(0, 1 << 14), count=st.integers(0, 64), new=st.binary(max_size=16))
def test_cut_and_inserted_bytes(good: bytes, tmp_path: Path, start: int, count: int, new: bytes) -> None:
    start %= len(good)
    attempt(tmp_path, good[:start] + new + good[start + count :])


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=12),
    st.sampled_from(["int4", "e4m3", "float32", "static", "F32", "U8", "int4.weight", "int4.weight.codes", "bits"]),
    st.lists(st.integers(-2, 70), max_size=4), st.dictionaries(st.sampled_from(["spec", "format", "a"]), st.none()),
)  # fmt: skip


def leaves(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at] * bool(at) + [path for key, item in inside for path in leaves(item, (*at, key))]


@FUZZ
@given(data=st.data(), which=st.booleans())
def test_changed_meaning(good: bytes, tmp_path: Path, data: st.DataObject, which: bool) -> None:
    """One value of the header or the manifest becomes another, or goes, or is doubled under another name."""
    header, body = split(good)
    manifest = json.loads(header["__metadata__"]["pennyweight"])
    root = manifest if which else header
    path = data.draw(st.sampled_from(leaves(root)))
    parent = root
    for key in path[:-1]:
        parent = parent[key]
    action = data.draw(st.sampled_from(["replace", "remove", "double"]))
    if action == "replace":
        parent[path[-1]] = data.draw(LEAVES)
    elif action == "remove":
        del parent[path[-1]]
    elif isinstance(parent, dict):
        parent[data.draw(st.text(max_size=8))] = parent[path[-1]]
    else:
        parent.append(parent[path[-1]])
    if which:
        header["__metadata__"]["pennyweight"] = json.dumps(manifest)
    attempt(tmp_path, join(header, body))


@FUZZ
@given(content=st.binary(max_size=400))
def test_noise(tmp_path: Path, content: bytes) -> None:
    attempt(tmp_path, content)
    attempt(tmp_path, join(content, b""))

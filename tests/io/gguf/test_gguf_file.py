"""The container: what is written is read, by us and by the gguf package, and the other way round."""

import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pennyweight.io import CheckpointError
from pennyweight.io.gguf.blocks import TYPES, BlockType
from pennyweight.io.gguf.gguf_file import File, Writer
from pennyweight.io.gguf.metadata import Value

CASES = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

INTEGERS = {f"{sign}int{bits}": (bits, not sign) for sign in ("", "u") for bits in (8, 16, 32, 64)}


def numbers(kind: str) -> st.SearchStrategy[Any]:
    if kind == "bool":
        return st.booleans()
    if kind == "string":
        return st.text(max_size=12)
    if kind.startswith("float"):
        return st.floats(width=int(kind[5:]), allow_nan=False)
    bits, signed = INTEGERS[kind]
    return st.integers(-(1 << bits - 1), (1 << bits - 1) - 1) if signed else st.integers(0, (1 << bits) - 1)


def values(kind: str) -> st.SearchStrategy[Value]:
    def array(items: list[Any]) -> Value:
        return Value(f"[{kind}]", items if kind == "string" else np.array(items, kind))

    return st.one_of(numbers(kind).map(lambda v: Value(kind, v)), st.lists(numbers(kind), max_size=6).map(array))


KINDS = (*INTEGERS, "float32", "float64", "bool", "string")
ANY_VALUE = st.sampled_from(KINDS).flatmap(values)
KEYS = st.text("abcdefghijklmnopqrstuvwxyz_.", min_size=1, max_size=20).filter(lambda k: k != "general.alignment")
NAMES = st.lists(st.text("abcdef_09", min_size=1, max_size=8), min_size=1, max_size=4).map(".".join).filter(
    lambda name: not any(p.startswith("__") for p in name.split("."))
)  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> tuple[BlockType, tuple[int, ...]]:
    kind = draw(st.sampled_from([*TYPES.values()]))
    lead = draw(st.lists(st.integers(0, 3), max_size=3))
    return kind, (*lead, kind.elements * draw(st.integers(0, 2)))


def write(path: Path, metadata: dict[str, Value], infos: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A file of random bytes, its rows put last to first; the bytes by name."""
    writer = Writer(str(path), metadata, infos)
    data = {}
    for name, e in reversed(writer.entries.items()):
        data[name] = torch.randint(0, 256, (e.rows, e.row_bytes), dtype=torch.uint8)
        half = e.rows // 2
        writer.put(name, data[name][half:], half)
        writer.put(name, data[name][:half])
    writer.finish()
    return data


@CASES
@given(
    metadata=st.dictionaries(KEYS, ANY_VALUE, max_size=6),
    infos=st.dictionaries(NAMES, tensors(), max_size=6),
    alignment=st.sampled_from([None, 1, 8, 32, 64, 4096]),
)
def test_round_trip(tmp_path: Path, metadata: dict[str, Value], infos: dict[str, Any], alignment: int | None) -> None:
    if alignment is not None:
        metadata = {"general.alignment": Value("uint32", alignment), **metadata}
    path = tmp_path / "a.gguf"
    path.unlink(missing_ok=True)
    data = write(path, metadata, infos)
    with File(str(path)) as f:
        assert f.metadata == metadata
        assert list(f.metadata) == list(metadata)
        assert f.version == 3
        assert {n: (e.type, e.shape) for n, e in f.entries.items()} == infos
        for name, raw in data.items():
            assert torch.equal(f.mapped(name), raw)
            assert torch.equal(f.rows(name, 0, len(raw)), raw)
            if len(raw) > 1:
                assert torch.equal(f.rows(name, 1, len(raw)), raw[1:])
        for key, value in metadata.items():
            got, want = f.metadata[key].data, value.data
            assert type(got) is type(want)
            assert got.tolist() == want.tolist() if isinstance(want, np.ndarray) else got == want


def test_gguf_reads_what_we_write(tmp_path: Path) -> None:
    metadata = {
        "general.architecture": Value("string", "llama"), "a.u8": Value("uint8", 200), "a.i64": Value("int64", -5),
        "a.flag": Value("bool", True), "a.f": Value("float32", 0.1), "a.list": Value("[int32]", np.arange(5) - 2),
        "tokens": Value("[string]", ["a", "", "ü", "x" * 300]), "a.none": Value("[float64]", []),
    }  # fmt: skip
    infos = {
        "blk.0.attn_q.weight": (TYPES["Q4_K"], (3, 512)), "output_norm.weight": (TYPES["F32"], (7,)),
        "blk.0.ffn_up_exps.weight": (TYPES["Q8_0"], (2, 5, 64)), "x": (TYPES["BF16"], (3, 5)),
    }  # fmt: skip
    path = tmp_path / "a.gguf"
    data = write(path, metadata, infos)
    reader = gguf.GGUFReader(path)
    for key, value in metadata.items():
        got = reader.fields[key].contents()
        want = value.data.tolist() if isinstance(value.data, np.ndarray) else value.data
        assert got == (pytest.approx(want) if value.kind == "float32" else want)
    assert {t.name for t in reader.tensors} == infos.keys()
    for t in reader.tensors:
        kind, shape = infos[t.name]
        assert t.tensor_type.name == kind.name
        assert tuple(reversed(t.shape.tolist())) == shape
        assert np.asarray(t.data).view(np.uint8).tobytes() == data[t.name].numpy().tobytes()


def test_we_read_what_gguf_writes_and_write_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["a", "b", "ü"])
    writer.add_token_scores([0.5, 1.5, -2.0])
    writer.add_context_length(77)
    writer.add_rope_freq_base(10000.0)
    writer.add_add_bos_token(False)
    writer.add_int8("a.i8", -3)
    writer.add_float64("a.f64", 1e300)
    writer.add_array("a.flags", [True, False])
    x = torch.randn(4, 256)
    writer.add_tensor("x.weight", x.numpy())
    kinds = ("Q4_0", "Q8_0", "TQ1_0", "BF16")
    for name in kinds:
        kind = gguf.GGMLQuantizationType[name]
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(x.numpy(), kind), raw_dtype=kind)
    writer.add_tensor("e.weight", x.view(2, 2, 256).half().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with File(str(path)) as f:
        assert f.metadata["llama.context_length"] == Value("uint32", 77)
        assert f.metadata["tokenizer.ggml.tokens"].data == ["a", "b", "ü"]
        assert f.metadata["a.flags"].data.tolist() == [True, False]
        assert f.metadata["a.i8"].data == -3
        assert f.entries["e.weight"].shape == (2, 2, 256)
        assert torch.equal(f.entries["x.weight"].type.decode(f.mapped("x.weight"), (4, 256)).codes, x)
        for name in kinds:
            assert f.entries[f"{name}.weight"].type is TYPES[name]
        again = Writer(str(tmp_path / "b.gguf"), f.metadata, {n: (e.type, e.shape) for n, e in f.entries.items()})
        for name, e in f.entries.items():
            again.put(name, f.rows(name, 0, e.rows))
        again.finish()
    assert (tmp_path / "b.gguf").read_bytes() == path.read_bytes()


INFOS = {"a": (TYPES["Q8_0"], (6, 32)), "b": (TYPES["F32"], (2, 3)), "none": (TYPES["F32"], (0, 3))}
METADATA = {"general.name": Value("string", "x")}


def test_writing_is_gone_on_with(tmp_path: Path) -> None:
    path = str(tmp_path / "a.gguf")
    a, b = torch.randint(0, 256, (6, 34), dtype=torch.uint8), torch.randint(0, 256, (2, 12), dtype=torch.uint8)
    first = Writer(path, METADATA, INFOS)
    first.put("a", a[2:5], 2)
    first.close()
    second = Writer(path, METADATA, INFOS, resume=True)
    second.had("a", [2, 3, 4])
    second.put("a", a[:2])
    second.put("b", b)
    with pytest.raises(CheckpointError, match="a: was not written completely"):
        second.finish()
    second.put("a", a[5:], 5)
    second.finish()
    with File(path) as f:
        assert torch.equal(f.mapped("a"), a)
        assert torch.equal(f.mapped("b"), b)


def test_another_file_is_not_gone_on_with(tmp_path: Path) -> None:
    path = str(tmp_path / "a.gguf")
    Writer(path, METADATA, INFOS).close()
    with pytest.raises(CheckpointError, match="header differs"):
        Writer(path, {"general.name": Value("string", "y")}, INFOS, resume=True)
    with pytest.raises(CheckpointError, match="expected"):
        Writer(path, METADATA, INFOS | {"c": (TYPES["F32"], (99,))}, resume=True)
    with pytest.raises(FileExistsError):
        Writer(path, METADATA, INFOS)
    os.symlink(path, tmp_path / "link")
    for resume in (False, True):
        with pytest.raises(OSError):  # noqa: PT011  its kind depends on the system
            Writer(str(tmp_path / "link"), METADATA, INFOS, resume=resume)


def test_rows_that_were_not_announced_are_refused(tmp_path: Path) -> None:
    writer = Writer(str(tmp_path / "a.gguf"), METADATA, INFOS)
    for raw, first in (
        (torch.zeros(7, 34, dtype=torch.uint8), 0), (torch.zeros(2, 34, dtype=torch.uint8), 5),
        (torch.zeros(1, 33, dtype=torch.uint8), 0), (torch.zeros(1, 34), 0), (torch.zeros(34, dtype=torch.uint8), 0),
        (torch.zeros(1, 34, dtype=torch.uint8), -1),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match="expected uint8"):
            writer.put("a", raw, first)
    with pytest.raises(CheckpointError, match="not written"):
        writer.finish()
    writer.close()


@pytest.mark.parametrize(
    ("metadata", "infos", "words"),
    [
        ({}, {"a" * 64: (TYPES["F32"], (3,))}, "at most 63"),
        ({}, {"a..b": (TYPES["F32"], (3,))}, "empty part"),
        ({}, {"a": (TYPES["F32"], (1, 1, 1, 1, 3))}, "5 axes"),
        ({}, {"a": (TYPES["Q4_K"], (3, 100))}, "multiple of the block size 256"),
        ({}, {"a": (TYPES["F32"], (1 << 40, 1 << 40))}, "too large"),
        ({"": Value("bool", True)}, {}, "1 to 65535"),
        ({"a\n": Value("bool", True)}, {}, "control characters"),
        ({"general.alignment": Value("uint32", 48)}, {}, "power of two"),
        ({"general.alignment": Value("uint64", 32)}, {}, "power of two"),
    ],
)
def test_what_no_file_may_have_is_not_written(
    tmp_path: Path, metadata: dict[str, Value], infos: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        Writer(str(tmp_path / "a.gguf"), metadata, infos)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("uint8", 256), ("uint8", -1), ("int8", 1.5), ("uint32", True), ("uint32", "1"), ("float32", 1e39),
        ("float32", "1"), ("bool", 1), ("string", b"x"), ("string", 1), ("[string]", "abc"), ("[string]", [1]),
        ("[uint8]", [256]), ("[uint8]", [0.5]), ("[int32]", [[1]]), ("[bool]", [2]), ("[float32]", [1e39]),
        ("[float32]", ["1"]), ("[[uint8]]", [1]), ("int128", 1), ("", 1), ("uint8]", 1),
    ],
)  # fmt: skip
def test_a_wrong_value_cannot_be_made(kind: str, data: Any) -> None:
    with pytest.raises(ValueError, match="GGUF value"):
        Value(kind, data)


def test_a_large_vocabulary_and_large_data_open_quickly(tmp_path: Path) -> None:
    """150 000 tokens, 3 GB of data (a hole on disk): only the header is read, through several pieces of it."""
    path = tmp_path / "a.gguf"
    tokens = [f"token {i} ü" for i in range(150_000)]
    metadata = {"tokens": Value("[string]", tokens), "scores": Value("[float32]", np.arange(150_000))}
    writer = Writer(str(path), metadata, {"a": (TYPES["F32"], (3 << 10, 1 << 18))})
    writer.put("a", torch.full((1, 1 << 20), 7, dtype=torch.uint8), (3 << 10) - 1)
    writer.close()
    times = os.times()
    with File(str(path)) as f:
        assert sum(os.times()[:2]) - sum(times[:2]) < 1
        assert f.metadata["tokens"].data == tokens
        assert f.metadata["scores"].data[-1] == 149_999
        assert f.rows("a", (3 << 10) - 1, 3 << 10).unique().tolist() == [7]
        assert f.mapped("a").shape == (3 << 10, 1 << 20)


def test_floats_keep_their_bits(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    odd = np.frombuffer(struct.pack("<4I", 0x7FC00001, 0x80000000, 1, 0x7F800000), np.float32)
    Writer(str(path), {"a": Value("[float32]", odd)}, {}).finish()
    with File(str(path)) as f:
        assert f.metadata["a"].data.tobytes() == odd.tobytes()

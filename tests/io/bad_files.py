"""Files that must be refused. Each case writes one into a folder and returns the path to load.

``CONTAINER``, ``MANIFEST`` and ``VALUES`` change the sample file; sharded checkpoints are in bad_folders.py.
"""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.io.bad_folders import FOLDERS
from tests.io.samples import edit_bytes, edit_manifest, join, replace_tensor, sample_file, split

Header = dict[str, Any]
NAN, INF = struct.pack("<f", float("nan")), struct.pack("<f", float("inf"))
MINUS = struct.pack("<f", -1.0)
BF16_NAN, BF16_INF, BF16_MINUS = b"\xc0\x7f", b"\x80\x7f", b"\x80\xbf"


def raw(change: Callable[[Header, bytes], bytes]) -> Callable[[Path], Path]:
    """A case that makes the file's bytes from the sample's header and data."""

    def case(folder: Path) -> Path:
        path = folder / "bad.safetensors"
        path.write_bytes(change(*split(sample_file(folder).read_bytes())))
        return path

    return case


def entry(name: str, **changes: Any) -> Callable[[Path], Path]:
    """A case that changes fields of one tensor's header entry; None removes a field."""

    def change(header: Header, data: bytes) -> bytes:
        header[name] = {k: v for k, v in {**header[name], **changes}.items() if v is not None}
        return join(header, data)

    return raw(change)


def manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Path]:
    """A case that changes the manifest."""
    return raw(lambda header, data: join(edit_manifest(header, change), data))


def tensor(name: str, **changes: Any) -> Callable[[Path], Path]:
    """A case that changes what the manifest says of one quantized tensor; None removes a key."""

    def change(m: dict[str, Any]) -> None:
        m["tensors"][name] = {k: v for k, v in {**m["tensors"][name], **changes}.items() if v is not None}

    return manifest(change)


def spec(name: str, **changes: Any) -> Callable[[Path], Path]:
    return manifest(lambda m: m["tensors"][name]["spec"].update(changes))


def value(name: str, at: int, new: bytes) -> Callable[[Path], Path]:
    """A case that changes bytes of one tensor."""
    return raw(lambda header, data: join(header, edit_bytes(header, data, name, at, new)))


def part(name: str, new: tuple[str, list[int], bytes] | None) -> Callable[[Path], Path]:
    """A case that removes, replaces or adds a stored tensor."""
    return raw(lambda header, data: join(*replace_tensor(header, data, name, new)))


def _twice(header: Header, data: bytes) -> bytes:
    text = json.dumps(header)
    return join((text[:-1] + ', "steps": ' + json.dumps(header["steps"]) + "}").encode(), data)


def _renamed(new: str) -> Callable[[Path], Path]:
    return raw(lambda header, data: join({new if k == "steps" else k: v for k, v in header.items()}, data))


def _shift(name: str, by: int) -> Callable[[Path], Path]:
    def change(header: Header, data: bytes) -> bytes:
        begin, end = header[name]["data_offsets"]
        header[name]["data_offsets"] = [begin + by, end + by]
        return join(header, data)

    return raw(change)


def _text(text: bytes, length: int | None = None) -> Callable[[Path], Path]:
    return raw(lambda header, data: join(text, data, length))


def _deep(opening: bytes, closing: bytes) -> bytes:
    return b'{"a":' + opening * 3000 + closing * 3000 + b"}"


def _many(header: Header, data: bytes) -> bytes:
    one = b'"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    return join(b"{" + b",".join(one % i for i in range(150_000)) + b"}", b"")


def _no_data(dtype: str, shape: list[int], offsets: list[Any]) -> Callable[[Path], Path]:
    return raw(lambda h, d: join({"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}, b""))


CONTAINER = {
    "empty": raw(lambda h, d: b""),
    "seven bytes": raw(lambda h, d: b"\0" * 7),
    "length zero": raw(lambda h, d: bytes(8) + d),
    "length above the file": raw(lambda h, d: join(h, d, 1 << 40)),
    "length 2**63": raw(lambda h, d: join(h, d, 1 << 63)),
    "length too short": raw(lambda h, d: join(h, d, 100)),
    "truncated": raw(lambda h, d: join(h, d[:-1])),
    "longer than said": raw(lambda h, d: join(h, d + b"\0")),
    "header cut": raw(lambda h, d: join(h, b"")[:200]),
    "pickle": raw(lambda h, d: b"\x80\x02}q\x00." * 20),
    "not UTF-8": _text(b'{"\xff\xfe": 1}'),
    "not an object": _text(b"[]"),
    "leading space": _text(b" {}"),
    "trailing garbage": _text(b"{} x"),
    "no JSON": _text(b"{nonsense}"),
    "unclosed string": _text(b'{"a' + b'\\"' * 1_000_000),
    "3000 objects deep": _text(_deep(b'{"a":', b"}").replace(b"{}", b"1")),
    "3000 arrays deep": _text(_deep(b"[", b"]")),
    "a million brackets": _text(b'{"a":' + b"[" * 1_000_000),
    "number of a million digits": _text(b'{"a":' + b"1" * 1_000_000 + b"}"),
    "a key twice": raw(_twice),
    "150 000 entries": raw(_many),
    "NaN as offset": _no_data("F32", [0], [float("nan"), 0]),
    "fraction as offset": _no_data("F32", [0], [0.0, 0]),
    "bool as offset": _no_data("U8", [0], [False, False]),
    "negative offset": _no_data("U8", [0], [-1, -1]),
    "one offset": _no_data("U8", [0], [0]),
    "text as offset": _no_data("U8", [0], ["0", "0"]),
    "offsets in reverse": _no_data("U8", [0], [8, 0]),
    "negative shape": _no_data("U8", [-1], [0, 0]),
    "huge shape": _no_data("F32", [1 << 62, 1 << 62], [0, 0]),
    "shape that wraps to zero": _no_data("F32", [1 << 32, 1 << 32], [0, 0]),
    "huge sizes beside a zero": _no_data("F32", [0, 1 << 60, 1 << 60], [0, 0]),
    "bool in shape": _no_data("U8", [True], [0, 1]),
    "65 axes": _no_data("U8", [0] * 65, [0, 0]),
    "shape is no list": entry("steps", shape=3),
    "no dtype": entry("steps", dtype=None),
    "unknown dtype": entry("steps", dtype="I65"),
    "dtype of torch": entry("steps", dtype="torch.load"),
    "stored dtype is a list": entry("steps", dtype=["I64"]),
    "sub-byte dtype": _no_data("F4", [2], [0, 1]),
    "extra key in an entry": entry("steps", strides=[1]),
    "no offsets": entry("steps", data_offsets=None),
    "entry is a list": raw(lambda h, d: join({**h, "steps": [1]}, d)),
    "past the end": _shift("mask", 1 << 20),
    "overlap": _shift("e4m3.bias", -8),
    "shape times dtype is not bytes": entry("steps", shape=[2]),
    "metadata is a list": raw(lambda h, d: join({**h, "__metadata__": []}, d)),
    "metadata holds a number": raw(lambda h, d: join({**h, "__metadata__": {"a": 1}}, d)),
    "bool of 2": value("mask", 0, b"\x02"),
    "name empty": _renamed(""),
    "name with NUL": _renamed("a\0b"),
    "name with dots": _renamed("a..b"),
    "name upward": _renamed("../../etc"),
    "name of 65 parts": _renamed(".".join("x" * 65)),
    "name reserved": _renamed("a.__class__.b"),
    "name of 1025 bytes": _renamed("x" * 1025),
    "name with half a surrogate": _renamed("\ud800"),
    "name with a line feed": _renamed("a\nb"),
}

SOME_SPEC: Any = "float32"
for _ in range(12):
    SOME_SPEC = {"format": "int8", "block": [1], "scale": SOME_SPEC}


def _manifest_text(text: str) -> Callable[[Path], Path]:
    def change(header: Header, data: bytes) -> bytes:
        header["__metadata__"]["pennyweight"] = text
        return join(header, data)

    return raw(change)


def _deep_manifest() -> str:
    opening, closing = '{"format":"int8","block":[1],"scale":', "}"
    spec = opening * 3000 + '"float32"' + closing * 3000
    return '{"version":1,"aliases":{},"tensors":{"a":{"shape":[1],"dtype":"float32","spec":' + spec + "}}}"


MANIFEST = {
    "manifest is no JSON": _manifest_text("yes"),
    "manifest is a list": _manifest_text("[]"),
    "manifest 3000 deep": _manifest_text(_deep_manifest()),
    "manifest a dozen deep": spec("int4.weight", scale=SOME_SPEC),
    "manifest with a key twice": _manifest_text('{"version":1,"version":1,"tensors":{},"aliases":{}}'),
    "manifest with NaN": _manifest_text('{"version":NaN,"tensors":{},"aliases":{}}'),
    "newer version": manifest(lambda m: m.update(version=6)),
    "version too low for what is there": manifest(lambda m: m.update(version=1)),
    "version 999": manifest(lambda m: m.update(version=999, novelty=True)),
    "version 0": manifest(lambda m: m.update(version=0)),
    "version true": manifest(lambda m: m.update(version=True)),
    "version text": manifest(lambda m: m.update(version="1")),
    "no version": manifest(lambda m: m.pop("version") and None),
    "unknown key": manifest(lambda m: m.update(auto_map={"AutoModel": "evil.Model"})),
    "tensors is a list": manifest(lambda m: m.update(tensors=[])),
    "tensor unknown key": tensor("int4.weight", trust_remote_code=True),
    "tensor is a text": manifest(lambda m: m["tensors"].update({"int4.weight": "x"})),
    "no shape": tensor("int4.weight", shape=None),
    "shape with a fraction": tensor("int4.weight", shape=[8.0, 64]),
    "shape with a bool": tensor("int4.weight", shape=[True, 64]),
    "shape negative": tensor("int4.weight", shape=[-8, 64]),
    "shape huge": tensor("int4.weight", shape=[1 << 40, 1 << 40]),
    "shape larger than stored": tensor("int4.weight", shape=[1 << 20, 1 << 20]),
    "shape smaller than stored": tensor("int4.weight", shape=[7, 64]),
    "shape of another rank": tensor("int4.weight", shape=[8, 1, 64]),
    "shape of 65 axes": tensor("int4.weight", shape=[1] * 63 + [8, 64]),
    "dtype unknown": tensor("int4.weight", dtype="float31"),
    "dtype integer": tensor("int4.weight", dtype="int8"),
    "dtype is a list": tensor("int4.weight", dtype=["float32"]),
    "axes are no permutation": tensor("int4.weight", axes=[0, 0]),
    "axes out of range": tensor("int4.weight", axes=[1, 2]),
    "axes too many": tensor("int4.weight", axes=[1, 0, 2]),
    "axes with a bool": tensor("int4.weight", axes=[True, 0]),
    "axes identity": tensor("int4.weight", axes=[0, 1]),
    "axes swapped": tensor("int4.weight", axes=[1, 0]),
    "signed_scale is 1": tensor("int4.weight", signed_scale=1),
    "perm is 1": tensor("reordered.weight", perm=1),
    "perm of a number": tensor("reordered.weight", perm=True, shape=[]),
    "perm not announced": tensor("reordered.weight", perm=None),
    "perm not stored": tensor("int4.weight", perm=True),
    "pre_scale is 1": tensor("scaled.weight", pre_scale=1),
    "pre_scale of a number": tensor("scaled.weight", pre_scale=True, shape=[]),
    "pre_scale not announced": tensor("scaled.weight", pre_scale=None),
    "pre_scale not stored": tensor("int4.weight", pre_scale=True),
    "spec missing": tensor("int4.weight", spec=None),
    "spec is a text": tensor("int4.weight", spec="int4"),
    "spec unknown key": spec("int4.weight", bits=4),
    "spec with a layout": spec("int4.weight", layout="torch_int4"),
    "spec with layout bits": spec("int4.weight", layout="bits"),
    "format unknown": spec("int4.weight", format="int9"),
    "format with dots": spec("int4.weight", format="os.system"),
    "format is a list": spec("int4.weight", format=["int4"]),
    "format of another width": spec("int4.weight", format="int8"),
    "block zero": spec("int4.weight", block=[0]),
    "block -7": spec("int4.weight", block=[-7]),
    "block other": spec("int4.weight", block=[16]),
    "block text": spec("int4.weight", block="32"),
    "block fraction": spec("int4.weight", block=[32.0]),
    "block bool": spec("int4.weight", block=[True]),
    "block empty": spec("int4.weight", block=[]),
    "block of more axes": spec("int4.weight", block=[2, 2, 32]),
    "scale dtype unknown": spec("int4.weight", scale="float8"),
    "scale dtype other": spec("int4.weight", scale="float32"),
    "scale null": spec("int4.weight", scale=None),
    "scale number": spec("int4.weight", scale=1),
    "zero_point is 1": spec("int4.weight", zero_point=1),
    "zero_point of a float": spec("e4m3.weight", zero_point=True),
    "mid huge": spec("int4.weight", mid=10**18),
    "mid out of range": spec("shifted.weight", mid=16),
    "mid of a float": spec("e4m3.weight", mid=1),
    "act unknown mode": tensor("int4.weight", act={"spec": {"format": "int8", "block": [-1], "scale": "float32"},
                                                   "mode": "eval"}),
    "act unknown rule": tensor("int4.weight", act={"spec": {"format": "int8", "block": [-1], "scale": "float32"},
                                                   "mode": "dynamic", "rule": "__import__"}),
    "act eps huge": tensor("int4.weight", act={"spec": {"format": "int8", "block": [-1], "scale": "float32"},
                                               "mode": "dynamic", "eps": 10**400}),
    "act eps negative": tensor("int4.weight", act={"spec": {"format": "int8", "block": [-1], "scale": "float32"},
                                                   "mode": "dynamic", "eps": -1.0}),
    "act without spec": tensor("int4.weight", act={"mode": "dynamic"}),
    "act static without parameters": tensor("int4.weight", act={"spec": {"format": "int8", "block": None,
                                                                         "scale": "float32"}, "mode": "static"}),
    "quantized twice": manifest(lambda m: m["tensors"].update({"int4.weight.codes": m["tensors"]["int4.weight"]})),
    "declared, not stored": manifest(lambda m: m["tensors"].update({"absent": m["tensors"]["int4.weight"]})),
    "no guard": part("int4.weight", None),
    "guard with bytes": part("int4.weight", ("U8", [1], bytes(1))),
    "guard not announced": tensor("int4.weight", guard=None),
    "guard is 1": tensor("int4.weight", guard=1),
    "flat, said to be in rows": tensor("conv.weight", flat=None),
    "flat of two axes": tensor("int4.weight", flat=True),
    "flat is 1": tensor("conv.weight", flat=1),
    "flat codes a byte short": part("conv.weight.codes", ("U8", [8, 1, 1, 17], bytes(8 * 17))),
    "stored, not declared": manifest(lambda m: m["tensors"].pop("int4.weight") and None),
    "name reserved in the manifest": manifest(lambda m: m["tensors"].update({"__x__": m["tensors"]["int4.weight"]})),
    "alias of nothing": manifest(lambda m: m["aliases"].update({"other": "absent"})),
    "alias of an alias": manifest(lambda m: m["aliases"].update({"a": "b", "b": "a"})),
    "alias of itself": manifest(lambda m: m["aliases"].update({"a": "a"})),
    "alias of a part": manifest(lambda m: m["aliases"].update({"a": "int4.weight.codes"})),
    "alias that is stored": manifest(lambda m: m["aliases"].update({"steps": "mask"})),
    "alias is a number": manifest(lambda m: m["aliases"].update({"a": 1})),
    "alias with a bad name": manifest(lambda m: m["aliases"].update({"a..b": "mask"})),
    "regex bomb": manifest(lambda m: m["tensors"].update({"re:(a+)+$": m["tensors"]["int4.weight"]})),
}  # fmt: skip

VALUES = {
    "no codes": part("int4.weight.codes", None),
    "no scale": part("int4.weight.scale", None),
    "no zero point": part("rows.weight.zero_point", None),
    "no offset": part("shifted.weight.offset", None),
    "no act_scale": part("static.weight.act_scale", None),
    "no codes of a scale": part("mx.weight.scale.codes", None),
    "left-over zero point": part("int4.weight.zero_point", ("I8", [8, 2], bytes(16))),
    "left-over nested part": part("int4.weight.scale.codes", ("I8", [8, 2], bytes(16))),
    "left-over perm": part("int4.weight.perm", ("I32", [64], bytes(256))),
    "left-over table": part("int4.weight.codes.scale", ("F32", [1], bytes(4))),
    "float beside quantized": part("int4.weight", ("F32", [8, 64], bytes(8 * 64 * 4))),
    "float for codes": part("static.weight.codes", ("F32", [8, 64], bytes(8 * 64 * 4))),
    "uint8 for int8 codes": part("static.weight.codes", ("U8", [8, 64], bytes(8 * 64))),
    "codes a row short": part("int4.weight.codes", ("U8", [7, 32], bytes(7 * 32))),
    "codes flat": part("int4.weight.codes", ("U8", [8 * 32], bytes(8 * 32))),
    "scale of one row": part("static.weight.scale", ("F32", [1, 1], b"\0\0\x80\x3f")),
    "scale of no axes": part("static.weight.scale", ("F32", [], b"\0\0\x80\x3f")),
    "scale of float16": part("int4.weight.scale", ("F16", [8, 2], bytes(32))),
    "scale of int64": part("static.weight.scale", ("I64", [8, 1], bytes(64))),
    "zero point of int64": part("rows.weight.zero_point", ("I64", [8, 1], bytes(64))),
    "act_scale of two": part("static.weight.act_scale", ("F32", [2], bytes(8))),
    "no perm": part("reordered.weight.perm", None),
    "perm of int64": part("reordered.weight.perm", ("I64", [64], b"".join(struct.pack("<q", i) for i in range(64)))),
    "perm of 63": part("reordered.weight.perm", ("I32", [63], b"".join(struct.pack("<i", i) for i in range(63)))),
    "perm of a row each": part("reordered.weight.perm", ("I32", [8, 64], bytes(8 * 64 * 4))),
    "perm all zero": part("reordered.weight.perm", ("I32", [64], bytes(256))),
    "perm with 64": part("reordered.weight.perm", ("I32", [64], b"".join(struct.pack("<i", i + 1) for i in range(64)))),
    "perm with -1": part("reordered.weight.perm", ("I32", [64], b"".join(struct.pack("<i", i - 1) for i in range(64)))),
    "no pre_scale": part("scaled.weight.pre_scale", None),
    "pre_scale of float64": part("scaled.weight.pre_scale", ("F64", [64], bytes(512))),
    "pre_scale of one": part("scaled.weight.pre_scale", ("F32", [1], bytes(4))),
    "pre_scale NaN": value("scaled.weight.pre_scale", 8, NAN),
    "pre_scale inf": value("scaled.weight.pre_scale", -4, INF),
    "left-over pre_scale": part("int4.weight.pre_scale", ("F32", [64], bytes(256))),
    "scale NaN": value("static.weight.scale", 8, NAN),
    "scale inf": value("static.weight.scale", -4, INF),
    "scale negative": value("static.weight.scale", 0, MINUS),
    "bf16 scale NaN": value("int4.weight.scale", 2, BF16_NAN),
    "bf16 scale inf": value("int4.weight.scale", 4, BF16_INF),
    "bf16 scale negative": value("int4.weight.scale", -2, BF16_MINUS),
    "offset NaN": value("shifted.weight.offset", 0, BF16_NAN),
    "offset inf": value("shifted.weight.offset", -2, BF16_INF),
    "offset of a scale NaN": value("nested.weight.scale.offset", 0, NAN),
    "scale of a scale inf": value("nested.weight.scale.scale", 0, INF),
    "scale of a scale negative": value("nested.weight.scale.scale", 0, MINUS),
    "nested scale negative": value("fp8.weight.scale.codes", 0, b"\xb8"),
    "act_scale NaN": value("static.weight.act_scale", 0, NAN),
    "act_scale zero": value("static.weight.act_scale", 0, bytes(4)),
    "act_scale negative": value("static.weight.act_scale", 0, MINUS),
    "zero point 16 of uint4": value("rows.weight.zero_point", 3, b"\x10"),
    "ternary code 3": value("ternary.weight.codes", 5, b"\x03"),
    "ternary code 3 at the end": value("ternary.weight.codes", -1, b"\xc0"),
    "e4m3 NaN": value("e4m3.weight.codes", 100, b"\x7f"),
    "e4m3 negative NaN": value("e4m3.weight.codes", -1, b"\xff"),
    "e8m0 NaN": value("mx.weight.scale.codes", 3, b"\xff"),
    "unused bits": value("rows.weight.codes", 18, b"\xf0"),
}


CASES = {**CONTAINER, **MANIFEST, **VALUES, **FOLDERS}
assert len(CASES) == len(CONTAINER) + len(MANIFEST) + len(VALUES) + len(FOLDERS)

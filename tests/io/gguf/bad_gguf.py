"""GGUF files that must be refused: what each is, its bytes, and words of the reason."""

import struct

from tests.io.gguf.samples import (
    GOOD_DATA,
    GOOD_INFOS,
    GOOD_KV,
    Change,
    array,
    build,
    info,
    kv,
    replaced,
    text,
)

U64 = (1 << 64) - 1


def with_kv(*more: bytes) -> Change:
    return lambda: build(kv=[*GOOD_KV, *more])


def with_info(at: int, new: bytes) -> Change:
    return lambda: build(infos=replaced(GOOD_INFOS, at, new))


def alignment(raw: bytes, kind: int = 4) -> Change:
    return lambda: build(kv=replaced(GOOD_KV, 1, kv("general.alignment", kind, raw)))


def number(value: int) -> bytes:
    return struct.pack("<I", value)


def swapped() -> bytes:
    return b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64)


def cut(count: int) -> Change:
    return lambda: build()[:-count]


BAD: dict[str, tuple[Change, str]] = {
    # the first 24 bytes
    "empty": (lambda: b"", "at least 24"),
    "20 bytes": (lambda: build()[:20], "at least 24"),
    "magic": (lambda: build(magic=b"GGML"), "not a GGUF file"),
    "magic swapped": (lambda: build(magic=b"FUGG"), "not a GGUF file"),
    "version 0": (lambda: build(version=0), "version 0"),
    "version 1": (lambda: build(version=1), "version 1"),
    "version 4": (lambda: build(version=4), "version 4"),
    "big-endian": (swapped, "big-endian"),
    "tensors -1": (lambda: build(tensors=U64), "tensors in a file of"),
    "tensors 2**40": (lambda: build(tensors=1 << 40), "tensors in a file of"),
    "one tensor too many": (lambda: build(tensors=5), "ends early|not UTF-8|string of|control|name"),
    "one tensor too few": (lambda: build(tensors=3), "offset|begins|belong|expected|truncated"),
    "keys -1": (lambda: build(keys=U64), "keys in a file of"),
    "keys 2**40": (lambda: build(keys=1 << 40), "keys in a file of"),
    "one key too many": (lambda: build(keys=6), "unknown kind|ends early|string of"),
    "many tensors": (lambda: build(tensors=40_000, data=bytes(2_000_000)), "the maximum is 32768"),
    "many keys": (lambda: build(keys=9000, data=bytes(200_000)), "the maximum is 8192"),
    # keys
    "empty key": (with_kv(kv("", 4, number(1))), "1 to 65535"),
    "long key": (with_kv(kv("k" * 65536, 4, number(1))), "the maximum is 65535"),
    "key length 2**63": (with_kv(struct.pack("<Q", 1 << 63) + b"k"), "the maximum is 65535"),
    "key not UTF-8": (with_kv(kv(b"\xff\xfe", 4, number(1))), "not UTF-8"),
    "key with NUL": (with_kv(kv("a\0b", 4, number(1))), "control characters"),
    "key twice": (with_kv(kv("flag", 7, b"\0")), "'flag' appears twice"),
    # values
    "kind 13": (with_kv(kv("x", 13, number(1))), "unknown kind 13"),
    "kind -1": (with_kv(kv("x", 0xFFFFFFFF, number(1))), "unknown kind 4294967295"),
    "bool 2": (with_kv(kv("x", 7, b"\2")), "neither 0 nor 1"),
    "bool 2 in an array": (with_kv(kv("x", 9, array(7, 3, b"\0\1\2"))), "neither 0 nor 1"),
    "array of arrays": (with_kv(kv("x", 9, array(9, 1, array(4, 1, number(1))))), "array of arrays"),
    "array of kind 99": (with_kv(kv("x", 9, array(99, 1, number(1)))), "unknown kind 99"),
    "array of kind -1": (with_kv(kv("x", 9, array(0xFFFFFFFF, 0, b""))), "unknown kind"),
    "array of 2**63": (with_kv(kv("x", 9, array(4, 1 << 63, b""))), "ends early"),
    "array whose bytes wrap": (with_kv(kv("x", 9, array(4, 1 << 62, b""))), "ends early"),
    "strings of 2**61": (with_kv(kv("x", 9, array(8, 1 << 61, b""))), "strings"),
    "string in an array too long": (with_kv(kv("x", 9, array(8, 1, struct.pack("<Q", 1 << 40)))), "ends early"),
    "long string in an array not UTF-8": (
        with_kv(kv("x", 9, array(8, 2, text("a" * 200) + text(b"\xc3")))),
        "not UTF-8",
    ),
    "string in an array ends in half a character": (
        with_kv(kv("x", 9, array(8, 2, text(b"\xc3") + text(b"\xa4")))),
        "not UTF-8",
    ),
    "string in an array not UTF-8": (with_kv(kv("x", 9, array(8, 2, text("a") + text(b"\x80")))), "not UTF-8"),
    "string length 2**64 - 1": (with_kv(kv("x", 8, struct.pack("<Q", U64))), "string of"),
    "string longer than the file": (with_kv(kv("x", 8, struct.pack("<Q", 1 << 20))), "ends early"),
    "string not UTF-8": (with_kv(kv("x", 8, text(b"\xc3"))), "not UTF-8"),
    # alignment
    "alignment 0": (alignment(number(0)), "power of two"),
    "alignment 33": (alignment(number(33)), "power of two"),
    "alignment 2**31": (alignment(number(1 << 31)), "power of two"),
    "alignment of uint64": (alignment(struct.pack("<Q", 32), 10), "general.alignment is uint64"),
    "alignment of int32": (alignment(number(32), 5), "general.alignment is int32"),
    "alignment as string": (alignment(text("32"), 8), "general.alignment is string"),
    "alignment as array": (alignment(array(4, 1, number(32)), 9), "general.alignment is"),
    "alignment that the data has not": (alignment(number(1024)), "multiple of|truncated"),
    # tensors
    "name of 64 bytes": (with_info(0, info("n" * 64, [64, 3], 2, 0)), "the maximum is 63"),
    "name empty": (with_info(0, info("", [64, 3], 2, 0)), "name of 0 bytes"),
    "name not UTF-8": (with_info(0, info(b"\xff", [64, 3], 2, 0)), "not UTF-8"),
    "name with NUL": (with_info(0, info("a\0", [64, 3], 2, 0)), "control characters"),
    "name reserved": (with_info(0, info("a.__class__", [64, 3], 2, 0)), "reserved"),
    "name twice": (with_info(1, info("a.weight", [4], 0, 128)), "a.weight: appears twice"),
    "5 axes": (with_info(0, info("a.weight", [64, 3, 1, 1, 1], 2, 0)), "5 axes"),
    "2**32 - 1 axes": (with_info(0, info("a.weight", [64, 3], 2, 0, 0xFFFFFFFF)), "axes"),
    "size -1": (with_info(0, info("a.weight", [64, U64], 2, 0)), "too large"),
    "sizes wrap in int64": (with_info(1, info("b.weight", [1 << 31, 1 << 31, 1 << 2], 0, 128)), "too large"),
    "sizes wrap in uint64": (with_info(1, info("b.weight", [1 << 32, 1 << 32, 1], 0, 128)), "too large"),
    "sizes wrap beside a zero": (with_info(2, info("c.weight", [0, 1 << 62, 1 << 62], 0, 160)), "too large"),
    "rows of part of a block": (with_info(0, info("a.weight", [33, 3], 2, 0)), "multiple of the block size 32"),
    "rows of part of a super-block": (
        with_info(3, info("d.weight", [128, 2, 2], 12, 160)),
        "multiple of the block size 256",
    ),
    "scalar of blocks": (with_info(0, info("a.weight", [], 2, 0)), "multiple of the block size 32"),
    "type 99": (with_info(1, info("b.weight", [4], 99, 128)), "unknown type 99"),
    "type -1": (with_info(1, info("b.weight", [4], 0xFFFFFFFF, 128)), "unknown type"),
    "type removed": (with_info(0, info("a.weight", [64, 3], 4, 0)), "Q4_2"),
    "type of activations": (with_info(0, info("a.weight", [64, 3], 9, 0)), "Q8_1"),
    "offset unaligned": (with_info(1, info("b.weight", [4], 0, 130)), "not a multiple of 32"),
    "offset past the end": (with_info(3, info("d.weight", [256, 2], 12, 1 << 40)), "truncated"),
    "offset 2**64 - 32": (with_info(3, info("d.weight", [256, 2], 12, U64 - 31)), "truncated"),
    "overlap": (with_info(1, info("b.weight", [4], 0, 96)), "overlap"),
    "same offset": (with_info(1, info("b.weight", [4], 0, 0)), "overlap"),
    "hole": (with_info(1, info("b.weight", [4], 0, 0)), "hole"),
    "hole of one alignment": (lambda: build(data=GOOD_DATA + bytes(32)), "belong to no tensor"),
    "larger than its data": (with_info(3, info("d.weight", [256, 1, 3], 12, 160)), "truncated"),
    # the end
    "one byte short": (cut(1), "truncated"),
    "half of the data": (cut(300), "truncated"),
    "cut in the tensors": (lambda: build()[:300], "ends early|truncated|string of"),
    "cut in the metadata": (lambda: build()[:100], "ends early|declares"),
    "bytes after the end": (lambda: build() + bytes(40), "belong to no tensor"),
}

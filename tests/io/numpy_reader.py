"""docs/format.md, versions 1 to 5, with numpy alone: read(path) -> {name: array}, quantized tensors as float32.

Written from the page, not from the library, so that the page is known to be enough. It trusts its file.
"""

import json
from pathlib import Path

import numpy as np

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}
DTYPES |= {"BOOL": "?", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1"}
BITS = {"ternary": 2, "e4m3": 8, "e5m2": 8, "e3m2": 6, "e2m3": 6, "e2m1": 4, "e8m0": 8, "nf4": 4}
BITS |= {"dynamic4": 4, "udynamic4": 4, "dynamic8": 8, "udynamic8": 8}
DIGITS = ("nf4_digits_float32", "nf4_digits_bfloat16", "nf4_digits_float16")
BITS |= dict.fromkeys(DIGITS, 4)
BITS |= {"dynamic8_float32": 8, "fp4_twelfths": 4}
BITS |= {"ufloat8": 8, "ufloat4": 4, "linear4": 4, "e3m1": 5, "e2m2": 5}
BITS |= {f"half_int{b}": b for b in range(1, 9)}
BITS |= {"iq4_nl": 4, "iq1": 3, "iq2": 3, "iq3_xxs": 4, "iq3_s": 4}
IQ4_NL = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
BOTH_SIGNS = {"iq1": [0.125, 0.875, 1.125], "iq2": [8, 25, 43], "iq3_xxs": [4, 12, 20, 28, 36, 44, 52, 62]}
BOTH_SIGNS |= {"iq3_s": [1, 3, 5, 7, 9, 11, 13, 15]}
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def read(path):
    raw = Path(path).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    manifest = json.loads(header.pop("__metadata__").get("pennyweight", '{"tensors": {}, "aliases": {}}'))
    stored = {}
    for name, e in header.items():
        begin, end = e["data_offsets"]
        array = np.frombuffer(data[begin:end], DTYPES[e["dtype"]]).reshape(e["shape"])
        stored[name] = (array.astype("<u4") << 16).view("<f4") if e["dtype"] == "BF16" else array
    out = {}
    for name, meta in manifest["tensors"].items():
        axes = meta.get("axes", list(range(len(meta["shape"]))))
        shape = [meta["shape"][axes.index(i)] for i in range(len(axes))]
        x = value(name, meta["spec"], shape, stored, meta.get("flat", False))
        if meta.get("perm"):
            x = x[..., np.argsort(stored[f"{name}.perm"])]
        if meta.get("pre_scale"):
            x = x * stored[f"{name}.pre_scale"]
        out[name] = x.transpose(axes)
    used = tuple(f"{name}." for name in manifest["tensors"])
    out |= {name: array for name, array in stored.items() if name not in out and not name.startswith(used)}
    return out | {alias: out[name] for alias, name in manifest["aliases"].items()}


def value(name, spec, shape, stored, flat=False):
    """float32 values of a quantized tensor of stored ``shape``."""
    block = shape if spec["block"] is None else [1] * (len(shape) - len(spec["block"])) + spec["block"]
    block = [max(n, 1) if b == -1 else max(min(b, n), 1) for n, b in zip(shape, block, strict=True)]
    groups = [-(-n // b) for n, b in zip(shape, block, strict=True)]
    padded = [g * b for g, b in zip(groups, block, strict=True)]
    if spec["format"].startswith("learned"):
        x = learned(stored[f"{name}.codes"], stored[f"{name}.table"], spec["format"], padded, flat)
    else:
        x = decode(spec["format"], codes(stored[f"{name}.codes"], spec["format"], padded, flat)).astype(np.float32)
    x = x - np.float32(spec.get("mid", 0))

    def part(key):
        p = spec[key]
        if key == "zero_point" and p is not True:  # a bit stream of numbers of that format
            p = codes(stored[f"{name}.{key}"], p, groups, flat)
        else:
            p = value(f"{name}.{key}", p, groups, stored) if isinstance(p, dict) else stored[f"{name}.{key}"]
        p = p.astype(np.float32)
        for axis, b in enumerate(block):
            p = np.repeat(p, b, axis)
        return p

    if spec.get("zero_point"):
        x = x - part("zero_point")
    if spec["scale"] is not None:
        x = x * part("scale")
    if spec.get("offset") is not None:
        x = x + part("offset")
    limit = np.finfo(np.float32).max
    return np.clip(x[tuple(slice(n) for n in shape)], -limit, limit)


def codes(raw, f, padded, flat=False):
    """Codes [padded] of a stored tensor; bit streams are unpacked, signed ones shifted back. flat: one stream for each
    entry of the first axis."""
    bits = BITS.get(f) or int(f.removeprefix("u").removeprefix("int"))
    if bits == 8:
        return raw
    stream = np.unpackbits(raw.reshape(*raw.shape[:-1], -1), axis=-1, bitorder="little")
    n = int(np.prod(padded[1:])) if flat else padded[-1]
    words = stream[..., : n * bits].reshape(*padded, bits).astype(np.int32) @ (1 << np.arange(bits))
    return words - (1 if f == "ternary" else 1 << (bits - 1) if f.startswith("int") else 0)


def learned(raw, table, f, padded, flat=False):
    """Rows of the tensor's own table, one for each code, beside each other."""
    bits, _, dim = f.removeprefix("learned").partition("x")
    dim = int(dim or 1)
    found = codes(raw, f"uint{bits}", [*padded[:-1], -(-padded[-1] // dim)], flat)
    x = table.astype(np.float32)[found].reshape(*padded[:-1], -1)
    return x[..., : padded[-1]]


def decode(f, code):
    if f.startswith("half_int"):
        return code + np.float32(0.5 - (1 << (BITS[f] - 1)))
    if "int" in f or f == "ternary":
        return code
    if f == "e8m0":
        return np.ldexp(1.0, code.astype(np.int32) - 127)
    return table(f)[code]


def table(f):
    """Numbers of all codes, as float32."""
    if f == "nf4":
        return np.array(NF4, np.float32)
    if f == "iq4_nl":
        return np.array(IQ4_NL, np.float32)
    if f in BOTH_SIGNS:
        return np.array([-v for v in BOTH_SIGNS[f][::-1]] + BOTH_SIGNS[f], np.float32)
    if f in DIGITS:
        numbers = np.array([round(v, 4) for v in NF4], np.float32)
        if f.endswith("bfloat16"):  # the upper half of a float32, to the nearest
            return ((numbers.view(np.uint32) + 0x7FFF + (numbers.view(np.uint32) >> 16 & 1)) & 0xFFFF0000).view(
                np.float32
            )
        return numbers.astype(np.float16).astype(np.float32) if f.endswith("_float16") else numbers
    if f.startswith("ufloat"):
        steps = dict.fromkeys(range(-4, 4), 2) if f == "ufloat4" else {j: 8 if j < -4 else 16 for j in range(-20, 4)}
        return np.array([(1 + k / n) * 2.0**j for j, n in steps.items() for k in range(n)], np.float32)
    if f == "linear4":
        return np.arange(1, 17, dtype=np.float32) / 16
    if f == "fp4_twelfths":
        positive = np.array([0, 1 / 16, 2, 3, 4, 6, 8, 12], np.float32) / np.float32(12)
        return np.concatenate([-positive[:0:-1], np.zeros(1, np.float32), positive])
    if f == "dynamic8_float32":
        positive = []
        for i in range(7):
            n, a = 1 << i, np.float32(0.1)
            s, k = np.float64(np.float32(1 - np.float64(a)) / np.float32(n)), np.arange(n + 1)
            edges = np.where(k < (n + 1) // 2, np.float64(a) + s * k, 1 - s * (n - k)).astype(np.float32)
            positive += list((edges[:-1] + edges[1:]) / np.float32(2) * np.float32(10.0 ** (i - 6)))
        return np.array(sorted([0, 1, *positive, *(-v for v in positive)]), np.float32)
    if "dynamic" in f:  # decades, each with twice the numbers of the one below, plus 0 and 1; in float64, then rounded
        decades, signed, positive = BITS[f] - 1, f[0] == "d", [0.0, 1.0]
        for i in range(decades):
            n = 1 << (i if signed else i + 1)
            positive += [(0.1 + 0.9 * (k + 0.5) / n) * 10.0 ** (i - decades + 1) for k in range(n)]
        return np.array(sorted(positive + [-v for v in positive[2:] if signed]), np.float32)
    e, m = int(f[1]), int(f[3])  # e4m3, e5m2, e3m2, e2m3, e2m1
    code = np.arange(1 << (1 + e + m))
    exponent, fraction = (code >> m) & ((1 << e) - 1), (code & ((1 << m) - 1)) / (1 << m)
    bias = (1 << (e - 1)) - 1
    size = np.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias))
    return np.where(code >> (e + m), -size, size).astype(np.float32)

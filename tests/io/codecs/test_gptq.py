"""GPTQ files: read beside a formula in Python integers, written and read back, and refused where they mean nothing."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPTQConfig

from pennyweight.core.formats import E4M3, INT4, INT5, INT8, NF4, TERNARY, UINT4
from pennyweight.core.spec import NF4_DOUBLE, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io.codecs import CODECS
from pennyweight.io.codecs.gptq import GPTQ, GPTQ_V2, find
from pennyweight.io.file import KeyedError
from pennyweight.io.manifest import Meta
from pennyweight.io.safetensors_file import Entry
from pennyweight.io.state_dict import describe, pack
from pennyweight.io.validate import check_data
from tests.tensors import INT8_TOKEN

Tensors = dict[str, torch.Tensor]
VERSIONS = {"gptq": 1, "gptq_v2": 2}


# -- the format once more, by other means ----------------------------------------------------------------------------


def words(columns: np.ndarray, bits: int) -> np.ndarray:
    """int32 [ceil(n * bits / 32), m] of numbers [n, m]: each column one long integer, cut into words."""
    out = []
    for column in columns.T.tolist():
        stream = sum(int(number) << (i * bits) for i, number in enumerate(column))
        count = -(-len(column) * bits // 32)
        out.append([(stream >> (32 * i)) & 0xFFFFFFFF for i in range(count)])
    return np.array(out, dtype=np.uint32).astype(np.int32).T


@dataclass
class Sample:
    """A layer's stored tensors, its config, and the weight [O, I] they stand for."""

    tensors: Tensors
    method: dict[str, Any]
    weight: np.ndarray


def sample(
    bits: int = 4, inputs: int = 64, outputs: int = 32, group: int = 16, version: str = "gptq", sym: bool = False,
    order: str = "none", dtype: torch.dtype = torch.float16, name: str = "model.layer", seed: int = 0,
) -> Sample:  # fmt: skip
    """order: "none" without g_idx, "sorted", or "random"."""
    rng = np.random.default_rng(seed)
    size = inputs if group == -1 else group
    groups = -(-inputs // size)
    first = version == "gptq"
    codes = rng.integers(0, 1 << bits, (inputs, outputs))
    zeros = rng.integers(1 if first else 0, 1 << bits, (groups, outputs))
    if sym:
        zeros[:] = 1 << (bits - 1)
    scales = torch.from_numpy(rng.uniform(0.01, 1, (groups, outputs))).to(dtype)
    g_idx = np.arange(inputs) // size
    if order == "random":
        g_idx = rng.permutation(g_idx)
    number = scales.float().numpy()
    weight = ((codes - zeros[g_idx]).astype(np.float32) * number[g_idx]).T
    tensors = {
        f"{name}.qweight": torch.from_numpy(words(codes, bits)).contiguous(),
        f"{name}.qzeros": torch.from_numpy(words((zeros - first).T, bits).T.copy()),
        f"{name}.scales": scales,
    }
    if order != "none":
        tensors[f"{name}.g_idx"] = torch.from_numpy(g_idx.astype(np.int32))
    method = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": order == "random", "sym": sym,
              "checkpoint_format": version}  # fmt: skip
    return Sample(tensors, method, weight)


def entries(tensors: Tensors) -> dict[str, Entry]:
    return {name: Entry(t.dtype, tuple(t.shape), 0, t.nbytes) for name, t in tensors.items()}


def read(tensors: Tensors, method: dict[str, Any], name: str = "model.layer.weight") -> QT:
    """By the codec that claims it; parts are checked as those of native files are."""
    held = entries(tensors)
    codec = next(c for c in CODECS if c.claims(method, held))
    found = codec.find(held, method, tensors.__getitem__)
    assert set(found) == {name}
    assert set(found[name].stored) == set(tensors)
    parts, meta = found[name].parts(tensors.__getitem__), found[name].meta
    w = QT(parts, meta.spec, meta.shape, meta.dtype)
    meta = describe(name, w)
    stored = pack(name, w, meta)  # checks dtypes, shapes, ranges
    check_data(name, meta, stored.__getitem__)
    return w


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("order", ["none", "sorted", "random"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_values(bits: int, order: str, version: str) -> None:
    for sizes in ({}, {"group": -1}, {"inputs": 96, "outputs": 64, "group": 32}, {"group": 128}, {"sym": True}):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            s = sample(bits, order=order, version=version, dtype=dtype, **sizes)  # type: ignore[arg-type]
            w = read(s.tensors, s.method)
            np.testing.assert_array_equal(w.dequantize(torch.float32).numpy(), s.weight)
            assert (w.dtype, w.spec.scale) == (dtype, dtype)
            several = s.tensors["model.layer.scales"].shape[0] > 1
            assert (w.perm is not None) == (order == "random" and several)
            assert bool(w.spec.zero_point) == (not s.method["sym"])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("inputs", "outputs", "group"), [(40, 7, 16), (37, 33, 8), (33, 1, -1), (1, 5, -1), (31, 40, 31)]
)
def test_odd_sizes(bits: int, inputs: int, outputs: int, group: int) -> None:
    """The last word, and the last group, may be partly used."""
    for order in ("sorted", "random"):
        s = sample(bits, inputs, outputs, group, "gptq_v2", order=order)
        np.testing.assert_array_equal(read(s.tensors, s.method).dequantize(torch.float32).numpy(), s.weight)


def test_orders() -> None:
    s = sample(order="random")
    w = read(s.tensors, s.method)
    g_idx = s.tensors["model.layer.g_idx"]
    assert w.perm.dtype == torch.int32
    assert torch.equal(g_idx[w.perm.long()], torch.arange(64, dtype=torch.int32) // 16)
    s.method["desc_act"] = False  # some files say so and are in order none the less; the tensor counts
    assert torch.equal(read(s.tensors, s.method).perm, w.perm)
    s = sample(order="sorted")
    s.method["desc_act"] = True  # static groups: the order of activations, and channels where they were
    assert not find(entries(s.tensors), s.method, s.tensors.__getitem__)["model.layer.weight"].meta.perm
    assert read(s.tensors, s.method).perm is None
    s.tensors["model.layer.g_idx"] = s.tensors["model.layer.g_idx"].long()
    np.testing.assert_array_equal(read(s.tensors, s.method).dequantize(torch.float32).numpy(), s.weight)


def test_configs() -> None:
    """What older files leave out, and settings of single layers, whose patterns are not followed."""
    s = sample(order="sorted", sym=True)
    methods: list[dict[str, Any]] = [
        {}, {"quant_method": "gptq"}, {"bits": 4, "group_size": 16}, {**s.method, "checkpoint_format": None},
        {**s.method, "format": "GPTQ"}, {**s.method, "pack_dtype": "int32", "damp_percent": 0.01},
    ]  # fmt: skip
    for method in methods:
        w = read(s.tensors, method)
        np.testing.assert_array_equal(w.dequantize(torch.float32).numpy(), s.weight)
        assert bool(w.spec.zero_point) == ("sym" not in method)
    both = {**s.tensors, **sample(8, group=32, order="sorted", name="model.head", version="gptq").tensors}
    method = {**s.method, "dynamic": {"+:.*head((((": {"bits": 8, "group_size": 32, "sym": False}, "-:(a+)+$": {}}}
    found = find(entries(both), method, both.__getitem__)
    specs = {name: str(f.meta.spec) for name, f in found.items()}
    assert specs == {
        "model.layer.weight": "uint4[16] scale=f16 zero_point=uint4",
        "model.head.weight": "uint8[32] scale=f16 zero_point",
    }  # fmt: skip


def test_a_zero_point_of_a_group_of_zeros_says_nothing() -> None:
    """Version 1 stores 15 for a zero point of 0, or of 16; under a scale of 0 either is the same."""
    for sym in (False, True):
        s = sample(sym=sym)
        qzeros, scales = s.tensors["model.layer.qzeros"], s.tensors["model.layer.scales"]
        qzeros[2, 1] |= 0xF0  # output 9
        scales[2, 9] = 0
        s.weight[9, 32:48] = 0
        np.testing.assert_array_equal(read(s.tensors, s.method).dequantize(torch.float32).numpy(), s.weight)


# -- writing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [GPTQ, GPTQ_V2], ids=["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_what_was_read_is_written_as_it_was(bits: int, codec: Any) -> None:
    for order in ("sorted", "random"):
        for group in (-1, 16, 64, 128):
            s = sample(bits, 64, 32, group, codec.name, codec is GPTQ, order)
            w = read(s.tensors, s.method)
            name, meta = "model.layer.weight", describe("model.layer.weight", w)
            assert codec.writing.refuses(name, meta) is None
            out = codec.writing.pack(name, w.plain_parts(), meta)
            assert {k: (t.dtype, tuple(t.shape)) for k, t in out.items()} == codec.writing.stored(name, meta)
            assert out.keys() == s.tensors.keys()
            for key, tensor in s.tensors.items():
                assert torch.equal(out[key], tensor), key
                assert out[key].is_contiguous()
            method = codec.writing.method({name: meta}, ())
            assert {k: method[k] for k in s.method} == s.method | {"desc_act": w.perm is not None}


F16 = torch.float16
KEPT = {
    "int4": QuantSpec(INT4, (32,), F16),
    "int8 row": QuantSpec(INT8, (-1,), torch.bfloat16),
    "int8 asymmetric": QuantSpec(INT8, (64,), F16, zero_point=True),
    "uint4 asymmetric": QuantSpec(UINT4, (16,), F16, zero_point=True),
    "uint4 middle": QuantSpec(UINT4, (32,), F16, mid=8),
    "uint4 other middle": QuantSpec(UINT4, (32,), F16, mid=5),
    "int4 with a middle": QuantSpec(INT4, (32,), F16, mid=-3),
    "ternary": QuantSpec(TERNARY, (32,), F16),
}


@pytest.mark.parametrize("reordered", [False, True])
@pytest.mark.parametrize("name", KEPT)
def test_our_tensors_keep_every_bit(name: str, reordered: bool) -> None:
    w = QT.from_float(torch.randn(64, 96 if "64" not in str(KEPT[name]) else 128).to(KEPT[name].scale), KEPT[name])
    if reordered:
        w = w.with_(perm=torch.randperm(w.shape[1]).to(torch.int32))
    key = "model.layer.weight"
    meta = describe(key, w)
    for codec in (GPTQ, GPTQ_V2):
        reason = codec.writing.refuses(key, meta)
        if codec is GPTQ and name not in ("int4", "int8 row", "uint4 middle"):
            assert "use gptq_v2" in reason
            continue
        assert reason is None
        tensors, method = codec.writing.pack(key, w.plain_parts(), meta), codec.writing.method({key: meta}, ())
        again = read(tensors, method)
        assert torch.equal(again.dequantize(torch.float32), w.dequantize(torch.float32))
        assert method["sym"] == (name in ("int4", "int8 row", "uint4 middle"))


def meta(spec: QuantSpec, shape: tuple[int, ...] = (64, 128), **more: Any) -> Meta:
    return Meta(spec, shape, torch.bfloat16, **more)


GOOD = QuantSpec(UINT4, (32,), F16, mid=8)
REFUSED: dict[str, tuple[Meta, str, bool]] = {  # what, why, and whether another spec is offered
    "a table of numbers": (meta(QuantSpec(NF4, (64,), F16)), "integers of 2, 3, 4 or 8 bits", True),
    "nested scales": (meta(NF4_DOUBLE), "integers of 2, 3, 4 or 8 bits", True),
    "floats": (meta(QuantSpec(E4M3, (-1,), F16)), "integers of 2, 3, 4 or 8 bits", True),
    "5 bits": (meta(QuantSpec(INT5, (32,), F16)), "integers of 2, 3, 4 or 8 bits", True),
    "an offset": (meta(QuantSpec(UINT4, (32,), F16, offset=F16, mid=8)), "integer zero points", True),
    "a scale of float32": (meta(GOOD.with_(scale=torch.float32)), "scales must be float16 or bfloat16", True),
    "squares": (meta(GOOD.with_(block=(16, 16))), "GPTQ groups must be", True),
    "one scale": (meta(GOOD.with_(block=None)), "GPTQ groups must be", True),
    "groups of 24": (meta(GOOD.with_(block=(24,)), (64, 96)), "GPTQ groups must be", True),
    "a short last group": (meta(GOOD.with_(block=(64,)), (64, 96)), "GPTQ groups must be", True),
    "an input that is quantized": (meta(GOOD, act=INT8_TOKEN), "its activation is quantized", True),
    "40 inputs": (meta(GOOD, (64, 40)), "multiples of 32", False),
    "33 outputs": (meta(GOOD, (33, 64)), "multiples of 32", False),
    "no outputs": (meta(GOOD, (0, 64)), "multiples of 32", False),
    "experts": (meta(GOOD, (2, 64, 64)), "supports only weights [out, in] of linear layers", False),
    "transposed": (meta(GOOD, axes=(1, 0)), "supports only weights [out, in] of linear layers", False),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    held, reason, offered = REFUSED[case]
    for codec in (GPTQ, GPTQ_V2):
        assert reason in codec.writing.refuses("a.weight", held)
        spec = codec.writing.nearest("a.weight", held)
        assert (spec is not None) == offered
        if spec is not None:
            w = QT.from_float(torch.randn(held.shape).to(held.dtype), spec)
            assert codec.writing.refuses("a.weight", describe("a.weight", w)) is None
            assert spec.format.bits >= min(held.spec.format.bits, 8)
    assert "named <layer>.weight" in GPTQ.writing.refuses("a.in_proj", meta(GOOD))


def test_method() -> None:
    """One file, layers of several kinds, and some that stay float."""
    metas = {f"model.layers.{i}.up.weight": meta(GOOD) for i in range(3)}
    plain = ("model.layers.0.gate.weight", "lm_head.weight")
    method = GPTQ.writing.method(metas, plain)
    assert (method["bits"], method["group_size"], method["sym"], method["lm_head"]) == (4, 32, True, False)
    assert method["dynamic"] == {r"-:^model\.layers\.0\.gate$": {}}
    metas["lm_head.weight"] = meta(QuantSpec(INT8, (-1,), F16), perm=True)
    method = GPTQ_V2.writing.method(metas, plain[:1])
    assert method["lm_head"]
    assert method["desc_act"]
    assert method["dynamic"] == {r"-:^model\.layers\.0\.gate$": {}, "+:^lm_head$": {"bits": 8, "group_size": -1}}
    assert "dynamic" not in GPTQ.writing.method(dict.fromkeys(["a.weight"], meta(GOOD)), ())
    asymmetric = {**metas, "b.weight": meta(GOOD.with_(mid=0, zero_point=True))}
    assert not GPTQ_V2.writing.method(asymmetric, ())["sym"]
    for given in (method, GPTQ.writing.method(metas, plain)):
        config = GPTQConfig.from_dict(dict(given))
        kept = ("bits", "group_size", "desc_act", "sym", "format")
        assert {k: getattr(config, k) for k in kept} == {k: given[k] for k in kept}


def test_layers_of_several_kinds_are_read_back() -> None:
    state = {
        "a.up.weight": QT.from_float(torch.randn(64, 128).half(), KEPT["int4"]),
        "b.up.weight": QT.from_float(torch.randn(64, 128).half(), QuantSpec(INT8, (64,), F16)),
        "c.up.weight": QT.from_float(torch.randn(64, 128).half(), QuantSpec(INT4, (-1,), F16)),
    }
    metas = {name: describe(name, w) for name, w in state.items()}
    tensors: Tensors = {"a.up.bias": torch.zeros(64)}
    for name, w in state.items():
        tensors |= GPTQ.writing.pack(name, w.plain_parts(), metas[name])
    found = find(entries(tensors), GPTQ.writing.method(metas, ()), tensors.__getitem__)
    assert found.keys() == state.keys()
    for name, w in state.items():
        meta, parts = found[name].meta, found[name].parts(tensors.__getitem__)
        assert torch.equal(QT(parts, meta.spec, meta.shape, meta.dtype).dequantize(), w.dequantize())


# -- files that mean nothing -----------------------------------------------------------------------------------------


def replaced(part: str, new: Callable[[torch.Tensor], Any]) -> Callable[[Sample], None]:
    def change(s: Sample) -> None:
        s.tensors[f"model.layer.{part}"] = new(s.tensors[f"model.layer.{part}"])

    return change


def removed(part: str) -> Callable[[Sample], Any]:
    return lambda s: s.tensors.pop(f"model.layer.{part}")


def said(**changes: Any) -> Callable[[Sample], None]:
    return lambda s: s.method.update(changes)


BAD: dict[str, tuple[Callable[[Sample], Any], str]] = {  # in names, dtypes, shapes or config: nothing is read
    "no qweight": (removed("qweight"), "model.layer.qweight is missing"),
    "no qzeros": (removed("qzeros"), "model.layer.qzeros is missing"),
    "no scales": (removed("scales"), "model.layer.scales is missing"),
    "qweight of int64": (replaced("qweight", lambda t: t.long()), "qweight is torch.int64"),
    "qweight flat": (replaced("qweight", lambda t: t.flatten()), "expected 2 axes"),
    "qweight empty": (replaced("qweight", lambda t: t[:0]), "expected 2 axes"),
    "qweight a row short": (replaced("qweight", lambda t: t[1:]), "the config says 4"),
    "qweight a row more": (replaced("qweight", lambda t: torch.cat([t, t[:1]])), "the config says 4"),
    "qweight an output short": (replaced("qweight", lambda t: t[:, 1:]), "they do not belong to one layer"),
    "qweight of AWQ": (replaced("qweight", lambda t: t.reshape(64, 4)), "the config says 4"),
    "qzeros of int8": (replaced("qzeros", lambda t: t.to(torch.int8)), "qzeros is torch.int8"),
    "qzeros a group short": (replaced("qzeros", lambda t: t[1:]), "they do not belong to one layer"),
    "qzeros a word short": (replaced("qzeros", lambda t: t[:, 1:]), "the config says 4"),
    "scales of int32": (replaced("scales", lambda t: t.int()), "scales is torch.int32"),
    "scales of float64": (replaced("scales", lambda t: t.double()), "scales is torch.float64"),
    "scales an output short": (replaced("scales", lambda t: t[:, 1:]), "they do not belong to one layer"),
    "scales a group short": (replaced("scales", lambda t: t[1:]), "they do not belong to one layer"),
    "groups of another size": (said(group_size=32), "4 groups for 64 channels, but the config says group_size 32"),
    "g_idx of float": (replaced("g_idx", lambda t: t.float()), "g_idx is torch.float32"),
    "g_idx of a row each": (replaced("g_idx", lambda t: t[None]), "expected 1 axes"),
    "g_idx a channel short": (replaced("g_idx", lambda t: t[8:]), "the config says 4"),
    "g_idx empty": (replaced("g_idx", lambda t: t[:0]), "expected 1 axes"),
    "8 bits said": (said(bits=8), "fit 4 bits of 64 channels, but the config says 8"),
    "5 bits said": (said(bits=5), "the config says 5"),
    "bits of text": (said(bits="4"), "bits must be int"),
    "bits true": (said(bits=True), "bits must be int"),
    "group_size 0": (said(group_size=0), "positive or -1, got 0"),
    "group_size a half": (said(group_size=0.5), "group_size must be int"),
    "sym 1": (said(sym=1), "sym must be bool"),
    "desc_act text": (said(desc_act="no"), "desc_act must be bool"),
    "words of int64": (said(pack_dtype="int64"), "only int32 is supported"),
    "marlin": (said(checkpoint_format="marlin"), "'marlin' is packed for one kernel"),
    "planar": (said(checkpoint_format="gptq_p"), "'gptq_p' is packed for one kernel"),
    "an old marlin": (said(is_marlin_format=True, checkpoint_format=None), "'marlin' is packed for one kernel"),
    "two formats": (said(format="gptq_v2"), "several formats"),
    "dynamic a list": (said(dynamic=["x"]), "dynamic must be dict"),
    "dynamic of texts": (said(dynamic={"x": "y"}), "dynamic must map patterns to objects"),
}  # fmt: skip
WRONG: dict[str, tuple[Callable[[Sample], Any], str]] = {  # in numbers
    "g_idx too large": (replaced("g_idx", lambda t: t + 1), "g_idx ranges from 1 to 4, but there are 4 groups"),
    "g_idx negative": (replaced("g_idx", lambda t: t - 1), "g_idx ranges from -1 to 2"),
    "g_idx all zero": (replaced("g_idx", lambda t: t * 0), "64 channels into group 0, expected 16"),
    "g_idx uneven": (replaced("g_idx", lambda t: torch.cat([t[:1], t[:-1]])), "17 channels into group 0"),
    "zero lost in version 1": (replaced("qzeros", lambda t: t | 0xF0), "16 of 128 zero points are stored as 15"),
    "all lost": (replaced("qzeros", lambda t: t | -1), "128 of 128 zero points are stored as 15"),
    "said to be symmetric": (said(sym=True), "zero points are not 8, but config.json says sym: true"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad(case: str) -> None:
    s = sample(order="sorted")
    change, reason = BAD[case]
    change(s)
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        find(entries(s.tensors), s.method, s.tensors.__getitem__)
    assert not isinstance(caught.value, KeyedError) or caught.value.name == "model.layer.weight"


@pytest.mark.parametrize("case", WRONG)
def test_wrong_numbers(case: str) -> None:
    s = sample(order="sorted", seed=3)
    change, reason = WRONG[case]
    s.tensors["model.layer.qzeros"] &= 0x77777777  # none is lost before
    change(s)
    with pytest.raises(ValueError, match=re.escape(reason)):
        find(entries(s.tensors), s.method, s.tensors.__getitem__)["model.layer.weight"].parts(s.tensors.__getitem__)


def test_sizes_that_leave_a_choice() -> None:
    """Without g_idx and with few outputs, only the config tells the number of bits."""
    s = sample(4, 64, 1, 32, order="none")
    with pytest.raises(KeyedError, match="fit 2 and 3 and 4 and 8 bits, but the config says None"):
        find(entries(s.tensors), {"quant_method": "gptq"}, s.tensors.__getitem__)
    with pytest.raises(KeyedError, match="8 rows, not a whole number of 3-bit channels"):
        find(entries(s.tensors), {**s.method, "bits": 3}, s.tensors.__getitem__)


def test_claims() -> None:
    s = sample(order="sorted")
    held = entries(s.tensors)
    claimed = [(c.name, c.claims(s.method, held)) for c in (GPTQ, GPTQ_V2)]
    assert claimed == [("gptq", True), ("gptq_v2", False)]
    second = {**s.method, "checkpoint_format": "gptq_v2"}
    assert [c.claims(second, held) for c in (GPTQ, GPTQ_V2)] == [False, True]
    assert [c.claims({}, held) for c in (GPTQ, GPTQ_V2)] == [True, False]
    assert not GPTQ.claims({"quant_method": "awq"}, held)
    assert not GPTQ.claims({}, {"a.weight": Entry(F16, (2, 2), 0, 8)})
    awq = {"a.qweight": torch.zeros(64, 4, dtype=torch.int32), "a.qzeros": torch.zeros(4, 4, dtype=torch.int32),
           "a.scales": torch.zeros(4, 32).half()}  # fmt: skip
    assert not GPTQ.claims({}, entries(awq))

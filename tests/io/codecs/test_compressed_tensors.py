"""compressed-tensors: its own compressors write, and its own decompressors say what the values are, bit for bit."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor
from torch.nn.functional import pad

from pennyweight.core import blocks
from pennyweight.core.formats import E2M1, E4M3, E5M2, INT1, INT3, INT4, INT8, NF4, TERNARY, UINT3, UINT4, UINT8
from pennyweight.core.numerics import Parts, dequantize
from pennyweight.core.spec import (
    FP8_BLOCK,
    FP8_ROW,
    INT8_ROW,
    MXFP4,
    MXFP6,
    MXFP8,
    NVFP4,
    TINYGEMM,
    ActivationSpec,
    QuantSpec,
)
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io.codecs.base import by_layer
from pennyweight.io.codecs.compressed_tensors import COMPRESSED_TENSORS, find
from pennyweight.io.codecs.compressed_tensors_config import NVFP4_SCALE
from pennyweight.io.file import KeyedError
from pennyweight.io.manifest import Meta
from tests.io.codecs.kept import entries_of, same_bytes, tensor_of, written

INT_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
FLOAT_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
STATIC_ASYMMETRIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": False}
MX = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}


def ints(bits: int, strategy: str, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric, **more}


def floats(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": strategy, **more}


# name: (format, weights, input_activations)
SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    **{f"W{b}": ("pack-quantized", ints(b, "group", group_size=32), None) for b in range(2, 9)},
    **{f"W{b}-asym": ("pack-quantized", ints(b, "group", False, group_size=32), None) for b in range(2, 9)},
    **{f"W{b}-channel-asym": ("pack-quantized", ints(b, "channel", False), None) for b in (3, 4, 8)},
    "W4-channel": ("pack-quantized", ints(4, "channel"), None),
    "W4-tensor": ("pack-quantized", ints(4, "tensor"), None),
    "W4-tensor-asym": ("pack-quantized", ints(4, "tensor", False), None),
    "W4AFP8": ("pack-quantized", ints(4, "group", group_size=32), FLOAT_TOKEN),
    "W8A8": ("int-quantized", ints(8, "channel"), INT_TOKEN),
    "W8A8-asym": ("int-quantized", ints(8, "channel", False), INT_TOKEN),
    "W8A8-tensor": ("int-quantized", ints(8, "tensor"), {**INT_TOKEN, "symmetric": False}),
    "W8A8-group": ("naive-quantized", ints(8, "group", group_size=32), INT_TOKEN),
    "W8A8-inputs in groups": ("int-quantized", ints(8, "channel"),
                              {**INT_TOKEN, "strategy": "group", "group_size": 32}),
    "W8A8-static": ("int-quantized", ints(8, "channel"), STATIC_ASYMMETRIC),
    "W4A8": ("int-quantized", ints(4, "group", group_size=32), INT_TOKEN),
    "FP8": ("float-quantized", floats("tensor"), STATIC),
    "FP8-dynamic": ("float-quantized", floats("channel"), FLOAT_TOKEN),
    "FP8-block": ("float-quantized", floats("block", block_structure=[128, 128]),
                  {**FLOAT_TOKEN, "strategy": "group", "group_size": 128}),
    "FP8-group": ("naive-quantized", floats("group", group_size=32), None),
    "NVFP4A16": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                                          "scale_dtype": "torch.float8_e4m3fn"}, None),
    "MXFP4": ("mxfp4-pack-quantized", {"num_bits": 4, **MX}, {"num_bits": 4, "dynamic": True, **MX}),
    "MXFP6": ("mxfp6-pack-quantized", {"num_bits": 6, **MX}, {"num_bits": 8, "dynamic": True, **MX}),
    "MXFP8": ("mxfp8-quantized", {"num_bits": 8, **MX}, {"num_bits": 8, "dynamic": True, **MX}),
}  # fmt: skip
ALL = pytest.mark.parametrize("name", SCHEMES)


def scheme_of(name: str) -> QuantizationScheme:
    form, weights, act = SCHEMES[name]
    return QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**weights), format=form,
        input_activations=None if act is None else QuantizationArgs(**act),
    )  # fmt: skip


def config_of(*names: str, targets: list[list[str]] | None = None, **more: Any) -> dict[str, Any]:
    groups = {}
    for i, name in enumerate(names):
        form, weights, act = SCHEMES[name]
        where = ["Linear"] if targets is None else targets[i]
        groups[f"group_{i}"] = {"targets": where, "weights": weights, "input_activations": act, "format": form}
    form = SCHEMES[names[0]][0] if len(names) == 1 else "mixed-precision"
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": groups,
        "ignore": ["lm_head"],
        **more,
    }


def compressed(name: str, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A random layer as compressed-tensors stores it."""
    form, scheme = SCHEMES[name][0], scheme_of(name)
    w, args = (torch.randn(shape) * 0.1).to(dtype), scheme.weights
    block = {"tensor": None, "channel": (-1,), "block": (128, 128)}.get(args.strategy, (args.group_size,))
    view = blocks.split(blocks.pad(w, block), blocks.counts(block, shape))
    inner = blocks.inner_axes(2)
    state = {"weight": w}
    more = {}
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = more["global_scale"] = generate_gparam(w.min(), w.max())
    scale, zero = calculate_qparams(view.amin(inner), view.amax(inner), args, **more)
    state["weight_scale"] = scale.reshape(1) if args.strategy == "tensor" else scale
    if not args.symmetric:
        state["weight_zero_point"] = zero.reshape(1) if args.strategy == "tensor" else zero
    state = BaseCompressor.get_value_from_registry(form).compress(state, scheme)
    state = {k: torch.empty(t.shape, dtype=t.dtype).copy_(t) for k, t in state.items()}  # the strides of a file
    act = scheme.input_activations
    if act is not None and act.dynamic is False:
        state["input_scale"] = torch.tensor([0.37])
        if not act.symmetric:
            state["input_zero_point"] = torch.tensor([-13], dtype=torch.int8)
    return state


def decompressed(name: str, state: dict[str, Tensor]) -> Tensor:
    state = {k: v for k, v in state.items() if not k.startswith("input")}
    return BaseCompressor.get_value_from_registry(SCHEMES[name][0]).decompress(state, scheme_of(name))["weight"]


def named(layer: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{layer}.{key}": value for key, value in state.items()}


def sizes(name: str) -> list[tuple[int, int]]:
    args = SCHEMES[name][1]
    if name == "W4-asym":  # its own decompressor fails where zero points are one row of words
        return [(24, 64), (9, 96), (33, 480)]
    if "group_size" in args or ("group_size" in (SCHEMES[name][2] or {}) and args["strategy"] != "block"):
        return [(24, 64), (7, 96), (1, 32), (33, 480)]
    if args["strategy"] == "block":
        return [(128, 256), (130, 300), (40, 64), (257, 129), (1, 128)]
    return [(24, 64), (7, 45), (1, 1), (33, 97)]


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_its_own_and_files_come_back_byte_for_byte(name: str, dtype: torch.dtype) -> None:
    for shape in sizes(name):
        tensors = named("m.up", compressed(name, shape, dtype))
        found = find(entries_of(tensors), config_of(name), tensors.__getitem__)
        assert list(found) == ["m.up.weight"]
        assert sorted(found["m.up.weight"].stored) == sorted(tensors)
        w = tensor_of(found["m.up.weight"], tensors)
        want = decompressed(name, {k.removeprefix("m.up."): v for k, v in tensors.items()})
        assert tuple(w.shape) == shape
        assert same_bytes(w.dequantize(want.dtype), want), (shape, dtype)
        back, method = written(COMPRESSED_TENSORS, {"m.up.weight": w})
        assert back.keys() == tensors.keys()
        assert all(same_bytes(back[key], tensors[key]) for key in tensors), shape
        QuantizationConfig.model_validate(method)
        again = find(entries_of(back), method, back.__getitem__)["m.up.weight"].meta
        assert (again.spec, again.shape, again.act) == (w.spec, shape, w.act)


@pytest.mark.parametrize("name", ["W3-channel-asym", "W4-channel", "W4-tensor"])
def test_columns_of_a_last_word_are_those_of_weight_shape(name: str) -> None:
    """Without groups nothing else says how many columns the last word of a row holds. Nothing else is read."""
    for columns in (41, 45, 48):
        tensors = named("up", compressed(name, (24, columns)))
        found = find(entries_of(tensors), config_of(name), {"up.weight_shape": tensors["up.weight_shape"]}.__getitem__)
        assert found["up.weight"].meta.shape == (24, columns)
        assert tuple(tensor_of(found["up.weight"], tensors).shape) == (24, columns)


def test_activations_are_what_the_config_says() -> None:
    e8m0 = MXFP4.scale
    want: dict[str, ActivationSpec | None] = {
        "W4": None,
        "W4AFP8": ActivationSpec(QuantSpec(E4M3, (-1,))),
        "W8A8": ActivationSpec(QuantSpec(INT8, (-1,))),
        "W8A8-tensor": ActivationSpec(QuantSpec(INT8, (-1,), zero_point=True)),
        "W8A8-inputs in groups": ActivationSpec(QuantSpec(INT8, (32,))),
        "W8A8-static": ActivationSpec(QuantSpec(INT8, None, zero_point=True), "static"),
        "FP8": ActivationSpec(QuantSpec(E4M3, None), "static"),
        "FP8-block": ActivationSpec(QuantSpec(E4M3, (128,))),
        "MXFP4": ActivationSpec(QuantSpec(E2M1, (32,), e8m0), "dynamic", "mx_even"),
        "MXFP8": ActivationSpec(QuantSpec(E4M3, (32,), e8m0), "dynamic", "mx_rceil"),
    }
    for name, act in want.items():
        tensors = named("up", compressed(name, (24, 64)))
        found = find(entries_of(tensors), config_of(name), tensors.__getitem__)["up.weight"]
        assert found.meta.act == act, name
        parts = found.parts(tensors.__getitem__)
        assert (parts.act_scale is None) == (act is None or act.mode == "dynamic")
        if parts.act_scale is not None:
            assert parts.act_scale.tolist() == pytest.approx([0.37])
        if parts.act_zero_point is not None:
            assert parts.act_zero_point.tolist() == [-13]


def pack_by_words(codes: Tensor, bits: int) -> Tensor:
    """int8 codes as releases before the dense packing stored them: 32 // bits to a word."""
    per = 32 // bits
    unsigned = pad(codes.to(torch.int64) + (1 << (bits - 1)), (0, -codes.shape[1] % per))
    words = (unsigned.unflatten(1, (-1, per)) << (bits * torch.arange(per))).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("columns", [480, 1024])
def test_the_packing_of_old_releases_is_told_by_its_number_of_words(bits: int, columns: int) -> None:
    name = f"W{bits}-asym"
    codes = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (330, columns)).to(torch.int8)
    zeros = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (330, columns // 32)).to(torch.int8)
    scale = torch.rand(330, columns // 32)
    tensors = named("up", {
        "weight_packed": pack_by_words(codes, bits), "weight_scale": scale,
        "weight_shape": torch.tensor([330, columns]),
        "weight_zero_point": pack_by_words(zeros.t(), bits).t().contiguous(),
    })  # fmt: skip
    parts = find(entries_of(tensors), config_of(name), tensors.__getitem__)["up.weight"].parts(tensors.__getitem__)
    assert parts.zero_point is not None
    assert torch.equal(parts.codes, codes)
    assert torch.equal(parts.zero_point, zeros)


def test_old_words_without_groups_are_told_by_the_word_count_too() -> None:
    codes = torch.randint(-4, 4, (5, 400)).to(torch.int8)
    shape = torch.tensor([5, 400])
    tensors = named(
        "up", {"weight_packed": pack_by_words(codes, 3), "weight_scale": torch.rand(5, 1), "weight_shape": shape}
    )
    config = config_of("W4-channel")
    config["config_groups"]["group_0"]["weights"] = ints(3, "channel")
    found = find(entries_of(tensors), config, tensors.__getitem__)["up.weight"]
    assert torch.equal(found.parts(tensors.__getitem__).codes, codes)


def test_nvfp4_scales_are_the_float32_quotient() -> None:
    """Every e4m3 number, under global scales of every magnitude that leaves a scale in float32, subnormal ones too."""
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(1, 127)
    above = torch.cat([torch.randn(3000).exp() * 10.0 ** torch.randint(-36, 37, (3000,)), torch.arange(1, 200.0)])
    above = above[(above > 1e-37) & above.isfinite()]
    for g in above:
        parts = Parts(e4m3, (1.0 / g.double()).reshape(1, 1))
        got = dequantize(parts, NVFP4_SCALE, (1, 127))
        want = (e4m3.float() / g).clamp(max=torch.finfo(torch.float32).max)
        assert torch.equal(got, want), g


def test_nvfp4_inputs_are_dynamic_in_all() -> None:
    tensors = named("up", compressed("NVFP4A16", (8, 32)) | {"input_global_scale": torch.tensor([3.0])})
    config = config_of("NVFP4A16")
    config["config_groups"]["group_0"]["input_activations"] = {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"
    }  # fmt: skip
    found = find(entries_of(tensors), config, tensors.__getitem__)["up.weight"]
    assert found.meta.act == ActivationSpec(NVFP4)
    assert "up.input_global_scale" in found.stored
    assert COMPRESSED_TENSORS.writing is not None
    assert "input_global_scale" in str(COMPRESSED_TENSORS.writing.refuses("up.weight", found.meta))
    assert COMPRESSED_TENSORS.writing.nearest("up.weight", found.meta) == found.meta.spec


def test_groups_are_found_by_name_then_pattern_then_class() -> None:
    tensors = named("model.layers.0.attn.q", compressed("W4", (8, 64)))
    tensors |= named("model.layers.12.experts.3.down_proj", compressed("W8", (8, 64)))
    tensors |= named("model.layers.1.mlp.up", compressed("FP8-dynamic", (8, 64)))
    targets = [["model.layers.0.attn.q"], [r"re:.*experts\.\d+\.(gate|up|down)_proj$"], ["Linear"]]
    found = find(entries_of(tensors), config_of("W4", "W8", "FP8-dynamic", targets=targets), tensors.__getitem__)
    formats = {name: str(f.meta.spec.format) for name, f in found.items()}
    assert formats == {
        "model.layers.0.attn.q.weight": "int4", "model.layers.12.experts.3.down_proj.weight": "int8",
        "model.layers.1.mlp.up.weight": "e4m3",
    }  # fmt: skip
    for bad, why in (
        ([["re:x"], ["re:y"], ["re:z"]], "no target"),
        ([["re:.*q$"], ["Linear"], ["Embedding"]], "several groups"),
        ([["re:(.*)*q$"], ["Linear"], [r"re:(?=x)"]], "look-arounds"),
    ):
        with pytest.raises(KeyedError, match=why):
            find(entries_of(tensors), config_of("W4", "W8", "FP8-dynamic", targets=bad), tensors.__getitem__)


def test_what_is_written_names_its_groups() -> None:
    weights = {f"model.layers.{i}.{n}.weight": QT.from_float(torch.randn(8, 64), s) for i in range(3) for n, s in (
        ("q", QuantSpec(INT4, (32,))), ("up", FP8_ROW), ("down", QuantSpec(INT8 if i else INT4, (-1,))),
    )}  # fmt: skip
    tensors, method = written(COMPRESSED_TENSORS, weights)
    assert method["format"] == "mixed-precision"
    QuantizationConfig.model_validate(method)
    found = find(entries_of(tensors), method, tensors.__getitem__)
    assert {n: f.meta.spec for n, f in found.items()} == {n: w.spec for n, w in weights.items()}
    targets = [t for g in method["config_groups"].values() for t in g["targets"]]
    assert targets == [
        r"re:^model\.layers\.\d+\.q$", r"re:^model\.layers\.\d+\.up$", "model.layers.0.down", "model.layers.1.down",
        "model.layers.2.down",
    ]  # fmt: skip


EXACT = {
    "q4_0": QuantSpec(UINT4, (32,), mid=8),
    "uint zero point": QuantSpec(UINT3, (32,), zero_point=True),
    "another mid": QuantSpec(UINT4, (32,), torch.bfloat16, mid=3),
    "int mid": QuantSpec(INT3, (-1,), mid=1),
    "one mid in all": QuantSpec(UINT4, None, mid=3),
    "uint8": QuantSpec(UINT8, (-1,), mid=128),
    "no middle": QuantSpec(UINT8, (-1,)),
    "ternary": QuantSpec(TERNARY, None),
    "nvfp4": NVFP4, "mxfp4": MXFP4, "mxfp6": MXFP6, "mxfp8": MXFP8, "fp8": FP8_ROW, "fp8 block": FP8_BLOCK,
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_equivalent_numbers_are_written_exactly(name: str) -> None:
    spec = EXACT[name]
    x = torch.randn(33, 96)
    w = QT.from_float(x.abs() if name == "no middle" else x, spec)
    tensors, method = written(COMPRESSED_TENSORS, {"up.weight": w})
    got = tensor_of(find(entries_of(tensors), method, tensors.__getitem__)["up.weight"], tensors)
    want = w.dequantize()
    if spec is NVFP4:  # files divide: the last bit of a float32
        torch.testing.assert_close(got.dequantize(torch.float32), want, rtol=2**-22, atol=0)
    else:
        assert torch.equal(got.dequantize(torch.float32), want)


def meta(spec: QuantSpec, shape: tuple[int, ...] = (32, 96), **more: Any) -> Meta:
    return Meta(spec, shape, torch.bfloat16, **more)


@pytest.mark.parametrize(
    ("what", "name", "why", "nearest"),
    [
        (
            meta(TINYGEMM.with_(block=(32,))),
            "up.weight",
            "does not support offsets",
            QuantSpec(INT4, (32,), torch.bfloat16, INT4),
        ),
        (meta(QuantSpec(INT4, (36,))), "up.weight", "36 do not divide 96", QuantSpec(INT4, (32,))),
        (meta(QuantSpec(INT1, (32,))), "up.weight", "2 to 8 bits", QuantSpec(INT4, (32,)).with_(format=INT4)),
        (meta(QuantSpec(INT4, (32,), MXFP4.scale)), "up.weight", "plain scales", None),
        (meta(QuantSpec(NF4, (32,))), "up.weight", "not support nf4", None),
        (meta(QuantSpec(E5M2, (-1,))), "up.weight", "not support e5m2", FP8_ROW),
        (meta(MXFP4, (32, 48)), "up.weight", "32 do not divide 48", None),
        (meta(QuantSpec(E2M1, (48,))), "up.weight", "not support e2m1 with plain", MXFP4),
        (meta(FP8_ROW, (2, 32, 96)), "up.weight", "matrices", None),
        (meta(FP8_ROW, axes=(1, 0)), "up.weight", "transposed", None),
        (meta(FP8_ROW), "experts.gate_up_proj", "named weight", None),
        (meta(INT8_ROW, act=ActivationSpec(QuantSpec(INT8, (64,)))), "up.weight", "64 input columns do not", INT8_ROW),
        (meta(FP8_ROW, act=ActivationSpec(QuantSpec(NF4, (-1,)))), "up.weight", "not support activations", FP8_ROW),
    ],
)
def test_what_cannot_be_written_is_refused(what: Meta, name: str, why: str, nearest: QuantSpec | None) -> None:
    writing = COMPRESSED_TENSORS.writing
    assert writing is not None
    assert why in str(writing.refuses(name, what))
    got = writing.nearest(name, what)
    if why in ("2 to 8 bits", "plain scales"):
        assert got is not None
        assert writing.refuses(name, Meta(got, what.shape, what.dtype)) is None
    elif nearest is None:
        assert got is None
    else:
        assert got == nearest.with_(zero_point=nearest.zero_point)
    with pytest.raises(ValueError, match=r"compressed-tensors|groups of"):
        writing.stored(name, what)


def drop(key: str) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    return lambda t, c: t.__delitem__(f"up.{key}")


def put(key: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    return lambda t, c: t.update({f"up.{key}": make(t.get(f"up.{key}", torch.zeros(1)))})


def args(**more: Any) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    return lambda t, c: c["config_groups"]["group_0"].update(weights=SCHEMES[_NOW[0]][1] | more)


def top(**more: Any) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    return lambda t, c: c.update(more)


def act(**more: Any) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    return lambda t, c: c["config_groups"]["group_0"].update(input_activations=more)


def group(**more: Any) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    return lambda t, c: c["config_groups"]["group_0"].update(more)


_NOW = [""]
BAD: list[tuple[str, Any, str]] = [
    ("W4-asym", drop("weight_packed"), "weight_packed is missing"),
    ("W4-asym", drop("weight_scale"), "weight_scale is missing"),
    ("W4-asym", drop("weight_shape"), "weight_shape is missing"),
    ("W4-asym", drop("weight_zero_point"), "weight_zero_point is missing"),
    ("W4", put("weight_g_idx", lambda t: torch.zeros(64, dtype=torch.int32)), "permuted channels"),
    ("W4", put("weight_global_scale", lambda t: t), "weight_global_scale is unexpected"),
    ("W4", put("weight", lambda t: torch.zeros(24, 64)), "up.weight is unexpected"),
    ("W4", put("input_scale", lambda t: t), "input_scale is unexpected"),
    ("W4", put("output_scale", lambda t: t), "output_scale is unexpected"),
    ("W4", put("weight_packed", lambda t: t.long()), r"int64 \[.*\], expected int32"),
    ("W4", put("weight_packed", lambda t: t[:, 1:]), "rows of 7 words; 64 columns of 4 bits"),
    ("W4", put("weight_packed", lambda t: t[None]), "expected non-empty .rows, columns."),
    ("W4", put("weight_packed", lambda t: t[:0]), "non-empty"),
    ("W4", put("weight_scale", lambda t: t[1:]), r"shape \[23, 2\].*expected \[24, 2\]"),
    ("W4", put("weight_scale", lambda t: t.double()), r"float64 \[.*\], expected float32"),
    ("W4", put("weight_shape", lambda t: t[:1]), r"\[1\], expected .*\[2\]"),
    ("W4", put("weight_shape", lambda t: t.float()), r"float32 \[.*\], expected int64"),
    ("W4", put("weight_shape", lambda t: t + 1), r"is \[25, 65\], but up.weight_packed has 24 rows"),
    ("W4", put("weight_shape", lambda t: -t), r"is \[-24, -64\]"),
    ("W4", put("weight_shape", lambda t: t * torch.tensor([1, -1])), r"is \[24, -64\]"),
    ("W4", put("weight_shape", lambda t: t + torch.tensor([0, 1])), "rows of 8 words; 65 columns of 4 bits"),
    ("W4", put("weight_shape", lambda t: t + torch.tensor([0, 1 << 62])), "rows of 8 words; 4611686018427387968 col"),
    ("W4-asym", put("weight_zero_point", lambda t: t[:2]), r"\[2, 2\], expected .*\[3, 2\]"),
    ("W4-asym", put("weight_zero_point", lambda t: t.to(torch.int8)), r"int8 \[.*\], expected int32"),
    ("W8A8-asym", put("weight_zero_point", lambda t: t.int()), r"int32 \[.*\], expected int8"),
    ("W8A8-static", drop("input_scale"), "input_scale is missing"),
    ("W8A8-static", drop("input_zero_point"), "input_zero_point is missing"),
    ("W8A8-static", put("input_scale", lambda t: torch.ones(2)), r"\[2\], expected"),
    ("W8A8", put("weight", lambda t: t.to(torch.uint8)), r"uint8 \[.*\], expected int8"),
    ("FP8", put("weight", lambda t: t.float()), r"float32 \[.*\], expected float8_e4m3fn"),
    ("FP8", put("weight_scale", lambda t: torch.ones(24, 1)), "says tensor"),
    ("FP8-dynamic", put("weight_scale", lambda t: torch.ones(1)), "says channel"),
    ("FP8-block", put("weight_scale", lambda t: torch.ones(2, 1)), r"block of \[128, 128\]"),
    ("NVFP4A16", drop("weight_global_scale"), "weight_global_scale is missing"),
    ("NVFP4A16", put("weight_scale", lambda t: t.float()), r"float32 \[.*\], expected float8"),
    ("NVFP4A16", put("weight_global_scale", lambda t: torch.ones(2)), r"float32 \[2\], expected"),
    ("MXFP4", put("weight_scale", lambda t: t.float()), "expected uint8"),
    ("MXFP6", put("weight_packed", lambda t: t[:, 1:]), "four numbers take 3"),
    ("W4", args(group_size=48), "group of 48, which does not divide 64 columns"),
    ("W4", args(group_size=64), r"\[24, 2\], but .*group of 64 and .*\[24, 64\]: expected \[24, 1\]"),
    ("FP8-group", args(group_size=48), "48, which does not divide 64"),
    ("W4", args(group_size=None), "positive group_size"),
    ("W4", args(group_size=True), "group_size must be int"),
    ("W4", args(num_bits=8), "words"),
    ("W4", args(num_bits=9), "9 bits"),
    ("W4", args(num_bits=1), "1 bits"),
    ("W4", args(strategy="token", group_size=None), "not supported for packed"),
    ("W4", args(strategy="__class__"), "is not supported"),
    ("W4", args(dynamic=True), "dynamic weights"),
    ("W4", args(type="float"), "float weights is not supported"),
    ("W4", args(symmetric="yes"), "symmetric must be bool"),
    ("W4", group(format="marlin-24"), "marlin-24"),
    ("W4", group(targets="Linear"), "targets must be list"),
    ("W4", group(weights=[]), "must be an object"),
    ("W4", group(output_activations=INT_TOKEN), "output_activations"),
    ("FP8", args(symmetric=False), "no zero point"),
    ("FP8-block", args(block_structure="128x"), "two positive sizes"),
    ("FP8-block", args(block_structure=None), "must be used together"),
    ("NVFP4A16", args(group_size=32), "groups of 16"),
    ("W8A8", act(**{**INT_TOKEN, "dynamic": False}), "need a per-tensor scale"),
    ("W8A8", act(**{**INT_TOKEN, "dynamic": "local"}), "with strategy .token. is not supported"),
    ("W8A8", act(**{**FLOAT_TOKEN, "symmetric": False}), "no zero point"),
    ("W8A8", act(**{**FLOAT_TOKEN, "num_bits": 6}), "not supported"),
    ("W4", top(transform_config={"config_groups": {}}), "rotated"),
    ("W4", top(sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
    ("W4", top(config_groups={"W4A16": ["Linear"]}), "preset"),
    ("W4", top(config_groups={}), "no config group"),
    ("W4", top(config_groups=[]), "config_groups must be dict"),
    ("W4", top(ignore=["up"]), "ignore"),
    ("W4", top(ignore=[3]), "list of names"),
]


@pytest.mark.parametrize(("name", "change", "why"), BAD, ids=lambda v: v if isinstance(v, str) else "")
def test_what_does_not_fit_is_refused_before_reading(name: str, change: Any, why: str) -> None:
    _NOW[0] = name
    tensors, config = named("up", compressed(name, (24, 64))), config_of(name)
    change(tensors, config)
    with pytest.raises(ValueError, match=why):
        find(entries_of(tensors), config, tensors.__getitem__)


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("W4", put("weight_zero_point", lambda t: torch.ones(24, 2, dtype=torch.int8)), "is not zero"),
        ("FP8", put("input_zero_point", lambda t: torch.ones(1, dtype=torch.int8)), "is not zero"),
        ("NVFP4A16", put("weight_global_scale", lambda t: t * 0), "is 0.0"),
        ("NVFP4A16", put("weight_global_scale", lambda t: t * torch.nan), "is nan"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(name: str, change: Any, why: str) -> None:
    tensors, config = named("up", compressed(name, (24, 64))), config_of(name)
    change(tensors, config)
    with pytest.raises(ValueError, match=why):
        find(entries_of(tensors), config, tensors.__getitem__)["up.weight"].parts(tensors.__getitem__)


JUNK = [
    None,
    True,
    -1,
    0,
    7,
    1 << 70,
    1.5,
    float("nan"),
    "",
    "re:(",
    "Linear",
    [],
    [[]],
    [1, 2],
    {},
    {"a": 1},
    "128x128",
]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a config."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for k in keys for place in [(value, k), *places(value[k])]]


@pytest.mark.parametrize("name", ["W4-asym", "W8A8-static", "FP8-block", "NVFP4A16", "MXFP4"])
def test_junk_in_the_config_is_read_or_refused(name: str) -> None:
    tensors = named("up", compressed(name, (24, 64)))
    entries, refused = entries_of(tensors), 0
    for i in range(len(places(config_of(name)))):
        for junk in JUNK:
            config = json.loads(json.dumps(config_of(name)))
            container, key = places(config)[i]
            container[key] = junk
            try:
                find(entries, config, tensors.__getitem__)
            except ValueError:
                refused += 1
    assert refused > 100


def test_zeros_of_symmetric_schemes_are_passed_over() -> None:
    tensors = named("up", compressed("FP8", (24, 64)) | {"weight_zero_point": torch.zeros(1, dtype=torch.int8)})
    found = find(entries_of(tensors), config_of("FP8"), tensors.__getitem__)["up.weight"]
    assert "up.weight_zero_point" in found.stored
    tensor_of(found, tensors)


def test_the_dtype_is_that_of_the_scales_or_of_the_model() -> None:
    plain = {"embed.weight": torch.zeros(100, 100, dtype=torch.float16)}
    for name, dtype, want in (
        ("W4", torch.bfloat16, torch.bfloat16), ("W4", torch.float32, torch.float16),
        ("MXFP4", torch.float32, torch.float16),
    ):  # fmt: skip
        tensors = named("up", compressed(name, (24, 64), dtype)) | plain
        assert find(entries_of(tensors), config_of(name), tensors.__getitem__)["up.weight"].meta.dtype == want
    assert by_layer(entries_of(plain), ("weight",)) == {"embed": {"weight": "embed.weight"}}


def test_it_claims_its_own() -> None:
    assert COMPRESSED_TENSORS.claims({"quant_method": "compressed-tensors"}, {})
    assert not COMPRESSED_TENSORS.claims({"quant_method": "fp8"}, {})
    assert not COMPRESSED_TENSORS.claims({}, {})

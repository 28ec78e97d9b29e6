"""bitsandbytes files: its own values bit for bit, its own bytes written back, and everything bad refused."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from pennyweight.core.formats import DYNAMIC8, DYNAMIC8_FLOAT32, FP4_TWELFTHS, NF4
from pennyweight.core.numerics import quantize
from pennyweight.core.spec import INT8_ROW, NF4_DOUBLE, TINYGEMM, ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io.codecs.bitsandbytes import BITSANDBYTES
from pennyweight.io.file import KeyedError
from pennyweight.io.manifest import Meta
from tests.io.codecs.kept import Tensors, changed, find, read, same_bytes, write

logging.disable(logging.WARNING)  # bitsandbytes logs on import that a kernel of the hub is not installed
import bitsandbytes.functional as bnb  # noqa: E402

logging.disable(logging.NOTSET)

KINDS = pytest.mark.parametrize("kind", ["nf4", "fp4"])
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WRITING = BITSANDBYTES.writing
assert WRITING is not None
# shape, blocksize, and our block: on the grid where one divides the other
GRID = [
    ((8, 128), 64, (64,)),
    ((6, 32), 64, (2, 32)),
    ((5, 32), 64, (2, 32)),  # the last block has one row
    ((3, 16), 64, None),
    ((1, 640), 64, (64,)),
    ((48, 512), 64, (64,)),
    ((7, 1024), 256, (256,)),
    ((9, 64), 4096, None),
    ((9, 96), 64, (32,)),
    ((10, 48), 64, (16,)),
    ((7, 19), 64, (1,)),
    ((130,), 64, (2,)),
    ((2, 4, 32), 64, (2, 32)),
    ((2, 3, 32), 64, (32,)),  # a block would reach into the next matrix
]


def quantized(
    kind: str, shape: tuple[int, ...], size: int, dtype: torch.dtype, nested: bool, name: str = "m.weight"
) -> tuple[Tensors, Tensor]:
    """A weight as bitsandbytes stores it, and the values that it gives it."""
    w = (torch.randn(shape) * torch.logspace(-3, 2, shape[-1])).to(dtype)
    codes, state = bnb.quantize_4bit(w, blocksize=size, quant_type=kind, compress_statistics=nested)
    side = {f"{name}.{key}": t for key, t in state.as_dict(packed=True).items()}
    return {name: codes, **side}, values(codes, state)


def values(codes: Tensor, state: bnb.QuantState) -> Tensor:
    """What bitsandbytes makes of it as one row.

    Its CPU kernel (0.50) counts blocks by rows and takes wrong scales where they end within one: its own quantizer and
    its torch version count them through the whole tensor.
    """
    shape, state.shape = state.shape, torch.Size([state.shape.numel()])
    with torch.compiler.set_stance("force_eager"):
        flat = bnb.dequantize_4bit(codes, state)
    state.shape = shape
    return flat.reshape(shape)


def config(kind: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind, **more}


def states(tensors: Tensors) -> dict[str, Any]:
    """The JSON texts, parsed."""
    return {n: json.loads(bytes(t.tolist())) for n, t in tensors.items() if ".quant_state." in n}


@KINDS
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("shape", "size", "block"), GRID)
def test_values_are_theirs(
    kind: str, nested: bool, shape: tuple[int, ...], size: int, block: tuple[int, ...] | None
) -> None:
    for dtype in DTYPES:
        tensors, value = quantized(kind, shape, size, dtype, nested)
        w = read(BITSANDBYTES, tensors, config(kind))["m.weight"]
        assert (w.shape, w.dtype, w.spec.block) == (shape, dtype, block)
        assert w.spec.format is {"nf4": NF4, "fp4": FP4_TWELFTHS}[kind]
        assert torch.equal(w.dequantize(), value)


@KINDS
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("shape", "size", "block"), [case for case in GRID if len(case[0]) == 2])
def test_bytes_come_back(
    kind: str, nested: bool, shape: tuple[int, ...], size: int, block: tuple[int, ...] | None
) -> None:
    tensors, value = quantized(kind, shape, size, torch.bfloat16, nested)
    out = write(BITSANDBYTES, tensors, config(kind))
    again = read(BITSANDBYTES, out, config(kind))["m.weight"]
    assert torch.equal(again.dequantize(), value)
    here = states(out)["m.weight.quant_state.bitsandbytes__" + kind]
    # A single block has no size that can be told, and one of 32 elements is theirs whether or not two hold copies.
    if here["blocksize"] != size:
        assert (here["blocksize"], block) in ((1024, None), (32, (32,)))
        return
    fits = find(BITSANDBYTES, tensors, config(kind))["m.weight"].meta.spec.scale is not torch.float32
    for name, tensor in out.items():
        if ".quant_state." not in name and nested == fits:
            assert same_bytes(tensor, tensors[name]), name
    if nested == fits:
        assert out.keys() == tensors.keys()
        assert states(out) == states(tensors)


@KINDS
def test_what_a_nested_scale_becomes(kind: str) -> None:
    def scale(shape: tuple[int, ...], size: int = 64) -> Any:
        tensors, _ = quantized(kind, shape, size, torch.float32, nested=True)
        return read(BITSANDBYTES, tensors, config(kind))["m.weight"].spec.scale

    def on_grid(block: tuple[int, ...] | None) -> Any:
        return QuantSpec(table, block, offset=torch.float32)

    known = bnb.create_dynamic_map().tolist() == list(DYNAMIC8_FLOAT32.values)
    table = DYNAMIC8_FLOAT32
    if not known:  # another CPU: the numbers are a last place off, and the scale is read as what it stands for
        assert scale((4, 128)) is torch.float32
        return
    assert scale((4, 128)) == on_grid(None)
    assert scale((80, 512)) == on_grid((32, 8))  # 8 scales a row, 256 are 32 rows
    assert scale((3, 16384 * 2)) == on_grid((256,))
    assert scale((4, 128 * 3)) == on_grid(None)
    assert scale((300, 192)) is torch.float32  # 3 scales a row: 256 of them end within one
    assert scale((300, 48)) is torch.float32  # repeated scales


def test_blocks_of_32() -> None:
    for shape, block in (((6, 64), (32,)), ((7, 9), (1,)), ((4, 16), (2, 16))):
        tensors, value = quantized("nf4", shape, 32, torch.float16, nested=True)
        w = read(BITSANDBYTES, tensors, {})["m.weight"]
        assert w.spec.block == block
        assert torch.equal(w.dequantize(), value)


def test_nested_maps_of_other_cpus() -> None:
    tensors, _ = quantized("nf4", (80, 512), 64, torch.float32, nested=True)
    name = "m.weight.nested_quant_map"
    off = tensors[name].clone()
    off[70] = torch.nextafter(off[70], torch.tensor(1.0))
    for table, scale in ((torch.tensor(DYNAMIC8.values), DYNAMIC8), (off, None)):
        other = {**tensors, name: table}
        code, state = other["m.weight"], {k.removeprefix("m.weight."): v for k, v in other.items() if k != "m.weight"}
        theirs = bnb.QuantState.from_dict(state, torch.device("cpu"))
        w = read(BITSANDBYTES, other, config("nf4"))["m.weight"]
        assert torch.equal(w.dequantize(), values(code, theirs))
        assert (w.spec.scale.format is scale) if scale else w.spec.scale is torch.float32


def test_both_zeros_of_fp4_are_kept() -> None:
    tensors, _ = quantized("fp4", (8, 64), 64, torch.float32, nested=False)
    tensors["m.weight"] = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    out = write(BITSANDBYTES, tensors, config("fp4"))
    assert same_bytes(out["m.weight"], tensors["m.weight"])


def test_codes_stored_under_another_dtype() -> None:
    for storage in (torch.bfloat16, torch.float32, torch.float64):
        w = torch.randn(6, 64)
        codes, state = bnb.quantize_4bit(w, quant_type="nf4", quant_storage=storage)
        tensors = {"w": codes, **{f"w.{k}": t for k, t in state.as_dict(packed=True).items()}}
        assert torch.equal(read(BITSANDBYTES, tensors, {})["w"].dequantize(), bnb.dequantize_4bit(codes, state))


def int8(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensors, Tensor]:
    w = torch.randn(shape, dtype=torch.float32).to(dtype).float()
    codes, scb, _ = bnb.int8_vectorwise_quant(w)
    tensors = {"m.weight": codes, "m.SCB": scb, "m.weight_format": torch.tensor(0, dtype=torch.uint8)}
    return {**tensors, "n.weight": torch.randn(9, 9).to(dtype)}, bnb.int8_vectorwise_dequant(codes, scb)


INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def places(a: Tensor, b: Tensor) -> int:
    """Largest distance in units in the last place, of numbers of equal signs."""
    return int((a.contiguous().view(torch.int32).long() - b.contiguous().view(torch.int32).long()).abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40, 64), (7, 33), (1, 1)])
def test_int8(shape: tuple[int, int], dtype: torch.dtype) -> None:
    tensors, value = int8(shape, dtype)
    w = read(BITSANDBYTES, tensors, INT8)["m.weight"]
    assert (w.spec, w.dtype, w.act) == (INT8_ROW, dtype, None)
    assert places(w.dequantize(torch.float32), value) <= 2
    out = write(BITSANDBYTES, tensors, INT8)
    assert same_bytes(out["m.weight"], tensors["m.weight"])
    if dtype is not torch.float32:  # the largest magnitude of a row has 16 bits, and comes back from its 127th part
        assert same_bytes(out["m.SCB"], tensors["m.SCB"])
    assert places(out["m.SCB"], tensors["m.SCB"]) <= 1
    old = changed(tensors, "m.weight_format", None)
    assert torch.equal(read(BITSANDBYTES, old, INT8)["m.weight"].dequantize(), w.dequantize())


def test_row_maxima_come_back_wherever_one_has_a_scale_of_its_own() -> None:
    scb = torch.cat([torch.rand(20000) + 1, torch.rand(20000) * 2e-30, torch.rand(2000) * 1e30])
    tensors = {"m.weight": torch.ones(len(scb), 1, dtype=torch.int8), "m.SCB": scb}
    back = write(BITSANDBYTES, tensors, INT8)["m.SCB"]
    assert torch.equal(back / 127, scb / 127)  # so a second round changes nothing
    lost = back != scb
    assert 0 < lost.float().mean() < 0.01
    assert (torch.frexp(scb[lost]).mantissa >= 127 / 128).all()


def test_scales_of_our_own_int8_are_within_one_place() -> None:
    meta = Meta(INT8_ROW, (500, 3), torch.float32)
    parts = quantize(torch.randn(500, 3), INT8_ROW)
    scb = WRITING.pack("m.weight", parts, meta)["m.SCB"]
    assert places(scb / 127, parts.scale.flatten()) <= 1


def test_our_own_tensors_are_written_and_read_by_bitsandbytes() -> None:
    offset = QuantSpec(DYNAMIC8_FLOAT32, None, offset=torch.float32)
    for spec in (QuantSpec(NF4, (32,)), QuantSpec(NF4, (64,), scale=torch.bfloat16), QuantSpec(FP4_TWELFTHS, (4, 64)),
                 NF4_DOUBLE, NF4_DOUBLE.with_(scale=offset)):  # fmt: skip
        w = QT.from_float(torch.randn(12, 64), spec)
        meta = Meta(spec, (12, 64), torch.float32)
        assert WRITING.refuses("w", meta) is None
        out = WRITING.pack("w", w.plain_parts(), meta)
        state = bnb.QuantState.from_dict({k[2:]: t for k, t in out.items() if k != "w"}, torch.device("cpu"))
        assert torch.equal(values(out["w"], state), w.dequantize())
        assert ("w.nested_absmax" in out) == (spec.scale == offset)


def test_what_cannot_be_written_says_why() -> None:
    act = ActivationSpec(INT8_ROW)
    for meta, reason in (
        (Meta(INT8_ROW, (4, 64), torch.float32, act), "its activation is quantized"),
        (Meta(INT8_ROW, (2, 4, 64), torch.float32), "[out, in]"),
        (Meta(QuantSpec(NF4, (64,)), (64, 4), torch.float32, None, (1, 0)), "[out, in]"),
        (Meta(INT8_ROW, (4, 64), torch.float64), "float32, float16 and bfloat16"),
        (Meta(TINYGEMM, (4, 256), torch.float32), "not support zero points"),
        (Meta(QuantSpec(INT8_ROW.format, (32,)), (4, 64), torch.float32), "one scale per row"),
        (Meta(QuantSpec(DYNAMIC8, (64,)), (4, 64), torch.float32), "is not supported by bitsandbytes"),
        (Meta(QuantSpec(NF4, (8,)), (4, 64), torch.float32), "power of two"),
    ):
        said = WRITING.refuses("m.weight", meta)
        assert said is not None
        assert reason in said
    small = Meta(QuantSpec(NF4, (16,)), (4, 48), torch.float32)
    with pytest.raises(ValueError, match=r"m\.weight: scales differ within a bitsandbytes block of 64 elements"):
        WRITING.pack("m.weight", quantize(torch.randn(4, 48), small.spec), small)
    nested = QuantSpec(NF4, (64,), scale=QuantSpec(DYNAMIC8_FLOAT32, (256,), offset=torch.float32))
    wide = Meta(nested, (2, 16384), torch.float32)
    with pytest.raises(ValueError, match=r"m\.weight: its nested blocks have separate offsets"):
        WRITING.pack("m.weight", quantize(torch.randn(2, 16384), nested), wide)
    metas = {
        "a.weight": Meta(INT8_ROW, (4, 64), torch.float32),
        "b.weight": Meta(QuantSpec(NF4, (64,)), (4, 64), torch.float32),
    }
    with pytest.raises(ValueError, match=r"several: .*a\.weight.*b\.weight"):
        WRITING.method(metas, ())


def test_the_nearest_spec_is_one_that_is_written() -> None:
    for spec, shape in ((TINYGEMM, (4, 256)), (QuantSpec(DYNAMIC8, (64,)), (5, 65)), (QuantSpec(NF4, (8,)), (5, 32))):
        nearest = WRITING.nearest("m.weight", Meta(spec, shape, torch.float16))
        assert nearest is not None
        assert WRITING.refuses("m.weight", Meta(nearest, shape, torch.float16)) is None
    assert WRITING.nearest("m.weight", Meta(TINYGEMM, (40, 7), torch.float16)) is None
    assert WRITING.nearest("m.weight", Meta(TINYGEMM, (2, 4, 64), torch.float16)) is None


STATE = "m.weight.quant_state.bitsandbytes__nf4"


def edit(**changes: Any) -> Callable[[Tensor], Tensor]:
    """quant_state with some fields changed, or without them where the change is None."""

    def change(text: Tensor) -> Tensor:
        data = json.loads(bytes(text.tolist())) | changes
        return torch.tensor(
            list(json.dumps({k: v for k, v in data.items() if v is not None}).encode()), dtype=torch.uint8
        )

    return change


BAD: list[tuple[str, Callable[[Tensor], Tensor] | None, str]] = [
    ("m.weight", None, "m.weight is missing"),
    ("m.weight", lambda t: t[:-1], "511, 1] of 1 bytes do not match the 512 bytes"),
    ("m.weight", lambda t: t.T.contiguous(), "do not match the 512 bytes"),
    ("m.weight", lambda t: t.long(), "m.weight is int64"),
    ("m.weight.absmax", None, "m.weight.absmax is missing"),
    ("m.weight.absmax", lambda t: t.float(), "absmax is float32 [16], expected uint8 [16]"),
    ("m.weight.absmax", lambda t: t[1:], "absmax is uint8 [15], expected uint8 [16]"),
    ("m.weight.quant_map", None, "m.weight.quant_map is missing"),
    ("m.weight.quant_map", lambda t: t.half(), "quant_map is float16 [16]"),
    ("m.weight.quant_map", lambda t: t.flip(0), "does not contain the values of nf4"),
    ("m.weight.quant_map", lambda t: t * torch.nan, "does not contain the values of nf4"),
    ("m.weight.nested_absmax", None, "m.weight.nested_absmax is missing"),
    ("m.weight.nested_absmax", lambda t: t.repeat(2), "nested_absmax is float32 [2], expected float32 [1]"),
    ("m.weight.nested_quant_map", None, "m.weight.nested_quant_map is missing"),
    ("m.weight.nested_quant_map", lambda t: t[1:], "nested_quant_map is float32 [255]"),
    ("m.weight.nested_quant_map", lambda t: t * 2, "does not contain the values of dynamic8_float32 or dynamic8"),
    (STATE, None, "is unexpected"),
    (STATE, lambda t: t.repeat(40), "expected a text of at most 4096 bytes"),
    (STATE, lambda t: t.unsqueeze(0), "expected a text of at most 4096 bytes"),
    (STATE, lambda t: t.float(), "float32"),
    (STATE, lambda t: t[:-1], "JSON"),
    (STATE, edit(dtype="float64"), "dtype 'float64'"),
    (STATE, edit(dtype=["float32"]), "dtype"),
    (STATE, edit(shape=[8, 129]), "do not match the 516 bytes"),
    (STATE, edit(shape=[-8, -128]), "shape must contain positive integers"),
    (STATE, edit(shape=[8, 128.0]), "shape must contain positive integers"),
    (STATE, edit(shape=[True, 1024]), "shape must contain positive integers"),
    (STATE, edit(shape=[0, 128]), "shape must contain positive integers"),
    (STATE, edit(shape=[]), "shape must be a list"),
    (STATE, edit(shape=[1] * 65), "shape must be a list"),
    (STATE, edit(shape="8"), "shape must be a list"),
    (STATE, edit(shape=[2**40, 2**40]), "too large"),
    (STATE, edit(blocksize=48), "blocksize 48"),
    (STATE, edit(blocksize=True), "blocksize True"),
    (STATE, edit(blocksize=128), "absmax is uint8 [16], expected uint8 [8]"),
    (STATE, edit(blocksize=None), "missing ['blocksize']"),
    (STATE, edit(more=1), "unknown ['more']"),
    (STATE, edit(quant_type="fp4"), "quant_type 'fp4' does not match nf4 in its name"),
    (STATE, edit(nested_offset=None), "missing ['nested_offset']"),
    (STATE, edit(nested_offset="1"), "nested_offset must be a number"),
    (STATE, edit(nested_offset=1e300), "nested_offset must be a number in the range of float32"),
    (STATE, edit(nested_offset=float("nan")), "NaN"),
    (STATE, edit(nested_dtype="float16"), "nested_dtype 'float16'"),
    (STATE, edit(nested_blocksize=3), "nested_blocksize 3"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "reason"), BAD)
def test_bad_4bit_files(name: str, change: Callable[[Tensor], Tensor] | None, reason: str) -> None:
    tensors, _ = quantized("nf4", (8, 128), 64, torch.float32, nested=True)
    read(BITSANDBYTES, tensors, config("nf4"))
    with pytest.raises(KeyedError) as e:
        find(BITSANDBYTES, changed(tensors, name, change), config("nf4"))
    assert reason in str(e.value)
    assert e.value.name.startswith("m.weight")


def test_more_bad_files() -> None:
    four, _ = quantized("nf4", (8, 128), 64, torch.float32, nested=False)
    eight, _ = int8((4, 64), torch.float16)
    name = "m.weight.quant_state.bitsandbytes__"
    for tensors, settings, reason in (
        ({**four, f"{name}fp4": four[STATE]}, config("nf4"), "two quant_states"),
        ({**changed(four, STATE, None), f"{name}int4": four[STATE]}, config("nf4"), "quant_type 'int4'"),
        ({**four, "m.weight.nested_absmax": torch.ones(1)}, config("nf4"), "missing"),
        ({**four, "n.weight.absmax": torch.ones(1)}, config("nf4"), "is unexpected"),
        ({**four, "n.weight": four["m.weight"]}, config("nf4"), "neither quant_state nor SCB"),
        (four, config("fp4"), "stored as nf4, but quantization_config.bnb_4bit_quant_type is 'fp4'"),
        (four, INT8, "stored as 4-bit, but quantization_config.load_in_8bit is True"),
        (four, config("nf4", load_in_4bit=False), "stored as 4-bit, but quantization_config.load_in_4bit is False"),
        (four, config("nf4", load_in_4bit="yes"), "load_in_4bit must be bool"),
        (eight, config("nf4"), "stored as 8-bit, but quantization_config.load_in_4bit is True"),
        (changed(eight, "m.SCB", None), INT8, "is unexpected"),
        (changed(changed(eight, "m.SCB", None), "m.weight_format", None), INT8, "neither quant_state nor SCB"),
        (changed(eight, "m.weight", None), INT8, "m.weight is missing"),
        (changed(eight, "m.weight", lambda t: t.float()), INT8, "m.weight is float32"),
        (changed(eight, "m.weight", lambda t: t[0]), INT8, "expected int8 [out, in]"),
        (changed(eight, "m.weight", lambda t: t[:, :0]), INT8, "expected int8 [out, in]"),
        (changed(eight, "m.SCB", lambda t: t[1:]), INT8, "SCB is float32 [3], expected float32 [4]"),
        (changed(eight, "m.SCB", lambda t: t.half()), INT8, "SCB is float16 [4], expected float32 [4]"),
        (changed(eight, "m.weight_format", lambda t: t + 2), INT8, "weight_format is not 0"),
        (changed(eight, "m.weight_format", lambda t: t.repeat(2)), INT8, "weight_format is uint8 [2]"),
    ):
        with pytest.raises(ValueError, match=r".") as e:
            find(BITSANDBYTES, tensors, settings)
        assert reason in str(e.value)


def tiny(folder: Path) -> Path:
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**size, **heads)).save_pretrained(folder / "plain")
    return folder / "plain"


SETTINGS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4_nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}


@pytest.mark.filterwarnings("ignore")  # of transformers and bitsandbytes, each of its own
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_transformers_loads_what_is_written(settings: dict[str, Any], tmp_path: Path) -> None:
    quantization = BitsAndBytesConfig(**settings)
    theirs = AutoModelForCausalLM.from_pretrained(tiny(tmp_path), quantization_config=quantization)
    theirs.save_pretrained(tmp_path / "theirs")
    tensors = safetensors.torch.load_file(tmp_path / "theirs" / "model.safetensors")
    about = json.loads((tmp_path / "theirs" / "config.json").read_text())
    found = find(BITSANDBYTES, tensors, about["quantization_config"])
    assert len(found) == 14
    owned = {part for f in found.values() for part in f.stored}
    plain = {name: t for name, t in tensors.items() if name not in owned}
    metas = {name: f.meta for name, f in found.items()}
    floats = ("lm_head.weight",)

    out = tmp_path / "ours"
    out.mkdir()
    written = plain | write(BITSANDBYTES, tensors, about["quantization_config"])
    safetensors.torch.save_file(written, out / "model.safetensors", {"format": "pt"})
    about["quantization_config"] = WRITING.method(metas, floats)
    (out / "config.json").write_text(json.dumps(about))
    ours = AutoModelForCausalLM.from_pretrained(out)
    assert type(ours.lm_head) is torch.nn.Linear
    ids = torch.arange(12).reshape(2, 6)
    logits = [model.eval()(ids).logits.float() for model in (theirs, ours)]
    for name in metas:
        a, b = (m.get_submodule(name.removesuffix(".weight")).weight for m in (theirs, ours))
        assert type(a) is type(b)
        assert same_bytes(a.data, b.data)
        if "load_in_4bit" in settings:
            assert same_bytes(bnb.dequantize_4bit(a.data, a.quant_state), bnb.dequantize_4bit(b.data, b.quant_state))
            assert a.quant_state.nested == b.quant_state.nested
    if "load_in_4bit" in settings:
        assert torch.equal(*logits)
    else:
        torch.testing.assert_close(*logits, rtol=0, atol=1e-6)
    # and the file as it is read again
    for name, w in read(BITSANDBYTES, written, about["quantization_config"]).items():
        assert torch.equal(w.dequantize(), read(BITSANDBYTES, tensors, {})[name].dequantize())

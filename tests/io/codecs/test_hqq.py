"""HQQ's layers: values by a formula of its own for every packing, both axes and odd sizes; everything bad refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pennyweight.core.formats import UINT2
from pennyweight.io.codecs.hqq import HQQ
from pennyweight.io.file import KeyedError
from tests.io.codecs.kept import Tensors, changed, find, read

CONFIG: dict[str, Any] = {"quant_method": "hqq", "skip_modules": ["lm_head"]}
PACKING = {8: "8bit_u8", 6: "8bit_u8", 5: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def layer(
    shape: tuple[int, int], nbits: float, size: int, axis: int, dtype: torch.dtype = torch.float16
) -> tuple[Tensors, Tensor]:
    """A layer as HQQLinear.state_dict names and packs it, and its values in float64."""
    n = int(np.prod(shape))
    grouped = (n // size, size) if axis else (size, n // size)
    codes = np.random.default_rng(0).integers(0, round(2**nbits), grouped)
    per_group = (grouped[0], 1) if axis else (1, grouped[1])
    scale = (torch.rand(per_group) * 0.1 + 0.01).to(dtype)
    zero = (torch.rand(per_group) * 2**nbits).to(dtype)
    packing = PACKING.get(int(nbits) if nbits == int(nbits) else 2, "")
    value = (codes - zero.double().numpy()) * scale.double().numpy()
    number = torch.tensor(nbits, dtype=torch.int32 if nbits == int(nbits) else torch.float32)
    flags = {"view_as_float": 0, "quant_scale": 0, "quant_zero": 0, "offload_meta": 0, "encoded_state_dict": 1,
             "stores_quant_config": 1, "channel_wise": 1, "optimize": 1, "round_zero": 0}  # fmt: skip
    view = "torch.int32" if nbits == 3 else "torch.uint8"
    tensors = {
        "W_q": pack(codes, packing),
        "scale": scale,
        "zero": zero,
        "bias": torch.randn(shape[0]).to(dtype),
        "shape": torch.tensor(torch.Size(shape)),
        "nbits": number,
        "group_size": torch.tensor(size, dtype=torch.int32),
        "axis": torch.tensor(axis, dtype=torch.int32),
        "packing": text(packing),
        "unpack_view_dtype": text(view),
        "compute_dtype": text(str(dtype)),
        **{key: torch.tensor(value, dtype=torch.uint8) for key, value in flags.items()},
    }
    return {f"a.m.{key}": t for key, t in tensors.items()}, torch.from_numpy(value.reshape(shape))


def text(characters: str) -> Tensor:
    return torch.tensor([ord(c) for c in characters], dtype=torch.uint8)


def pack(codes: np.ndarray, packing: str) -> Tensor:
    """Row r of ``each`` equal parts of the rows side by side, the first part in the highest bits."""
    bits, each = int(packing[0]), 10 if packing == "3bit_32" else 8 // int(packing[0])
    rows = -(-len(codes) // each)
    padded = np.zeros((rows * each, codes.shape[1]), dtype=np.int64)
    padded[: len(codes)] = codes
    words = np.zeros((rows, codes.shape[1]), dtype=np.int64)
    for part in range(each):
        words = words * 2**bits + padded[part * rows : (part + 1) * rows]
    return torch.from_numpy(words.astype(np.int32 if packing == "3bit_32" else np.uint8))


CASES = [
    ((8, 128), 64, 1, (64,)),
    ((16, 32), 64, 1, (2, 32)),
    ((16, 96), 64, 1, (32,)),  # a group ends within a row
    ((16, 128), 128, 1, (128,)),
    ((16, 40), 8, 1, (8,)),
    ((32, 64), 16, 0, (1,)),
    ((16, 7), 16, 0, (-1, 1)),  # a group is a whole column
    ((8, 48), 16, 0, (1,)),  # a group takes several of the numbers of each row
]


@pytest.mark.parametrize("nbits", [8, 6, 5, 4, 3, 2, 1.58, 1])
@pytest.mark.parametrize(("shape", "size", "axis", "block"), CASES)
def test_values(nbits: float, shape: tuple[int, int], size: int, axis: int, block: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        tensors, exact = layer(shape, nbits, size, axis, dtype)
        w = read(HQQ, tensors, CONFIG)["a.m.weight"]
        assert (w.shape, w.dtype, w.spec.block) == (shape, dtype, block)
        assert w.spec.format.bits == {1.58: 2}.get(nbits, nbits)
        assert w.spec.scale is dtype
        assert w.spec.offset is torch.float32
        # roundings to float32: of the code times the scale, of the sum, and of an offset that is not exact
        limit = 2**-23 * 0.11 * 2**nbits
        assert (w.dequantize(torch.float32).double() - exact).abs().max() <= limit


def test_by_hand() -> None:
    """Two rows of one group each: code 1 of row 0 in the high nibble, code 2 of row 1 in the low one."""
    tensors, _ = layer((2, 4), 4, 4, 1)
    tensors |= {
        "a.m.W_q": torch.full((1, 4), 0x12, dtype=torch.uint8),
        "a.m.scale": torch.tensor([[2.0], [4.0]]).half(),
        "a.m.zero": torch.tensor([[0.5], [1.5]]).half(),
    }
    w = read(HQQ, tensors, CONFIG)["a.m.weight"]
    assert w.dequantize().tolist() == [[1.0] * 4, [2.0] * 4]


@pytest.mark.parametrize("nbits", [4, 3, 2])
def test_bytes_viewed_as_floats(nbits: int) -> None:
    plain, _ = layer((8, 128), nbits, 64, 1)
    for dtype in (torch.float16, torch.float32):
        tensors = plain | {
            "a.m.W_q": plain["a.m.W_q"].view(dtype),
            "a.m.view_as_float": torch.tensor(1, dtype=torch.uint8),
        }
        got = [read(HQQ, t, CONFIG)["a.m.weight"].dequantize() for t in (tensors, plain)]
        assert torch.equal(*got)


def test_files_of_older_releases_and_configs() -> None:
    tensors, _ = layer((8, 128), 4, 64, 1)
    value = read(HQQ, tensors, CONFIG)["a.m.weight"].dequantize()
    few = {
        n: t
        for n, t in tensors.items()
        if n[4:] in ("W_q", "scale", "zero", "shape", "nbits", "group_size", "axis", "packing")
    }
    params = {"nbits": 4, "group_size": 64, "axis": 1, "channel_wise": True}
    one, other = {"weight_quant_params": params, "scale_quant_params": None}, {"weight_quant_params": {}}
    for config in ({}, CONFIG, CONFIG | {"quant_config": one}, CONFIG | {"quant_config": {"a.m": one, "b": other}}):
        assert torch.equal(read(HQQ, few, config)["a.m.weight"].dequantize(), value)
    two, _ = layer((8, 128), 1.58, 64, 1)
    assert read(HQQ, two, CONFIG)["a.m.weight"].spec.format is UINT2
    owned = find(HQQ, tensors, CONFIG)["a.m.weight"].stored
    assert tensors.keys() - set(owned) == {"a.m.bias"}


def number(value: int) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.full_like(t, value)


BAD: list[tuple[str, Callable[[Tensor], Tensor] | None, str]] = [
    ("W_q", None, "is unexpected"),
    ("W_q", lambda t: t[1:], "W_q is torch.uint8 [7, 64], but groups [16, 64] of 4 bits need torch.uint8 [8, 64]"),
    ("W_q", lambda t: t[:, 1:], "[8, 63]"),
    ("W_q", lambda t: t.flatten(), "[512]"),
    ("W_q", lambda t: t.int(), "W_q is int32"),
    ("W_q", lambda t: t.view(torch.float16), "W_q is float16"),
    ("scale", None, "scale is missing"),
    ("scale", lambda t: t.T.contiguous(), "scale is float16 [1, 16]"),
    ("scale", lambda t: t.to(torch.uint8), "scale is uint8"),
    ("zero", None, "zero is missing"),
    ("zero", lambda t: t[1:], "zero is float16 [15, 1]"),
    ("shape", None, "shape is missing"),
    ("shape", lambda t: t.repeat(2), "shape is int64 [4]"),
    ("shape", lambda t: -t, "expected two positive sizes"),
    ("shape", lambda t: t * 0, "expected two positive sizes"),
    ("shape", number(2**40), "too large"),
    ("shape", number(64), "W_q is torch.uint8 [8, 64], but groups [64, 64]"),
    ("shape", number(7), "groups of 64 along axis 1 do not divide [7, 7]"),
    ("nbits", None, "nbits is missing"),
    ("nbits", number(3), "packing is '4bit_u8' for 3 bits"),
    ("nbits", lambda t: t.float() * torch.nan, "nbits is nan"),
    ("nbits", lambda t: t.repeat(2), "nbits is int32 [2]"),
    ("group_size", None, "group_size is missing"),
    ("group_size", number(0), "groups of 0"),
    ("group_size", number(-64), "groups of -64"),
    ("group_size", number(32), "groups [32, 32]"),
    ("axis", None, "axis is missing"),
    ("axis", number(2), "axis 2"),
    ("axis", number(0), "groups [64, 16]"),
    ("packing", None, "packing is None"),
    ("packing", lambda t: t[:-1], "packing is '4bit_u'"),
    ("packing", lambda t: t.repeat(20), "at most 64 bytes"),
    ("packing", lambda t: t.float(), "packing is float32"),
    ("compute_dtype", lambda t: text("torch.load"), "compute_dtype is 'torch.load'"),
    ("compute_dtype", lambda t: text("torch.float64"), "compute_dtype is 'torch.float64'"),
    ("quant_scale", number(1), "quant_scale is True"),
    ("quant_zero", number(1), "quant_zero is True"),
    ("channel_wise", number(0), "channel_wise is False"),
    ("view_as_float", number(1), "W_q is uint8"),
    ("view_as_float", lambda t: t.repeat(2), "view_as_float is uint8 [2]"),
]


@pytest.mark.parametrize(("name", "change", "reason"), BAD)
def test_bad_files(name: str, change: Callable[[Tensor], Tensor] | None, reason: str) -> None:
    tensors, _ = layer((8, 128), 4, 64, 1)
    with pytest.raises(KeyedError) as e:
        find(HQQ, changed(tensors, f"a.m.{name}", change), CONFIG)
    assert reason in str(e.value)
    assert e.value.name.startswith("a.m")


def test_bad_names_and_configs() -> None:
    tensors, _ = layer((8, 128), 4, 64, 1)
    params = {"weight_quant_params": {"nbits": 4, "group_size": 32, "axis": 1}}
    for more, config, reason in (
        ({}, {**CONFIG, "quant_config": params}, "a.m.group_size is 64, but quantization_config says 32"),
        ({}, {**CONFIG, "quant_config": {"a.m": params}}, "a.m.group_size is 64, but quantization_config says 32"),
        ({}, {**CONFIG, "quant_config": 4}, "quant_config must be dict"),
        ({"b.nbits": tensors["a.m.nbits"]}, CONFIG, "is unexpected"),
        ({"a.m.zero_scale": torch.zeros(2)}, CONFIG, "is unexpected"),
    ):
        with pytest.raises(ValueError, match=r".") as e:
            find(HQQ, {**tensors, **more}, config)
        assert reason in str(e.value)
    odd, _ = layer((8, 16), 4, 16, 1)
    odd["a.m.group_size"] = torch.tensor(128, dtype=torch.int32)
    with pytest.raises(KeyedError, match="1 rows of groups is not a multiple of the 2 codes per word"):
        find(HQQ, odd, CONFIG)

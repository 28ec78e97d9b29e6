"""QuantizedCache: a reference that quantizes the whole history, greedy tokens, beams, crops, true bytes."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

import pennyweight as pw
from pennyweight.core.numerics import sqnr
from pennyweight.inference.kv_cache import BITS, QuantizedCache, QuantizedLayer
from tests.integrations.small import IDS, llama, tokens


def by_hand(
    x: Tensor, bits: int, group: int, residual: int, along_tokens: bool, *, hadamard: int = 0, sinks: int = 0
) -> Tensor:
    """x [B, H, L, D] with its old groups rounded: written with plain arithmetic, nothing of the library."""
    first, x = x[:, :, :sinks], x[:, :, sinks:]
    old = max(0, x.shape[2] - residual) // group * group
    past, rest = x[:, :, :old], x[:, :, old:]
    turn = torch.eye(x.shape[-1])
    if hadamard:
        h = torch.ones(1, 1)
        while len(h) < hadamard:
            h = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), h)
        turn = torch.block_diag(*[h / hadamard**0.5] * (x.shape[-1] // hadamard))
    past = past @ turn
    y = past.transpose(-1, -2) if along_tokens else past
    out = torch.zeros_like(y)
    for start in range(0, y.shape[-1], group):
        g = y[..., start : start + group]
        lo, hi = g.amin(-1, keepdim=True), g.amax(-1, keepdim=True)
        scale = (hi - lo) / (2**bits - 1)
        codes = ((g - lo) / scale.clamp(min=1e-12)).round()
        out[..., start : start + group] = codes * scale + lo
    return torch.cat([first, (out.transpose(-1, -2) if along_tokens else out) @ turn.t(), rest], 2)


def stream(length: int, channels: int = 24) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 2, 3, length, channels)
    x[0, ..., 5] *= 20  # a large channel of keys
    return x[0], x[1]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [8, 16])
@pytest.mark.parametrize("steps", [[50], [1] * 50, [7, 1, 1, 30, 11]], ids=["prefill", "one by one", "mixed"])
def test_the_past_is_the_reference_however_it_came(bits: int, group: int, steps: list[int]) -> None:
    keys, values = stream(50)
    layer, at = QuantizedLayer(bits, group, residual=9), 0
    pw.reset_fallbacks()
    for n in steps:
        now = slice(at, at + n)
        out = layer.update(keys[:, :, now], values[:, :, now])
        for got, x, along in zip(out, (keys, values), (True, False), strict=True):
            expected = by_hand(x[:, :, :at], bits, group, 9, along)
            torch.testing.assert_close(got[:, :, :at], expected, atol=2e-5, rtol=2e-5)
            assert torch.equal(got[:, :, at : at + n], x[:, :, now])  # this call's own tokens are exact
        at += n
        assert layer.get_seq_length() == at
        assert layer.get_mask_sizes(3) == (at + 3, 0)
    assert pw.fallbacks() == {}
    assert isinstance(layer.past_keys, pw.AffineQuantizedTensor)
    assert layer.past_keys.shape[2] == 41 // group * group


@pytest.mark.parametrize("steps", [[50], [1] * 50, [2, 9, 1, 30, 8]], ids=["prefill", "one by one", "mixed"])
@pytest.mark.parametrize(("key_bits", "value_bits"), [(8, 4), (4, 8), (4, 4), (5, 2)])
@pytest.mark.parametrize("sinks", [0, 3, 16, 48])
@pytest.mark.parametrize("rotate", [True, False, None])
def test_rotation_and_first_tokens(
    rotate: bool | None, sinks: int, key_bits: int, value_bits: int, steps: list[int]
) -> None:
    keys, values = stream(50)
    layer, at = QuantizedLayer(key_bits, 8, residual=5, value_bits=value_bits, rotate=rotate, sinks=sinks), 0
    turned = [8 * (bits < 8 if rotate is None else rotate) for bits in (key_bits, value_bits)]  # 24 channels
    for n in steps:
        now = slice(at, at + n)
        out = layer.update(keys[:, :, now], values[:, :, now])
        for got, x, bits, block, along in zip(
            out, (keys, values), (key_bits, value_bits), turned, (True, False), strict=True
        ):
            expected = by_hand(x[:, :, :at], bits, 8, 5, along, hadamard=block, sinks=sinks)
            torch.testing.assert_close(got[:, :, :at], expected, atol=5e-5, rtol=5e-5)
            assert torch.equal(got[:, :, at : at + n], x[:, :, now])  # this call's own tokens are exact
            assert torch.equal(got[:, :, : min(sinks, at)], x[:, :, : min(sinks, at)])
        at += n
        assert layer.get_seq_length() == at
    assert (layer.past_keys is None) == (sinks == 48)
    assert layer.hadamard == tuple(turned)


@pytest.mark.parametrize("channels", [64, 80, 96])
def test_rotation_helps_against_large_numbers(channels: int) -> None:
    """Errors of scores with keys of which some numbers are large, and of outputs with values of which a channel is."""
    q, w = torch.randn(1, 2, 40, channels), torch.randn(1, 2, 40, 256).softmax(-1)
    keys, values = torch.randn(2, 1, 2, 256, channels)
    keys = torch.where(torch.rand_like(keys) < 0.02, 20 * keys, keys)
    values[..., 3] *= 20
    errors = []
    for rotate in (False, True):
        layer = QuantizedLayer(4, 32, 0, rotate=rotate)
        layer.update(keys, values)
        k, v = layer.floats()
        errors.append([sqnr(q @ keys.mT, q @ k.mT), sqnr(w @ values, w @ v)])
    (scores, outputs), (rotated_scores, rotated_outputs) = errors
    assert rotated_scores > scores + (0.3 if channels == 80 else 1)  # blocks of 16, 64 and 32
    assert rotated_outputs > outputs + 3


def test_first_tokens_help_against_a_large_one() -> None:
    """The first token gets most of the attention, and has other keys than the rest."""
    keys, values = torch.randn(2, 1, 2, 256, 64)
    keys[:, :, 0] *= 30
    errors = []
    for sinks in (0, 4):
        layer = QuantizedLayer(4, 32, 0, rotate=True, sinks=sinks)
        layer.update(keys, values)
        errors.append(sqnr(keys[:, :, 1:], layer.floats()[0][:, :, 1:]))
    assert errors[1] > errors[0] + 5


def test_heads_that_cannot_be_rotated() -> None:
    keys, values = stream(40, channels=33)
    with pytest.raises(ValueError, match="an even number of channels, got 33; pass rotate=False"):
        QuantizedLayer(4, 8, 0, rotate=True).update(keys, values)
    layer = QuantizedLayer(4, 8, 0, rotate=None)
    layer.update(keys, values)
    assert layer.hadamard == (0, 0)
    layer = QuantizedLayer(4, 8, 0, rotate=None)  # as in DeepSeek, values have other channels than keys
    layer.update(keys, values[..., :24])
    assert layer.hadamard == (0, 8)
    torch.testing.assert_close(layer.floats()[1], by_hand(values[..., :24], 4, 8, 0, False, hadamard=8))


def test_which_are_rotated_by_default() -> None:
    settings = {
        (): (False, False, 0), (("bits", 4),): (True, True, 4), (("key_bits", 8), ("bits", 4)): (False, True, 4),
        (("value_bits", 4),): (False, True, 4), (("bits", 4), ("rotate", False), ("sinks", 0)): (False, False, 0),
        (("rotate", True), ("sinks", 7)): (True, True, 7),
    }  # fmt: skip
    for given, (keys, values, sinks) in settings.items():
        cache = QuantizedCache(residual=0, **dict(given))  # type: ignore[arg-type]
        x = torch.randn(1, 1, 80, 16)
        cache.update(x, x, 0)
        layer = cache.layers[0]
        assert layer.hadamard == (16 * keys, 16 * values)
        assert layer.sinks == cache.sinks == sinks
        assert layer.past_keys.spec.format.bits == cache.key_bits
        assert layer.past_values.spec.format.bits == cache.value_bits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rotate", [True, False])
def test_the_dtype_stays(dtype: torch.dtype, rotate: bool) -> None:
    keys, values = (t.to(dtype) for t in stream(70))
    layer = QuantizedLayer(8, 16, 0, rotate=rotate, sinks=5)
    layer.update(keys, values)
    for got, x in zip(layer.update(keys[:, :, :1], values[:, :, :1]), (keys, values), strict=True):
        assert got.dtype == dtype
        assert sqnr(x.double(), got[:, :, :70].double()) > 30
        assert torch.equal(got[:, :, :5], x[:, :, :5])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["deepcopy", "pickle"])
def test_copies_go_on_alone(copied: Any) -> None:
    model = llama()
    ids = torch.randint(3, 200, (1, 60))
    cache = QuantizedCache(model.config, bits=4, group=8, residual=4)
    with torch.no_grad():
        model(ids[:, :50], past_key_values=cache)
        other = copied(cache)
        assert other.nbytes == cache.nbytes
        expected = model(ids[:, 50:], past_key_values=cache).logits
        assert other.get_seq_length() == 50
        assert torch.equal(model(ids[:, 50:], past_key_values=other).logits, expected)


def test_codes_do_not_depend_on_how_the_tokens_came() -> None:
    keys, values = stream(64)
    one, many = (QuantizedLayer(4, 16, 8, rotate=None, sinks=3) for _ in range(2))
    one.update(keys, values)
    for i in range(64):
        many.update(keys[:, :, i : i + 1], values[:, :, i : i + 1])
    for a, b in zip(one.stored, many.stored, strict=True):
        assert a.shape == b.shape
        assert torch.equal(a.dequantize() if hasattr(a, "spec") else a, b.dequantize() if hasattr(b, "spec") else b)


def test_large_channels_of_keys_do_not_hurt_the_others() -> None:
    keys, values = stream(96)
    layer = QuantizedLayer(4, 32, 0)
    layer.update(keys, values)
    small = [c for c in range(24) if c != 5]
    assert layer.past_keys is not None
    assert sqnr(keys[..., small], layer.past_keys.dequantize()[..., small]) > 19
    per_token = QuantizedLayer(4, 32, 0)
    per_token.update(values, keys)  # the other way round: token by token
    assert per_token.past_values is not None
    assert sqnr(keys[..., small], per_token.past_values.dequantize()[..., small]) < 10


# -- in a model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [lambda c: QuantizedCache(c.config), lambda c: QuantizedCache()])
def test_tokens_are_those_of_a_float_cache_while_the_residual_covers_all(cache: Any) -> None:
    model = llama()
    mine = cache(model)
    assert tokens(model, past_key_values=mine) == tokens(model)
    assert len(mine) == 2
    assert mine.get_seq_length() == IDS.shape[1] + 7


@pytest.mark.parametrize(("bits", "least"), [(8, 40), (6, 28), (4, 14)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_stay_near_those_of_a_float_cache(bits: int, least: float, dtype: torch.dtype) -> None:
    model = llama(num_key_value_heads=2).to(dtype)  # two query heads for each of keys
    ids = torch.randint(3, 200, (2, 80))
    cache, exact = QuantizedCache(model.config, bits=bits, residual=4), DynamicCache()
    with torch.no_grad():
        for part in (ids[:, :70], *ids[:, 70:].split(1, 1)):
            got = model(part, past_key_values=cache, use_cache=True).logits
            expected = model(part, past_key_values=exact, use_cache=True).logits
    assert cache.layers[0].past_keys.shape[2] == 64
    if dtype == torch.float32:
        assert sqnr(expected, got) > least
    else:
        assert sqnr(expected.float(), got.float()) > min(least, 25)


def test_bytes_are_true() -> None:
    length, group, residual = 512, 32, 32
    keys, values = torch.randn(2, 2, 4, length, 64).bfloat16()
    exact = keys.nbytes + values.nbytes
    for bits, value_bits, sinks, times in ((8, 8, 0, 1.695), (4, 4, 0, 2.813), (2, 2, 0, 4.197), (8, 4, 32, 1.975)):
        cache = QuantizedCache(bits=bits, value_bits=value_bits, group=group, residual=residual, sinks=sinks)
        cache.update(keys, values, 0)
        old = length - residual - sinks
        numbers = 2 * 2 * 4 * old * 64
        expected = numbers // 2 * (bits + value_bits) // 8 + numbers // group * 4
        expected += 2 * 2 * 4 * (residual + sinks) * 64 * 2
        assert cache.nbytes == expected
        assert sum(t.untyped_storage().nbytes() for t in cache.layers[0].stored) == expected
        assert exact / cache.nbytes == pytest.approx(times, abs=0.01)


@pytest.mark.filterwarnings("ignore:`generation_config` default values have been modified")
def test_beam_search() -> None:
    model = llama()
    expected = tokens(model, num_beams=3)
    assert tokens(model, num_beams=3, past_key_values=QuantizedCache(model.config)) == expected
    for more in ({}, {"rotate": True, "sinks": 2}):
        cache = QuantizedCache(model.config, bits=8, group=4, residual=2, **more)  # type: ignore[arg-type]
        assert tokens(model, num_beams=3, past_key_values=cache) == expected
        assert cache.layers[0].past_keys.shape[0] == 2 * 3
        assert isinstance(cache.layers[0].past_keys, pw.AffineQuantizedTensor)


def test_sequences_are_chosen_on_the_codes() -> None:
    keys, values = stream(40)
    layer = QuantizedLayer(4, 8, 5, rotate=True, sinks=3)
    layer.update(keys, values)
    before = [t.dequantize() if hasattr(t, "spec") else t for t in layer.stored]

    def check(index: list[int]) -> None:
        for x, t in zip(before, layer.stored, strict=True):
            assert torch.equal(t.dequantize() if hasattr(t, "spec") else t, x[index])

    pw.reset_fallbacks()
    layer.reorder_cache(torch.tensor([1, 0]))
    check([1, 0])
    layer.batch_repeat_interleave(2)
    check([1, 1, 0, 0])
    layer.batch_select_indices(torch.tensor([True, False, False, True]))
    check([1, 0])
    assert pw.fallbacks() == {}
    layer.offload()
    layer.prefetch()
    check([1, 0])
    layer.reset()
    assert layer.get_seq_length() == 0
    layer.update(keys, values)
    assert layer.get_seq_length() == 40


@pytest.mark.parametrize("count", [0, 3, 5, 8, 9, 20, 36, 37, 38, 39, 40])
@pytest.mark.parametrize(("rotate", "sinks"), [(False, 0), (True, 0), (False, 3), (True, 3), (True, 8)])
def test_crop(count: int, rotate: bool, sinks: int) -> None:
    keys, values = stream(40)
    layer = QuantizedLayer(8, 8, 5, rotate=rotate, sinks=sinks)
    layer.update(keys, values)
    whole = layer.update(keys[:, :, :0], values[:, :, :0])
    layer.crop(-count)
    assert layer.get_seq_length() == 40 - count
    got = layer.update(keys[:, :, :0], values[:, :, :0])
    for a, b in zip(got, whole, strict=True):
        # tokens of a group that was cut may be quantized again
        torch.testing.assert_close(a, b[:, :, : 40 - count], atol=0.1 if rotate and sinks else 1e-5, rtol=1e-5)
    layer.update(keys[:, :, :30], values[:, :, :30])
    assert layer.get_seq_length() == 70 - count
    for got, x, along in zip(layer.floats(), (keys, values), (True, False), strict=True):
        again = torch.cat([x[:, :, : 40 - count], x[:, :, :30]], 2)
        expected = by_hand(again, 8, 8, 5, along, hadamard=8 if rotate else 0, sinks=sinks)
        assert sqnr(expected, got) > 35


def test_crop_refuses_what_it_cannot_do() -> None:
    layer = QuantizedLayer()
    layer.crop(-1)  # nothing there yet: layers that share another's keys are never filled
    layer.update(*stream(4))
    for wrong in (1, -5):
        with pytest.raises(ValueError, match=f"from -4 .all tokens. to 0, got {wrong}"):
            layer.crop(wrong)


def test_layers_with_a_window_are_as_they_were() -> None:
    config = MistralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, sliding_window=6, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MistralForCausalLM(config).eval()
    cache = QuantizedCache(config, group=4, residual=0)
    assert tokens(model, past_key_values=cache) == tokens(model)
    assert all(cache.is_sliding)
    assert cache.nbytes == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def test_bad_settings_and_values() -> None:
    for wrong in (
        {"bits": 1}, {"bits": 16}, {"bits": 4.0}, {"key_bits": 1}, {"value_bits": "4"}, {"group": 0}, {"group": 2.0},
        {"residual": -1}, {"sinks": -1}, {"sinks": 1.5}, {"rotate": 1}, {"rotate": "yes"},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(wrong))):
            QuantizedCache(**wrong)  # type: ignore[arg-type]
    keys, values = stream(40)
    keys[0, 0, 3, 2] = float("inf")
    with pytest.raises(ValueError, match="keys of a cache: 1 of"):
        QuantizedLayer(8, 8, 0).update(keys, values)

"""Fused blocks in transformers' own generate: the same tokens as the unfused model, with every kind of cache."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.inference import block_cache
from pennyweight.inference.bound_block import Bound
from pennyweight.inference.verify_block import checked
from tests.inference.fuse_models import DECODERS, GENERATING, NEWEST, inputs, model_of

transformers = pytest.importorskip("transformers")
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache  # noqa: E402

from pennyweight.inference.kv_cache import QuantizedCache  # noqa: E402

NEW = 16  # beyond the windows of 8 tokens
HOW: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "assisted": {"prompt_lookup_num_tokens": 2},
    "chunks": {"prefill_chunk_size": 4},
}


def pair(family: str, scheme: str = "int8", dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """(a quantized model, the same fused)"""
    model = model_of(family, scheme, dtype)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    other = copy.deepcopy(model)
    pw.fuse_(other)
    return model, other


def prompt(family: str, how: str = "") -> dict[str, Any]:
    given = inputs(family)
    given.pop("decoder_input_ids", None)
    return {name: t[2:] for name, t in given.items()} if how == "assisted" else given


def tokens(model: nn.Module, given: dict[str, Any], **options: Any) -> Tensor:
    return model.generate(**given, max_new_tokens=NEW, do_sample=False, **options)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("family", GENERATING)
def test_the_same_tokens(family: str, how: str) -> None:
    if family in ("whisper", "bart") and how == "chunks":
        pytest.skip("transformers cannot do this")
    if how == "assisted" and not NEWEST:
        pytest.skip("transformers up to 5.10 needs an eos_token_id for this")
    model, other = pair(family, "int4" if family in ("llama", "gpt2") else "int8")
    given = prompt(family, how)
    expected = tokens(model, given, **HOW[how])
    pw.reset_fallbacks()
    found = tokens(other, given, **HOW[how])
    assert torch.equal(found, expected)
    assert not [name for name in pw.fallbacks() if "fused" in name]


@pytest.mark.parametrize("bits", [(8, 8), (4, 4), (8, 4)], ids=str)
@pytest.mark.parametrize("family", DECODERS)
def test_a_quantized_cache(family: str, bits: tuple[int, int]) -> None:
    """Below 8 bits rotated, and with float tokens at the start; sequences are padded."""
    model, other = pair(family)
    given = prompt(family)
    found = [
        tokens(
            m,
            given,
            past_key_values=QuantizedCache(m.config, key_bits=bits[0], value_bits=bits[1], group=4, residual=4),
        )
        for m in (model, other)
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("bits", "group", "residual", "more"),
    [
        (8, 16, 0, {}), (4, 4, 3, {"rotate": False, "sinks": 0}), (8, 32, 128, {}), (4, 4, 3, {}), (4, 16, 0, {}),
        (8, 4, 2, {"value_bits": 4, "sinks": 3}), (8, 16, 0, {"rotate": True, "sinks": 1}), (6, 8, 2, {}),
    ],
)  # fmt: skip
def test_a_block_reads_the_codes_itself(
    monkeypatch: Any, bits: int, group: int, residual: int, more: dict[str, Any]
) -> None:
    """Also for a prompt in several parts, and after sequences were selected and tokens removed; with the contents of
    the unfused model's cache."""
    model, other = pair("llama")
    monkeypatch.setattr(Bound, "_in_two_parts", None)
    ids = torch.arange(3, 43).view(1, -1).repeat(3, 1) + torch.tensor([[0], [5], [9]])
    found = []
    for m in (model, other):
        past, logits = QuantizedCache(m.config, bits=bits, group=group, residual=residual, **more), []
        with torch.inference_mode():
            for first, end in ((0, 20), (20, 27), (27, 28), (28, 29)):
                logits.append(m(ids[:, first:end], past_key_values=past).logits)
            past.batch_select_indices(torch.tensor([2, 0]))
            past.crop(-12)
            for i in range(17, 40):
                logits.append(m(ids[:2, i : i + 1], past_key_values=past).logits)
        found.append((past, torch.cat([y.flatten() for y in logits])))
    (expected, y), (mine, z) = found
    # a number between two codes may be rounded the other way
    torch.testing.assert_close(z, y, rtol=1e-3, atol=1e-3 if bits == 8 else 5e-3)
    for a, b in zip(expected.layers, mine.layers, strict=True):
        assert a.get_seq_length() == b.get_seq_length() == 40
        for s, t in zip(a.stored, b.stored, strict=True):
            if residual == 128 and s is None:
                assert t is None
                continue
            s, t = (x.dequantize() if hasattr(x, "spec") else x for x in (s, t))
            torch.testing.assert_close(t, s, rtol=1e-3, atol=2e-2 if bits == 8 else 0.3)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "t5", "whisper", "bart"])
def test_checked_at_each_call(family: str) -> None:
    _, other = pair(family)
    with checked():
        for how in ("greedy", "beams", "static cache"):
            tokens(other, prompt(family), **HOW[how])


@pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
def test_the_cache_has_the_same_contents(cache: Any) -> None:
    model, other = pair("llama")
    given = inputs("llama")
    found = []
    for m in (model, other):
        past = cache(config=m.config, max_cache_len=20) if cache is StaticCache else cache(config=m.config)
        with torch.no_grad():
            m(**given, past_key_values=past)
            mask = torch.cat([given["attention_mask"], torch.ones(3, 1, dtype=torch.int64)], 1)
            m(input_ids=given["input_ids"][:, :1], attention_mask=mask, past_key_values=past)
        found.append(past)
    assert int(found[0].get_seq_length()) == int(found[1].get_seq_length()) == 10
    for a, b in zip(found[0].layers, found[1].layers, strict=True):
        assert a.keys.shape == b.keys.shape
        torch.testing.assert_close(b.keys, a.keys, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(b.values, a.values, rtol=1e-5, atol=1e-6)


def test_a_growing_cache_is_not_copied_at_each_token() -> None:
    _, other = pair("llama")
    past = DynamicCache(config=other.config)
    with torch.no_grad():
        places = set()
        for i in range(40):
            other(input_ids=torch.tensor([[i + 5]]), past_key_values=past)
            places.add(past.layers[0].keys.data_ptr())
    assert past.get_seq_length() == 40
    assert len(places) == 1


def append(layer: DynamicLayer, count: int, value: float) -> Tensor:
    """What a block does. Returns the buffer of the keys."""
    room = block_cache.room(layer, (2, 1, count, 4), torch.float32)
    assert room is not None
    buffers = block_cache.take(layer, room)
    for t in buffers:
        t[:, :, room.past : room.past + count] = value
    assert room.length == room.past + count
    return buffers[0]


def contents(layer: DynamicLayer) -> list[float]:
    assert torch.equal(layer.keys, layer.values)
    return layer.keys[1, 0, :, 2].tolist()


def test_copies_and_crops_of_a_grown_layer() -> None:
    layer = DynamicLayer()
    first = append(layer, 3, 1.0)
    twin, deep = copy.copy(layer), copy.deepcopy(layer)
    second = append(layer, 1, 2.0)
    assert second is first
    append(twin, 1, 3.0)
    append(deep, 1, 4.0)
    assert [contents(t)[3:] for t in (layer, twin, deep)] == [[2.0], [3.0], [4.0]]
    layer.crop(-2)
    held = layer.keys
    append(layer, 1, 5.0)
    assert contents(layer) == [1.0, 1.0, 5.0]
    assert held[1, 0, :, 2].tolist() == [1.0, 1.0]
    layer.reorder_cache(torch.tensor([1, 0]))
    append(layer, 1, 6.0)
    assert contents(layer) == [1.0, 1.0, 5.0, 6.0]
    layer.update(*(torch.full((2, 1, 1, 4), 7.0),) * 2)
    append(layer, 1, 8.0)
    assert contents(layer) == [1.0, 1.0, 5.0, 6.0, 7.0, 8.0]
    layer.reset()
    kept = layer.get_seq_length()  # up to transformers 5.10 a reset layer keeps its length and holds zeros
    append(layer, 1, 9.0)
    assert contents(layer) == [*[0.0] * kept, 9.0]
    assert not (NEWEST and kept)


def test_a_layer_that_does_not_fit_is_left_to_its_own_code() -> None:
    layer = DynamicLayer()
    append(layer, 3, 1.0)
    assert block_cache.room(layer, (3, 1, 1, 4), torch.float32) is None  # another batch
    assert block_cache.room(layer, (2, 1, 1, 4), torch.bfloat16) is None
    full = transformers.cache_utils.StaticLayer(max_cache_len=2)
    assert block_cache.room(full, (2, 1, 3, 4), torch.float32) is None
    sliding = copy.copy(layer)
    sliding.__class__ = transformers.cache_utils.DynamicSlidingWindowLayer
    assert block_cache.room(sliding, (2, 1, 1, 4), torch.float32) is None

    class Other(DynamicCache):
        def update(self, *args: Any, **kwargs: Any) -> Any:
            return super().update(*args, **kwargs)

    assert block_cache.layer_of(Other(), 0) is None
    assert type(block_cache.layer_of(Cache(layer_class_to_replicate=DynamicLayer), 1)) is DynamicLayer


def test_the_cache_outlives_inference_mode() -> None:
    model, other = pair("llama")
    given = inputs("llama", batch=1, tokens=5)
    with torch.inference_mode():
        past = other(**given).past_key_values
        want = model(**given).past_key_values
    with torch.no_grad():
        more = torch.tensor([[7, 8]])
        y, expected = (m(input_ids=more, past_key_values=p).logits for m, p in ((other, past), (model, want)))
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)

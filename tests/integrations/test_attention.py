"""Grouped attention is "sdpa" for the same model: prompts, new tokens, masks, batches."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from pennyweight.integrations import attention  # noqa: E402
from pennyweight.integrations.attention import use_grouped_attention  # noqa: E402
from pennyweight.kernels.cpu import library  # noqa: E402


def llama(heads: int, kv_heads: int) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=50, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@torch.no_grad()
def logits(model: torch.nn.Module, mask: torch.Tensor | None) -> list[torch.Tensor]:
    """Of a prompt of 5 tokens and of 3 more, one by one, for two sequences."""
    cache, out = transformers.DynamicCache(), []
    tokens = torch.arange(16).view(2, 8) * 3 % 50
    for part in (tokens[:, :5], tokens[:, 5:6], tokens[:, 6:7], tokens[:, 7:]):
        seen = cache.get_seq_length() + part.shape[1]
        held = None if mask is None else mask[:, :seen]
        out.append(model(part, attention_mask=held, past_key_values=cache, use_cache=True).logits)
    return out


@pytest.fixture(params=["native", "torch"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(attention, "_native", lambda *args: None)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_what_sdpa_does(heads: int, kv_heads: int, padded: bool, dtype: torch.dtype) -> None:
    model = llama(heads, kv_heads).to(dtype)
    mask = torch.ones(2, 8, dtype=torch.long)
    if padded:
        mask[1, :2] = 0
    expected = logits(model, mask)
    ours = copy.deepcopy(model)
    use_grouped_attention(ours)
    use_grouped_attention(ours)  # twice is once
    near = 1e-5 if dtype == torch.float32 else 3e-2
    for y, e in zip(logits(ours, mask), expected, strict=True):
        assert torch.allclose(y, e, atol=near, rtol=near)
    ours.set_attn_implementation("sdpa")
    assert all(torch.equal(y, e) for y, e in zip(logits(ours, mask), expected, strict=True))


def test_one_token_takes_the_rows_together(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def spy(q: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        shapes.append(tuple(q.shape))
        return sdpa(q, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    model = llama(4, 2)
    use_grouped_attention(model)
    logits(model, None)
    native = library.available() is True
    assert bool(shapes) != native
    model(torch.tensor([[3]])).logits.sum().backward()  # with a gradient
    assert shapes[-2:] == [(1, 2, 2, 16)] * 2
    shapes.clear()
    monkeypatch.setattr(attention, "_native", lambda *args: None)
    logits(model, None)
    assert shapes == [(2, 4, 5, 16)] * 2 + [(2, 2, 2, 16)] * 6


@pytest.mark.usefixtures("_way")
def test_the_prompt_of_a_static_cache() -> None:
    """Its keys are longer than the prompt, and there is no mask."""
    model = llama(4, 2)
    tokens = torch.arange(7)[None]
    expected = model(tokens).logits
    use_grouped_attention(model)
    with torch.no_grad():
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        y = model(tokens, past_key_values=cache, use_cache=True).logits
        more = model(torch.tensor([[7]]), past_key_values=cache, use_cache=True).logits
        model.set_attn_implementation("sdpa")
        both = model(torch.arange(8)[None]).logits
    assert torch.allclose(y, expected, atol=1e-5)
    assert torch.allclose(more[:, -1], both[:, -1], atol=1e-5)


def test_a_model_that_needs_another_attention_is_refused() -> None:
    model = llama(4, 2)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=r"LlamaForCausalLM uses 'eager'.*set_attn_implementation\(.sdpa.\)"):
        use_grouped_attention(model)


def test_it_compiles_without_a_break() -> None:
    model = llama(4, 2)
    use_grouped_attention(model)
    step = torch.compile(model, fullgraph=True, backend="eager")
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        y = step(torch.tensor([[3]]), past_key_values=cache, use_cache=True).logits
        e = model(torch.tensor([[3]])).logits
    assert torch.allclose(y, e, atol=1e-5)

"""Conversation: turns with a kept cache against turns from nothing, streaming, stopping, limits and templates."""

from typing import Any

import pytest
import torch
import transformers as T

import pennyweight as pw
from pennyweight.inference.conversation import Conversation
from pennyweight.inference.kv_cache import QuantizedCache
from tests.inference.chat_models import REFUSES_SYSTEM, llama, mamba, mistral, tokenizer
from tests.io.gguf.models import SIZES

T5 = T.T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, vocab_size=8)
QUESTIONS = ["how are you?", "and now?", "go on, please"]


@pytest.mark.parametrize("make", [llama, mistral, mamba])
def test_turns_with_a_kept_cache_are_those_from_nothing(make: Any) -> None:
    model, reused = make(), []
    kept = Conversation(model, tokenizer(), max_new_tokens=12)
    for question in QUESTIONS:
        before = list(kept.messages)
        answer = kept.ask(question)
        reused.append(answer.reused)
        fresh = Conversation(model, tokenizer(), max_new_tokens=12)
        fresh.messages = before
        assert fresh.ask(question).text == answer.text
        assert answer.prompt_tokens > answer.reused
    assert reused[0] == 0
    assert all(n > 0 for n in reused[1:]) == (make is llama)  # a window that has moved on cannot go back


def test_it_is_what_generate_makes_of_the_template() -> None:
    model, tok = llama(), tokenizer()
    answer = Conversation(model, tok, system="be brief", max_new_tokens=9).ask(QUESTIONS[0])
    text = f"<|system|>be brief<|end|><|user|>{QUESTIONS[0]}<|end|><|assistant|>"
    prompt = tok(text, return_tensors="pt")["input_ids"]
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9)
    assert answer.prompt_tokens == prompt.shape[1]
    assert answer.text == tok.decode(out[0, prompt.shape[1] :], skip_special_tokens=True)
    assert answer.tokens == out.shape[1] - prompt.shape[1]


@pytest.mark.parametrize("cache", [{}, {"bits": 8}, {"bits": 4}, {"key_bits": 8, "value_bits": 4, "sinks": 3}], ids=str)
def test_a_quantized_and_fused_model_answers_in_turns(cache: dict[str, int]) -> None:
    model = llama()
    pw.quantize_(model, "int8")
    expected = Conversation(model, tokenizer(), max_new_tokens=8)
    texts = [expected.ask(q).text for q in QUESTIONS]
    pw.fuse_(model)
    make = (lambda: QuantizedCache(model.config, residual=16, **cache)) if cache else None  # type: ignore[arg-type]
    talk = Conversation(model, tokenizer(), make_cache=make, max_new_tokens=8)
    answers = [talk.ask(q) for q in QUESTIONS]
    assert all(a.reused for a in answers[1:])
    if not cache:
        assert [a.text for a in answers] == texts


def test_parts_are_the_text_and_stop_ends_it() -> None:
    parts: list[str] = []
    whole = Conversation(llama(), tokenizer(), max_new_tokens=40).ask("hello", parts.append)
    assert "".join(parts) == whole.text
    assert not whole.stopped
    assert 0 < whole.first_token <= whole.seconds
    calls = iter([False, False, True, True])
    talk = Conversation(llama(), tokenizer(), max_new_tokens=40)
    stopped = talk.ask("hello", stop=lambda: next(calls))
    assert stopped.stopped
    assert stopped.tokens == 3 < whole.tokens
    assert whole.text.startswith(stopped.text)
    assert talk.ask("again").reused > 0


def test_a_text_is_continued_without_a_template() -> None:
    model, tok = llama(), tokenizer(None)
    answer = Conversation(model, tok, max_new_tokens=6).continue_text("once")
    out = model.generate(**tok("once", return_tensors="pt", return_token_type_ids=False), max_new_tokens=6)
    assert answer.text == tok.decode(out[0, 4:], skip_special_tokens=True)
    assert answer.tokens_per_second is not None
    assert Conversation(model, tok, max_new_tokens=1).continue_text("once").tokens_per_second is None


def test_refusals_leave_the_conversation_as_it_was() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        Conversation(llama(), tokenizer(None)).ask("hello")
    with pytest.raises(ValueError, match="template refuses the messages: no system role"):
        Conversation(llama(), tokenizer(REFUSES_SYSTEM), system="x").ask("hello")
    talk = Conversation(llama(max_position_embeddings=40), tokenizer(), max_new_tokens=100)
    answer = talk.ask("hello")
    assert answer.prompt_tokens + answer.tokens <= 40
    messages = list(talk.messages)
    with pytest.raises(ValueError, match=r"tokens are too long: the model's context has 40"):
        talk.ask("x" * 40)
    assert talk.messages == messages
    with pytest.raises(ValueError, match="the prompt is empty"):
        talk.continue_text("")
    talk.reset()
    assert talk.ask("hello").text == answer.text


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (T.BertModel(T.BertConfig(**SIZES)), "BertModel does not generate text"),
        (T.T5ForConditionalGeneration(T5), "encoder-decoder"),
        (torch.nn.Linear(2, 2), "Linear does not generate text"),
    ],
    ids=["encoder", "encoder-decoder", "no model of transformers"],
)  # fmt: skip
def test_other_models_are_refused(model: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Conversation(model, tokenizer())

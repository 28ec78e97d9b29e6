"""Text from a causal language model of transformers, as it is made: single answers, and conversations whose KV cache
stays from turn to turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

Write = Callable[[str], object]


@dataclass(frozen=True)
class Answer:
    """What a model answered, and how fast.

    text, tokens      of the answer; the token that ends it counts
    prompt_tokens     tokens of the prompt; ``reused`` of them were in the cache
    first_token       seconds until the first token
    seconds           until the last
    stopped           whether it was interrupted
    """

    text: str
    tokens: int
    prompt_tokens: int
    reused: int
    first_token: float
    seconds: float
    stopped: bool

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens after the first; None if there is no second one."""
        return (self.tokens - 1) / (self.seconds - self.first_token) if self.tokens > 1 else None


class _Streamer(TextStreamer):
    """Passes text on in whole words, and notes when tokens come. ``put`` gets the prompt first."""

    def __init__(self, tokenizer: Any, write: Write) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write
        self.times: list[float] = []
        self.parts: list[str] = []

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.parts.append(text)
            self.write(text)


class _StopRequested(StoppingCriteria):
    """Ends generation once ``stop()`` is true."""

    def __init__(self, stop: Callable[[], bool]) -> None:
        self.stop, self.stopped = stop, False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.stopped = self.stopped or self.stop()
        return torch.full((len(input_ids),), self.stopped, dtype=torch.bool, device=input_ids.device)


class Conversation:
    """Messages to and from a model.

    model       a causal language model of transformers, fused or not
    tokenizer   with a chat template; without one only :meth:`continue_text` can be called
    system      the system message; "" leaves the template's own
    make_cache  makes an empty KV cache, such as ``lambda: QuantizedCache(model.config)``; default: transformers' own
    max_new_tokens   of an answer; fewer where the context ends
    settings    others for ``model.generate``: do_sample, temperature and so on

    The cache of a turn is kept: the next one computes only the tokens that are new. Raises ValueError for a model that
    does not generate text from text.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, *, system: str = "", make_cache: Callable[[], Any] | None = None,
        max_new_tokens: int = 512, **settings: Any,
    ) -> None:  # fmt: skip
        name = type(model).__name__
        config: Any = getattr(model, "config", None)
        if not callable(getattr(model, "can_generate", None)) or not model.can_generate():  # type: ignore[operator]
            raise ValueError(f"{name} does not generate text; a causal language model is required")
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"{name} is an encoder-decoder model; a causal language model is required")
        self.model: Any = model
        self.tokenizer, self.system, self.make_cache = tokenizer, system, make_cache
        self.max_new_tokens, self.settings = max_new_tokens, settings
        self.messages: list[dict[str, str]] = []
        self._cache: Any = None
        self._known: list[int] = []  # the tokens whose keys and values the cache has
        self.reset()

    def reset(self) -> None:
        """Forget all messages except the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self._cache, self._known = None, []

    def ask(self, text: str, write: Write = lambda part: None, stop: Callable[[], bool] = lambda: False) -> Answer:
        """Send a message. The answer is passed to ``write`` part by part, and ends early once ``stop()`` is true.

        Raises ValueError, with the conversation as before, if there is no chat template, if it refuses the messages, or
        if the conversation would be longer than the model's context.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template; the model can only continue a text")
        from jinja2 import TemplateError

        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            rendered = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        answer = self._generate(rendered["input_ids"], write, stop)
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer

    def continue_text(
        self, text: str, write: Write = lambda part: None, stop: Callable[[], bool] = lambda: False
    ) -> Answer:
        """The text as the model would go on, without a chat template. Raises ValueError as :meth:`ask`."""
        return self._generate(self.tokenizer(text)["input_ids"], write, stop)

    def _generate(self, ids: list[int], write: Write, stop: Callable[[], bool]) -> Answer:
        if not ids:
            raise ValueError("the prompt is empty")
        text_config = self.model.config.get_text_config(decoder=True)  # of a model that also sees, the language part
        limit = getattr(text_config, "max_position_embeddings", None)
        room = limit - len(ids) if isinstance(limit, int) else self.max_new_tokens
        if room < 1:
            raise ValueError(f"{len(ids)} tokens are too long: the model's context has {limit}")
        reused = self._reuse(ids)
        streamer, request = _Streamer(self.tokenizer, write), _StopRequested(stop)
        prompt = torch.tensor([ids], device=self.model.device)
        # given, since transformers would take ends of turns for padding where both are the same token
        mask = torch.ones_like(prompt)
        cache, self._cache, self._known = self._cache, None, []  # an error in a step leaves no half of a cache
        start = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                prompt, attention_mask=mask, past_key_values=cache, streamer=streamer,
                stopping_criteria=StoppingCriteriaList([request]), max_new_tokens=min(self.max_new_tokens, room),
                **self.settings,
            )  # fmt: skip
        tokens = out[0, len(ids) :].tolist()
        if cache is not None:
            self._cache, self._known = cache, [*ids, *tokens][: cache.get_seq_length()]
        return Answer(
            "".join(streamer.parts), len(tokens), len(ids), reused, streamer.times[0] - start,
            streamer.times[-1] - start, request.stopped,
        )  # fmt: skip

    def _reuse(self, ids: list[int]) -> int:
        """Crop the cache to the tokens that it shares with ``ids``, all but the last; return their number."""
        common = 0
        for old, new in zip(self._known, ids[:-1], strict=False):
            if old != new:
                break
            common += 1
        drop = len(self._known) - common
        if self._cache is None or not common or (drop and not _can_crop(self._cache)):
            self._cache, self._known = self._new_cache(), []
            return 0
        if drop:
            self._cache.crop(-drop)
        return common

    def _new_cache(self) -> Any:
        """None for models with other states than keys and values: transformers makes their cache, for one answer."""
        if self.make_cache is not None:
            return self.make_cache()
        cache = DynamicCache(config=self.model.config)
        return cache if all(isinstance(layer, DynamicLayer) for layer in cache.layers) else None


def _can_crop(cache: Any) -> bool:
    """Whether tokens can be removed at the end: layers with a sliding window have lost those before it."""
    return not any(isinstance(layer, DynamicSlidingWindowLayer) for layer in cache.layers)

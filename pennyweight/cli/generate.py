"""``pennyweight generate``: answers a prompt, as it is written."""

from __future__ import annotations

import sys

import typer

from .interrupts import stop_request
from .language_model import has_template, open_conversation, speed, write_part
from .options import (
    ComputeDtype,
    Fuse,
    Int8Cache,
    Json,
    KvBits,
    LanguageModel,
    MaxNewTokens,
    Prompt,
    Raw,
    Seed,
    System,
    Temperature,
    TopP,
    Traceback,
)
from .output import check_report_path, report_errors, show

EPILOG = """Examples:
  pennyweight generate OUT_DIR --prompt "What is the capital of France?"
  pennyweight generate model.gguf --raw --prompt "Once upon a time" --max-new-tokens 64
  cat letter.txt | pennyweight generate org/model --system "Summarize the letter." --json"""


@report_errors
def generate(
    model: LanguageModel,
    prompt: Prompt = "-",
    raw: Raw = False,
    system: System = "",
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    kv_bits: KvBits = "",
    int8_cache: Int8Cache = False,
    dtype: ComputeDtype = "",
    fuse: Fuse = True,
    json_path: Json = "",
    traceback: Traceback = False,
) -> None:
    """Answer a prompt, or continue a text.

    The answer is written to stdout as it is made, its speed to stderr. If the model's tokenizer has a chat template,
    the prompt is a user's message; without one, or with --raw, it is continued as it is. Ctrl-C stops the answer.
    """
    check_report_path(json_path, None)
    if raw and system:
        raise ValueError("--system is a message of the chat template, which --raw does not use; pass one of them")
    if prompt == "-" and sys.stdin.isatty():
        raise ValueError('--prompt is required: --prompt "your text", or a text on stdin')
    conversation = open_conversation(
        model, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, kv_bits=kv_bits,
        int8_cache=int8_cache, dtype=dtype, fuse=fuse, system=system,
    )  # fmt: skip
    text = sys.stdin.read() if prompt == "-" else prompt
    run = conversation.ask if has_template(conversation.tokenizer) and not raw else conversation.continue_text
    with stop_request() as stop:
        answer = run(text, (lambda part: None) if json_path == "-" else write_part, stop)
    data = {
        "version": 1, "model": model, "prompt": text, "text": answer.text, "prompt_tokens": answer.prompt_tokens,
        "tokens": answer.tokens, "first_token_seconds": answer.first_token, "seconds": answer.seconds,
        "tokens_per_second": answer.tokens_per_second, "stopped": answer.stopped,
    }  # fmt: skip
    show(data, lambda: "", json_path)
    typer.echo(speed(answer), err=True)

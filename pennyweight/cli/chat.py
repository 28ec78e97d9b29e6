"""``pennyweight chat``: a conversation with a model on the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import typer

from .interrupts import stop_request
from .language_model import open_conversation, speed, write_part
from .options import (
    ComputeDtype,
    Fuse,
    Int8Cache,
    KvBits,
    LanguageModel,
    MaxNewTokens,
    Seed,
    System,
    Temperature,
    TopP,
    Traceback,
)
from .output import line, report_errors

if TYPE_CHECKING:
    from ..inference.conversation import Conversation

EPILOG = """Examples:
  pennyweight chat OUT_DIR
  pennyweight chat model.gguf --system "Answer in one sentence."
  pennyweight chat org/model --kv-bits 8,4 --temperature 0.7 --seed 1"""

HELP = "/new starts a new conversation, /exit or Ctrl-D ends; Ctrl-C stops an answer"


@report_errors
def chat(
    model: LanguageModel,
    system: System = "",
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    kv_bits: KvBits = "",
    int8_cache: Int8Cache = False,
    dtype: ComputeDtype = "",
    fuse: Fuse = True,
    traceback: Traceback = False,
) -> None:
    """Talk to a model, with its chat template.

    Answers are written as they are made. /new starts a new conversation, /exit or Ctrl-D ends; Ctrl-C stops an answer.
    If stdin is no terminal, each of its lines is a message. A trial of a model, not a server: see docs/serving.md.
    """
    conversation = open_conversation(
        model, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, kv_bits=kv_bits,
        int8_cache=int8_cache, dtype=dtype, fuse=fuse, system=system, chat=True,
    )  # fmt: skip
    talk(conversation, sys.stdin.isatty())


def talk(conversation: Conversation, terminal: bool) -> None:
    """Messages from stdin, answers to stdout, until the end of stdin."""
    if terminal:
        with contextlib.suppress(ImportError):  # on Windows there is none
            import readline  # noqa: F401  (input() then edits lines, and has a history)
        typer.echo(HELP, err=True)
    while True:
        text = _message(terminal)
        if text is None or text == "/exit":
            return
        if text == "/new":
            conversation.reset()
            continue
        if text.startswith("/") and terminal:
            typer.echo(HELP, err=True)
            continue
        if not text:
            continue
        try:
            with stop_request() as stop:
                answer = conversation.ask(text, write_part, stop)
        except ValueError as error:  # too long for the model, or refused by its template: the conversation goes on
            typer.echo(f"pennyweight: {line(error)}; /new starts a new conversation", err=True)
            continue
        typer.echo()
        if terminal:
            typer.echo(typer.style(speed(answer) + (", stopped" if answer.stopped else ""), dim=True), err=True)


def _message(terminal: bool) -> str | None:
    """The next message, or None at the end. Ctrl-C at the prompt ends only if it comes twice in a row."""
    if not terminal:
        text = sys.stdin.readline()
        return text.strip() if text else None
    with stop_request("\nCtrl-C again, Ctrl-D or /exit ends\n> "):
        try:
            return input("> ").strip()
        except EOFError:
            typer.echo()
            return None

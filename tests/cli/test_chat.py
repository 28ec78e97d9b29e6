"""chat and generate: what they write where, for folders and GGUF files; Ctrl-C on a terminal."""

import json
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import pennyweight as pw
from pennyweight.cli.app import app
from pennyweight.cli.interrupts import stop_request
from pennyweight.inference.conversation import Conversation
from pennyweight.integrations.transformers import load_pretrained
from tests import forked
from tests.inference.chat_models import llama, tokenizer


@pytest.fixture
def talker(tmp_path: Path) -> Path:
    """A quantized model that chats, in our format."""
    return saved(llama(), tmp_path / "talker")


def saved(model: Any, folder: Path) -> Path:
    pw.quantize_(model, "int8")
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def expected(folder: Path, *messages: str, **settings: Any) -> list[str]:
    import transformers

    model = load_pretrained(transformers.AutoModelForCausalLM, folder)
    pw.fuse_(model)
    talk = Conversation(model, transformers.AutoTokenizer.from_pretrained(folder), **{"max_new_tokens": 10, **settings})
    return [talk.ask(message).text for message in messages]


def test_generate_writes_the_answer_alone(run: Any, talker: Path) -> None:
    found = run("generate", talker, "--prompt", "hello", "--max-new-tokens", 10)
    assert found.exit_code == 0, found.stderr
    assert found.stdout == expected(talker, "hello")[0] + "\n"
    about, speed = found.stderr.splitlines()
    assert about.startswith("LlamaForCausalLM, 0 M parameters in ")
    assert about.endswith("2 blocks fused")
    assert "tokens" in speed


def test_generate_as_json_from_stdin(talker: Path) -> None:
    arguments = ["generate", str(talker), "--no-fuse", "--max-new-tokens", "10", "--json"]
    found = CliRunner().invoke(app, arguments, input="hello")
    data = json.loads(found.stdout)
    assert data["prompt"] == "hello"
    assert data["text"] == expected(talker, "hello")[0]
    assert 0 < data["tokens"] <= 10
    assert data["first_token_seconds"] <= data["seconds"]
    assert not data["stopped"]


def test_generate_raw_continues_the_text(run: Any, talker: Path) -> None:
    with_template = run("generate", talker, "--prompt", "once", "--max-new-tokens", 10).stdout
    raw = run("generate", talker, "--prompt", "once", "--raw", "--max-new-tokens", 10, "--json", "-").stdout
    assert json.loads(raw)["prompt_tokens"] == len("once")
    assert json.loads(raw)["text"] + "\n" != with_template


def test_seeds_choose_the_answer(run: Any, talker: Path) -> None:
    def answer(seed: int) -> str:
        out = run("generate", talker, "-p", "hello", "--temperature", 3, "--seed", seed, "--max-new-tokens", 10)
        assert out.exit_code == 0, out.stderr
        return out.stdout

    assert answer(1) == answer(1) != answer(2)


@pytest.mark.parametrize("kind", ["gguf", "gptq"])
def test_a_file_of_another_format_says_the_same(run: Any, talker: Path, tmp_path: Path, kind: str) -> None:
    model = llama(hidden_size=64, intermediate_size=64)
    pw.quantize_(model, "q4_0", skip=["lm_head"])
    model.save_pretrained(tmp_path / "small")
    tokenizer().save_pretrained(tmp_path / "small")
    other = tmp_path / ("model.gguf" if kind == "gguf" else "gptq")
    pw.convert(tmp_path / "small", other, to=kind)
    arguments = ("--prompt", "hello", "--max-new-tokens", 10, "--dtype", "float32")
    answers = [run("generate", path, *arguments).stdout for path in (tmp_path / "small", other)]
    assert answers[0] == answers[1]
    assert len(answers[0]) > 5


def test_chat_reads_a_message_a_line(talker: Path) -> None:
    found = CliRunner().invoke(app, ["chat", str(talker), "--max-new-tokens", "10"], input="one\n\ntwo\n/new\ntwo\n")
    assert found.exit_code == 0, found.stderr
    first, second = expected(talker, "one", "two")
    assert found.stdout == "".join(f"{text}\n" for text in (first, second, *expected(talker, "two")))


def test_chat_goes_on_after_a_message_that_is_too_long(talker: Path) -> None:
    found = CliRunner().invoke(
        app, ["chat", str(talker), "--max-new-tokens", "10"], input="x" * 600 + "\nhello\n/exit\n"
    )
    assert found.exit_code == 0
    assert "tokens are too long: the model's context has 512; /new starts a new conversation" in found.stderr
    assert found.stdout == expected(talker, "hello")[0] + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--temperature", "-1"], "--temperature must be 0 or positive, got -1.0"),
        (["--top-p", "1.5"], "--top-p must be above 0 and at most 1, got 1.5"),
        (["--temperature", "0", "--top-p", "0.5"], "--top-p has no effect with --temperature 0"),
        (["--dtype", "int8"], "--dtype must be one of"),
        (["--kv-bits", "int4"], "--kv-bits must be a number from 2 to 8, or two, of keys and of values, such as 8,4"),
        (["--kv-bits", "16"], "--kv-bits must be a number from 2 to 8"),
        (["--kv-bits", "8,4,4"], "--kv-bits must be a number from 2 to 8"),
        (["--kv-bits", "4", "--int8-cache"], "--int8-cache is --kv-bits 8; pass one of them"),
        (["--raw", "--system", "x"], "--system is a message of the chat template"),
        (["--json", "nowhere/x.json"], "folder"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_options(run: Any, talker: Path, arguments: list[str], message: str) -> None:
    found = run("generate", talker, "--prompt", "x", *arguments)
    assert found.exit_code == 2
    assert message in found.stderr
    assert found.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "bits"),
    [
        ([], None), (["--int8-cache"], (8, 8)), (["--kv-bits", "8"], (8, 8)), (["--kv-bits", "4"], (4, 4)),
        (["--kv-bits", "8,4"], (8, 4)), (["--kv-bits", "8", "--int8-cache"], (8, 8)),
    ],
    ids=str,
)  # fmt: skip
def test_bits_of_the_cache(
    run: Any, talker: Path, arguments: list[str], bits: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pennyweight.inference.kv_cache import QuantizedCache

    made = []
    start = QuantizedCache.__init__

    def noted(cache: Any, *args: Any, **kwargs: Any) -> None:
        start(cache, *args, **kwargs)
        made.append(cache)

    monkeypatch.setattr(QuantizedCache, "__init__", noted)
    found = run("generate", talker, "--prompt", "x" * 200, "--max-new-tokens", 3, *arguments)
    assert found.exit_code == 0, found.stderr
    assert [(c.key_bits, c.value_bits) for c in made] == ([] if bits is None else [bits])
    for cache in made:
        assert cache.layers[0].past_keys.spec.format.bits == cache.key_bits


def test_a_chat_without_a_template_fails_before_the_weights_are_read(
    run: Any, writer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pennyweight.integrations.transformers.adapter.load_pretrained", None)
    assert "has no chat template" in run("chat", writer).stderr


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_request() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_models_that_do_not_talk(run: Any, encoder: Path, writer: Path, plain: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (("generate", encoder, "-p", "x"), "is a BertModel, which does not continue text"),
        (("chat", writer), "has no chat template; use pennyweight generate"),
        (("chat", plain), "has no config.json"),
        (("chat", tmp_path / "nothing"), "no such file or folder"),
    ):
        found = run(*arguments)
        assert (found.exit_code, found.stdout) == (2, "")
        assert message in found.stderr


def test_ctrl_c_stops_the_answer_and_not_the_chat(tmp_path: Path) -> None:
    pty = pytest.importorskip("pty")
    model = llama(max_position_embeddings=100_000)
    model.generation_config.eos_token_id = 258  # the mark of an assistant: very unlikely, so that answers are long
    with torch.no_grad():
        model.lm_head.weight[258] = 0
    talker = saved(model, tmp_path / "talker")
    main, terminal = pty.openpty()
    command = ["-m", "pennyweight", "chat", talker, "--max-new-tokens", "90000", "--no-fuse"]
    chat = forked.start(command, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    seen = ""

    def wait_for(text: str, again: Callable[[], None] | None = None) -> None:
        nonlocal seen
        end = time.monotonic() + 120
        while text not in seen:
            ready = select.select([main], [], [], 10 if again else max(0, end - time.monotonic()))[0]
            if again and not ready:
                again()
            assert ready or (again and time.monotonic() < end), f"no {text!r} in {seen!r}"
            if not ready:
                continue
            seen += os.read(main, 4096).decode(errors="replace")
        seen = seen[seen.index(text) + len(text) :]

    try:
        wait_for("> ")
        os.write(main, b"hello\n")
        wait_for("hello\r\n")
        while not seen.strip():  # a part of the answer
            seen += os.read(main, 4096).decode(errors="replace")
        chat.send_signal(signal.SIGINT)
        wait_for(", stopped")
        wait_for("> ")
        # readline waits on if a signal comes before it waits, and Python then takes two for one
        chat.send_signal(signal.SIGINT)
        wait_for("Ctrl-C again, Ctrl-D or /exit ends", again=lambda: chat.send_signal(signal.SIGINT))
        os.write(main, b"/exit\n")
        assert chat.wait(60) == 0
    finally:
        chat.kill()
        chat.wait()
        os.close(main)


def test_a_gguf_file_is_evaluated_without_a_folder(run: Any, tmp_path: Path, text: Path) -> None:
    torch.manual_seed(0)
    model = llama(hidden_size=64, intermediate_size=64)
    model.save_pretrained(tmp_path / "float")
    tokenizer().save_pretrained(tmp_path / "float")
    pw.convert(tmp_path / "float", tmp_path / "exact.gguf", to="gguf", gguf_type="f32")
    found = run("eval", tmp_path / "exact.gguf", tmp_path / "float", "--text", text, "--length", 32, "--json")
    assert found.exit_code == 0, found.stderr
    assert json.loads(found.stdout)["kl"]["mean"] < 1e-9

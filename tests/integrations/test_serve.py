"""``transformers serve`` and ``transformers chat`` on saved folders, by HTTP on this machine.

Needs what these commands need: pip install "transformers[serving]" requests
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import pennyweight as pw
from pennyweight.integrations.transformers import attach_quantizer
from tests.integrations.small import llama, tokenizer

NEEDED = ("fastapi", "uvicorn", "openai", "pydantic", "requests", "compressed_tensors")
absent = [name for name in NEEDED if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(absent), reason=f"needs {', '.join(absent)}")

TRANSFORMERS = [sys.executable, "-c", "from transformers.cli.transformers import main; main()"]
OURS = [sys.executable, "-m", "pennyweight.integrations.transformers"]
ASKED = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """Format -> folder, and what its model says."""
    out = {}
    for format in ("pennyweight", "compressed-tensors"):
        folder = tmp_path_factory.mktemp(format)
        model = llama(vocab_size=264)
        pw.quantize_(model.model, pw.Int8WeightOnlyConfig())
        attach_quantizer(model, save_as=format).save_pretrained(folder)
        tokenizer(folder)
        words = AutoTokenizer.from_pretrained(folder)
        ids = words.apply_chat_template(ASKED, return_tensors="pt", return_dict=True)["input_ids"]
        new = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
        out[format] = folder, words.decode(new[0, ids.shape[1] :], skip_special_tokens=True)
    return out


@contextmanager
def server(command: list[str], folder: Path) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """A port on which the command serves the folder, or the process that ended before it did."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    command = [*command, "serve", str(folder), "--port", str(port), "--device", "cpu"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            for _ in range(480):
                if process.poll() is not None:
                    break
                try:
                    urllib.request.urlopen(f"http://localhost:{port}/health", timeout=1).read()
                    break
                except urllib.error.URLError:
                    time.sleep(0.25)
            yield port, process
        finally:
            process.terminate()


@pytest.mark.parametrize(("command", "format"), [(TRANSFORMERS, "compressed-tensors"), (OURS, "pennyweight")])
def test_serve_and_chat(command: list[str], format: str, folders: dict[str, tuple[Path, str]]) -> None:
    folder, expected = folders[format]
    with server(command, folder) as (port, process):
        assert process.poll() is None
        body = json.dumps({"model": str(folder), "messages": ASKED, "max_tokens": 8, "temperature": 0}).encode()
        address = f"http://localhost:{port}/v1/chat/completions"
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as reply:
            said = json.loads(reply.read())["choices"][0]["message"]["content"]
        assert said == expected

        chat = [*TRANSFORMERS, "chat", str(folder), f"http://localhost:{port}", "max_new_tokens=8", "do_sample=False"]
        done = subprocess.run(chat, input="hello\n!exit\n", capture_output=True, text=True, timeout=120, check=False)
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        assert str(folder) in done.stdout


def test_serve_of_our_own_format_says_what_to_import(folders: dict[str, tuple[Path, str]]) -> None:
    with server(TRANSFORMERS, folders["pennyweight"][0]) as (_, process):
        out, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "import pennyweight before from_pretrained" in out

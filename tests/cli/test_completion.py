"""What the tab key offers, through the shells' own protocol and through a real bash."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pennyweight.cli import completion
from pennyweight.planning.config_names import CONFIGS

NO_DETECTION = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # typer's: the option then takes a shell's name


def command(*arguments: str, **env: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "pennyweight", *arguments], capture_output=True, text=True, check=False,
        env={**os.environ, **env},
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout


def offered(words: str) -> list[str]:
    """The offers of bash for the last of these words."""
    count = str(len(words.split(" ")) - 1)
    out = command(_PENNYWEIGHT_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=count)
    return out.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("pennyweight e", {"eval", "explain", "export-onnx"}),
        ("pennyweight quantize --c", {"--config", "--calibration", "--card"}),
        ("pennyweight inspect --a", {"--all", "--allow-pickle"}),
        ("pennyweight quantize a b --config int8", {"int8", "int8-dynamic", "int8-dynamic-grouped"}),
        ("pennyweight quantize a b --embeddings mx", {n for n in CONFIGS if n.startswith("mx")}),
        ("pennyweight quantize a b --algorithm g", {"gptq", "gptaq"}),
        ("pennyweight quantize a b --algorithm smooth+g", {"smooth+gptq", "smooth+gptaq"}),
        ("pennyweight quantize a b --for v", {"vllm", "vllm-gpu"}),
        ("pennyweight quantize a b --on-indivisible l", {"largest_divisor"}),
        ("pennyweight convert a b --to g", {"gguf", "gptq", "gptq_v2"}),
        ("pennyweight convert a b --for o", set()),
        ("pennyweight convert a b --type Q4_K", {"Q4_K", "Q4_K_S", "Q4_K_M"}),
        ("pennyweight convert a b --type q4_k", {"q4_k", "q4_k_s", "q4_k_m"}),
        ("pennyweight convert a b --dtype b", {"bfloat16"}),
        ("pennyweight export-onnx a b --style q", {"qdq"}),
        ("pennyweight explain a b --dtype f", {"float32", "float16"}),
        ("pennyweight inspect mod", set()),  # nothing, so that bash completes paths
    ],
)
def test_offers(words: str, expected: set[str]) -> None:
    assert set(offered(words)) == expected


def test_the_values_are_those_of_the_registries() -> None:
    from pennyweight.algorithms import ALGORITHMS
    from pennyweight.core.spec import DTYPES
    from pennyweight.io.convert_checkpoint import formats
    from pennyweight.io.gguf.export import FROM_FLOATS, wanted_type
    from pennyweight.io.gguf.mixes import MIXES
    from pennyweight.planning.engines import ENGINES

    assert list(completion.ALGORITHMS) == sorted(ALGORITHMS)
    assert formats() == completion.FORMATS
    assert set(completion.ENGINES) == ENGINES.keys()
    writable = {name for name, engine in ENGINES.items() if set(engine.formats) & set(formats())}
    assert set(completion.CONVERTED_FOR) == writable
    assert set(completion.DTYPES) == DTYPES.keys()
    assert set(completion.GGUF_TYPES) == {*MIXES, *FROM_FLOATS}
    for name in completion.GGUF_TYPES:
        wanted_type(name)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell", "pwsh"])
def test_scripts(shell: str) -> None:
    shown = command("--show-completion", shell, **NO_DETECTION)
    assert shown.strip() == command(_PENNYWEIGHT_COMPLETE=f"source_{shell}").strip()
    assert f"complete_{shell.replace('pwsh', 'powershell')}" in shown or "complete_pwsh" in shown
    assert "pennyweight" in shown


def test_zsh_and_fish_show_what_a_command_does() -> None:
    zsh = command(_PENNYWEIGHT_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="pennyweight ins")
    assert zsh.strip() == """_arguments '*: :(("inspect":"List the tensors of a checkpoint."))'"""
    paths = command(_PENNYWEIGHT_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="pennyweight inspect x")
    assert paths.strip() == "_files"
    get = {"_TYPER_COMPLETE_ARGS": "pennyweight ins", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    assert command(_PENNYWEIGHT_COMPLETE="complete_fish", **get).startswith("inspect\tList the tensors")


def test_install(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), **NO_DETECTION}
    assert "bash completion installed in" in command("--install-completion", "bash", **home)
    script = tmp_path / ".bash_completions" / "pennyweight.sh"
    assert f"source '{script}'" in (tmp_path / ".bashrc").read_text()
    assert "complete_bash" in script.read_text()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_in_a_real_bash(tmp_path: Path) -> None:
    """The installed script, with the words as bash splits them; a path where nothing is offered."""
    binary = tmp_path / "pennyweight"
    binary.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pennyweight "$@"\n')
    binary.chmod(0o755)
    (tmp_path / "model.gguf").touch()
    script = tmp_path / "completion.sh"
    script.write_text(command("--show-completion", "bash", **NO_DETECTION))
    program = """
    source completion.sh
    complete -p pennyweight
    offer() {
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
        _pennyweight_completion pennyweight "${COMP_WORDS[$COMP_CWORD]}"
        echo "${COMPREPLY[@]}"
    }
    offer pennyweight conv
    offer pennyweight quantize a b --config nv
    offer pennyweight inspect mod
    compgen -o default -F nothing mod 2>/dev/null || compgen -f mod
    """
    env: dict[str, Any] = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = subprocess.run(
        ["bash", "--norc", "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines() == [
        "complete -o default -F _pennyweight_completion pennyweight", "convert", "nvfp4 nvfp4-dynamic", "", "model.gguf"
    ]  # fmt: skip

"""The command as a process: exit codes, streams, pipes."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

import pennyweight as pw
from pennyweight.planning.quantize_report import nbytes_of
from tests import forked


def process(*arguments: Any) -> "subprocess.CompletedProcess[str]":
    return forked.run(["-m", "pennyweight", *arguments])


def test_version_and_help(run: Any) -> None:
    assert run("--version").stdout == f"pennyweight {pw.__version__}\n"
    help_text = run("--help").stdout
    for command in ("quantize", "inspect", "explain", "doctor"):
        (line,) = [line for line in help_text.splitlines() if line.strip().startswith(f"{command} ")]
        assert "..." not in line  # the summary is whole
        assert f"Usage: pennyweight {command}" in run(command, "--help").stdout


def test_as_a_process(plain: Path) -> None:
    good = process("inspect", plain)
    assert (good.returncode, good.stderr) == (0, "")
    assert f"model.safetensors: {(plain / 'model.safetensors').stat().st_size:,} bytes" in good.stdout
    bad = process("explain", plain, "blocks.0.p")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("pennyweight: the checkpoint has no tensor 'blocks.0.p' (did you mean 'blocks.0.")
    assert "Traceback" not in bad.stderr


def test_a_reader_that_goes_away_is_no_error(plain: Path) -> None:
    writer = forked.start(["-m", "pennyweight", "inspect", plain], stdout=forked.PIPE, stderr=forked.PIPE)
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.close()  # long before it is written to
    assert writer.stderr.read() == ""
    writer.stderr.close()
    assert writer.wait() == 1


@pytest.mark.parametrize(
    ("text", "size"), [("4GB", 4 * 10**9), ("1.5 GiB", 3 * 2**29), ("500_000", 500_000), ("20kb", 20_000), ("7B", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert nbytes_of(text) == size


@pytest.mark.parametrize("text", ["", "GB", "4XB", "-1GB", "1e9", "0", "0.1B", "4 G B", "__"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        nbytes_of(text)

"""The self-test of the native library on platforms where it was not run before a release."""

import json
import subprocess
from pathlib import Path

import pytest

from pennyweight.kernels.cpu import library


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "_native.so"
    path.write_bytes(b"not a library")
    return path


def answers(monkeypatch: pytest.MonkeyPatch, status: int, stdout: str) -> list[list[str]]:
    calls: list[list[str]] = []

    def run(command, **options):
        calls.append(command)
        assert options["env"]["PENNYWEIGHT_NATIVE"] == "1"
        return subprocess.CompletedProcess(command, status, stdout, "")

    monkeypatch.setattr(library.subprocess, "run", run)
    return calls


@pytest.mark.skipif(library.sys.platform != "linux", reason="the cache folder is that of Linux")
def test_the_verdict_is_kept_for_this_library(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = answers(monkeypatch, 0, json.dumps({"problems": []}))
    assert library.verdict(built) is None
    assert library.verdict(built) is None
    assert len(calls) == 1
    built.write_bytes(b"another library")
    assert library.verdict(built) is None
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("status", "stdout", "reason"),
    [(1, json.dumps({"problems": ["cpu_int: wrong"]}), "cpu_int: wrong"), (-11, "", "ended with status -11")],
    ids=["wrong numbers", "a crash"],
)
def test_a_failure_keeps_the_library_out(built: Path, monkeypatch, status: int, stdout: str, reason: str) -> None:
    answers(monkeypatch, status, stdout)
    monkeypatch.setattr(library, "LIBRARY", built)
    monkeypatch.setattr(library, "SELF_TESTED", (library.sys.platform,))
    monkeypatch.delenv("PENNYWEIGHT_NATIVE", raising=False)
    found = library.load.__wrapped__()
    assert isinstance(found, str)
    assert "fails its self-test" in found
    assert reason in found

"""scripts/release refuses what must not be released. It runs in a copy of the files that it reads, with its own git."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = "pennyweight/support/version.py"
FILES = ("scripts/release", "scripts/changelog_section.py", "pyproject.toml", "CITATION.cff", VERSION)
ORIGIN = "https://github.com/pennyweight/pennyweight.git"


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text("## [0.1.0] - 2030-01-01\n\n- first\n", "utf-8")
    git(tmp_path, "init", "-q")
    git(tmp_path, "remote", "add", "origin", ORIGIN)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "all")
    return tmp_path


def release(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PENNYWEIGHT_RELEASE_QUICK": "1", "PYTHON": sys.executable}
    command = ["bash", "scripts/release", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_a_dry_run_makes_no_tag(copy: Path) -> None:
    done = release(copy, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "dry run: v0.1.0 was not made" in done.stdout
    assert subprocess.run(["git", "tag"], cwd=copy, capture_output=True, text=True, check=True).stdout == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: (p / "new.txt").touch(), "the working tree is not clean"),
        (lambda p: git(p, "tag", "v0.1.0"), "the tag v0.1.0 exists"),
        (lambda p: git(p, "remote", "set-url", "origin", "https://example.org/x"), "pyproject.toml says"),
        (lambda p: git(p, "remote", "remove", "origin"), "origin is missing"),
    ],
    ids=["dirty", "tagged", "other origin", "no origin"],
)
def test_it_refuses(copy: Path, change, message: str) -> None:
    change(copy)
    done = release(copy, "--dry-run")
    assert done.returncode == 1
    assert message in done.stderr


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("CHANGELOG.md", "## [0.1.0] - Unreleased\n\n- first\n", "has no date"),
        ("CITATION.cff", "version: 9.9.9\n", "another version"),
    ],
)
def test_it_refuses_files_that_disagree(copy: Path, name: str, text: str, message: str) -> None:
    (copy / name).write_text(text, "utf-8")
    git(copy, "commit", "-qam", "other")
    done = release(copy, "--dry-run")
    assert done.returncode == 1
    assert message in done.stderr


def test_a_release_without_tests_is_a_dry_run_only(copy: Path) -> None:
    assert "needs --dry-run" in release(copy).stderr

"""The project description on PyPI, the versions that files repeat, and the units that setup.py compiles."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import pennyweight

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import setup  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]


def described(text: str) -> str:
    return setup.description(text, "https://example.org/a/b", "v1")


def test_relative_links_become_absolute() -> None:
    assert described("[a](docs/a.md#b)") == "[a](https://example.org/a/b/blob/v1/docs/a.md#b)"
    assert described("![p](./docs/p.svg)") == "![p](https://example.org/a/b/raw/v1/docs/p.svg)"
    assert described("[here](#results)") == "[here](https://example.org/a/b/blob/v1/README.md#results)"
    assert described("[![p](p.png)](docs/a.md)") == (
        "[![p](https://example.org/a/b/raw/v1/p.png)](https://example.org/a/b/blob/v1/docs/a.md)"
    )
    assert described('<img src="docs/p.png" width="9">') == (
        '<img src="https://example.org/a/b/raw/v1/docs/p.png" width="9">'
    )


@pytest.mark.parametrize(
    "text", ["[a](https://x.org/y)", "[m](mailto:a@b.c)", "`w[0](x)`", "```python\nf[1](x)\n```", "plain [0] (x)"]
)
def test_absolute_links_and_code_stay(text: str) -> None:
    assert described(text) == text


def test_no_relative_link_is_left_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    text = setup.description(readme, REPOSITORY, "v0")
    prose = re.sub(r"^```.*?^```|`[^`\n]+`", "", text, flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)|(?:src|srcset|href)=\"([^\"]+)", prose)
    assert targets
    assert not [t for pair in targets for t in pair if t and not t.startswith(("https://", "http://", "mailto:"))]
    assert f"{REPOSITORY}/blob/v0/docs/" in text


def test_versions_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == pennyweight.__version__
    assert citation["repository-code"] == REPOSITORY
    assert citation["license"] == PROJECT["license"]
    assert f"## [{pennyweight.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_the_cuts_of_a_version_from_the_changelog(tmp_path: Path) -> None:
    log = tmp_path / "CHANGELOG.md"
    log.write_text("# Changelog\n\n## [0.2.0] - 2030-01-02\n\n- new\n\n## [0.1.0] - Unreleased\n\n- old\n", "utf-8")

    def cut(version: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "scripts/changelog_section.py"), version, str(log)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert cut("0.2.0").stdout == "- new\n"
    assert "has no date" in cut("0.1.0").stderr
    assert "has 0 sections for 0.3.0" in cut("0.3.0").stderr


def test_every_imported_openmp_symbol_of_windows_is_one_of_clang() -> None:
    lines = (ROOT / setup.SOURCE / "libiomp5md.def").read_text("utf-8").splitlines()
    names = [line.strip() for line in lines if line.startswith("    ")]
    assert len(names) == len(set(names))
    assert all(name.startswith(("__kmpc_", "omp_get_")) for name in names)


def test_a_compiler_of_the_wrong_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(setup.PlatformError, match="was not found"):
        setup.compiler()
    monkeypatch.setattr(setup, "TARGET", "plan9-x86_64")
    monkeypatch.setattr(setup, "SYSTEM", "plan9")
    with pytest.raises(setup.PlatformError, match="not supported on plan9-x86_64"):
        setup.compiler()


def test_an_object_is_compiled_again_when_what_it_is_made_of_changes(tmp_path: Path) -> None:
    source, header, listed = (tmp_path / name for name in ("a.cpp", "a.h", "a.d"))
    source.write_text("source")
    header.write_text("header")
    listed.write_text(f"a.o: {source} \\\n {header}\n")
    key = setup._key(["g++", "-O2"], "12.2", listed)
    assert key == setup._key(["g++", "-O2"], "12.2", listed)
    others = [setup._key(["g++", "-O3"], "12.2", listed), setup._key(["g++", "-O2"], "13.1", listed)]
    header.write_text("another")
    others.append(setup._key(["g++", "-O2"], "12.2", listed))
    assert len({key, *others}) == 4
    changed = header.stat().st_mtime
    assert setup._key(["g++", "-O2"], "12.2", listed, before=changed + 1) == others[-1]
    assert setup._key(["g++", "-O2"], "12.2", listed, before=changed - 1) is None  # while the compiler ran
    header.unlink()
    assert setup._key(["g++", "-O2"], "12.2", listed) is None
    assert setup._key(["g++", "-O2"], "12.2", tmp_path / "none.d") is None

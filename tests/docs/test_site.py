"""The documentation site: what its pages must contain, and the tools that build it. scripts/docs builds it."""

import ast
import importlib
import inspect
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from site_tools import check_links, cli_page, docstrings, notebooks, page_lists, project, versions

import pennyweight as pw

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Modules whose __all__ is public, and the public names of others
MODULES = (
    "pennyweight", "pennyweight.algorithms", "pennyweight.distributed",
    "pennyweight.inference",
    "pennyweight.integrations.transformers", "pennyweight.io", "pennyweight.kernels", "pennyweight.optim",
    "pennyweight.quantize", "pennyweight.report", "pennyweight.training", "pennyweight_torchao.graph_mode",
)  # fmt: skip
OTHERS = {
    "pennyweight": ["PennyweightConfig"],
    "pennyweight.core.layouts": ["Layout", "register_layout"],
    "pennyweight.export.onnx": ["export_onnx"],
    "pennyweight.inference.kv_cache": ["QuantizedCache"],
    "pennyweight.integrations.peft": ["merge_and_report", "merged"],
    "pennyweight.integrations.vllm": ["register"],
}
_DIRECTIVE = re.compile(r"^\.\. (?:py:)?(currentmodule|autofunction|autoclass|autodata|autoexception):: (\S+)$", re.M)


def reference() -> dict[str, list[str]]:
    """Full name -> pages on which it has an entry."""
    entries: dict[str, list[str]] = {}
    for page in sorted((DOCS / "reference" / "api").glob("*.rst")):
        module = ""
        for kind, name in _DIRECTIVE.findall(page.read_text(encoding="utf-8")):
            if kind == "currentmodule":
                module = name
            else:
                entries.setdefault(f"{module}.{name}", []).append(page.stem)
    return entries


def found(name: str) -> Any:
    module, _, own = name.rpartition(".")
    return getattr(importlib.import_module(module), own)


def public() -> list[str]:
    names = [f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__]
    names += [f"{module}.{name}" for module, own in OTHERS.items() for name in own]
    return [name for name in names if not inspect.ismodule(found(name))]


REFERENCE = reference()


def navigation(page: Path) -> set[Path]:
    """The pages that the toctrees of a page list; patterns expanded."""
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(DOCS).with_suffix("").as_posix()
    entries = page_lists.below(page) if name in page_lists.BELOW else []
    for block in re.findall(r"^```\{toctree\}\n(.*?)^```$", text, re.M | re.S):
        entries += [line for line in block.splitlines() if line and not line.startswith(":")]
    for block in re.findall(r"^\.\. toctree::\n((?:[ ]+.*\n|\n)+)", text, re.M):
        entries += [line.strip() for line in block.splitlines() if line.strip() and not line.strip().startswith(":")]
    stems = [re.sub(r".*<(.*)>$", r"\1", entry) for entry in entries]
    found = {path.resolve() for stem in stems for end in (".md", ".rst") for path in page.parent.glob(stem + end)}
    return found - {page.resolve()}


def test_every_page_is_in_the_navigation() -> None:
    """Sphinx warns of others, which is an error of the build, but the build takes minutes."""
    reached, left = set(), [(DOCS / "index.md").resolve()]
    while left:
        page = left.pop()
        reached.add(page)
        left += navigation(page) - reached
    pages = {path.resolve() for end in ("md", "rst") for path in DOCS.rglob(f"*.{end}")}
    outside = ("site_tools", "notebooks", *project.REPOSITORY_ONLY)
    pages = {page for page in pages if page.relative_to(DOCS.resolve()).parts[0] not in outside}
    assert not {page for page in reached if page.relative_to(DOCS.resolve()).parts[0] in project.REPOSITORY_ONLY}
    assert pages - reached == set()


def test_lists_have_the_order_of_the_page_above() -> None:
    guides = page_lists.below(DOCS / "guides" / "index.md")
    assert guides[:2] == ["choose_scheme", "per_layer"]
    assert set(guides) == {path.stem for path in DOCS.glob("guides/*.md")} - {"index"}
    source = ["[b](tutorials/qat.md) [a](tutorials/my_dtype.md)\n\ntutorials/*\n"]
    page_lists.add(None, "tutorials", source)
    assert source[0].split("\n")[2:4] == ["tutorials/qat", "tutorials/my_dtype"]
    assert len(source[0].split("\n")) == 3 + len(list(DOCS.glob("tutorials/*.md")))


def title(page: Path) -> str:
    """The heading of a page as a reader sees it; of the file that it consists of, if it only includes one."""
    text = re.sub(r"\A---\n.*?^---\n", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    if included := re.match(r"```\{include\} (\S+)\n```", text):
        return title(page.parent / included[1])
    found = re.match(r"(.+)\n=+\n", text) if page.suffix == ".rst" else re.search(r"^# (.+)$", text, re.M)
    assert found is not None, f"{page} has no title"
    return found[1].replace("`", "")


def test_no_two_pages_have_one_title() -> None:
    """A search result, a tab and an entry of the navigation show the title only."""
    outside = {"site_tools", "notebooks", *project.REPOSITORY_ONLY}
    found = {path for end in ("md", "rst") for path in DOCS.rglob(f"*.{end}")}
    pages = sorted(path for path in found if path.relative_to(DOCS).parts[0] not in outside)
    titles = [(path.relative_to(DOCS).as_posix(), title(path)) for path in pages]
    titles += [(f"notebooks/{script.stem}", notebooks.cells(script)[0].text.split("\n")[0].removeprefix("# "))
               for script in notebooks.scripts()]  # fmt: skip
    by_title: dict[str, list[str]] = {}
    for name, text in titles:
        by_title.setdefault(text.lower(), []).append(name)
    assert {text: names for text, names in by_title.items() if len(names) > 1} == {}


def test_each_entry_of_the_reference_exists_once() -> None:
    assert {name: pages for name, pages in REFERENCE.items() if len(pages) > 1} == {}
    for name in REFERENCE:
        found(name)
    index = (DOCS / "reference" / "api" / "index.rst").read_text(encoding="utf-8")
    for pages in REFERENCE.values():
        assert f"   {pages[0]}\n" in index


def test_each_public_name_is_in_the_reference() -> None:
    """Under its own name, or as the same object under another module's."""
    objects = {id(found(name)) for name in REFERENCE}
    assert [name for name in public() if name not in REFERENCE and id(found(name)) not in objects] == []


@pytest.mark.parametrize("name", sorted(REFERENCE))
def test_each_entry_has_a_docstring(name: str) -> None:
    entry = found(name)
    if inspect.isclass(entry) or callable(entry):
        text = inspect.getdoc(entry) or ""
        assert len(text) > 20, name
        # The text that dataclasses make is no docstring
        assert not re.match(rf"{entry.__name__}\(.*\)( ->.*)?$", text.split("\n")[0]), name
    else:  # a constant: its page says what it is
        page = (DOCS / "reference" / "api" / f"{REFERENCE[name][0]}.rst").read_text(encoding="utf-8")
        own = name.rpartition(".")[2]
        assert re.search(rf"^\.\. autodata:: {own}\n(?:   :.*\n)*\n   \w.{{20,}}$", page, re.M), name


def test_every_command_and_option_is_on_the_page() -> None:
    page = cli_page.page()
    assert (DOCS / "reference" / "cli.md").read_text(encoding="utf-8").count(cli_page.MARK) == 1
    for name, command, context in cli_page.commands():
        section = re.search(rf"^## `{re.escape(name)}`$(.*?)(?=^## |\Z)", page, re.M | re.S)
        assert section is not None, name
        for parameter in command.get_params(context):
            record = parameter.get_help_record(context)
            if record is None:  # hidden
                continue
            assert f"`{record[0]}`" in section[1], (name, record[0])
            if parameter.param_type_name == "option":
                assert all(option in section[1] for option in parameter.opts), (name, parameter.opts)
                assert cli_page._text(parameter.help or "").split("\n")[0] in section[1]


def test_a_listing_in_help_becomes_code() -> None:
    assert cli_page._text("One *star*.\n\n\b\nNames:\nint8  eight\n  int4  four") == (
        "One \\*star\\*.\n\nNames:\n\n```text\nint8  eight\n  int4  four\n```"
    )


@pytest.mark.parametrize("script", notebooks.scripts(), ids=lambda p: p.stem)
def test_a_notebook_has_all_of_its_script(script: Path) -> None:
    cells = notebooks.cells(script)
    assert cells[0].text.startswith(f"# Notebook: {notebooks.title(script.stem)}\n")
    for cell in cells:
        assert cell.text.strip()
        if cell.kind == "code":
            ast.parse(cell.text)
    # Every statement of the script is in the notebook, in order; main()'s body without its function
    body = ast.parse(script.read_text(encoding="utf-8")).body[1:]
    main = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == "main")
    wanted = [
        ast.unparse(node).replace("parser.parse_args()", "parser.parse_args([])") for node in body[:-2] + main.body
    ]
    code = "\n".join(cell.text for cell in cells if cell.kind == "code")
    got = [ast.unparse(node) for node in ast.parse(code).body]
    assert [line for line in got if line != "torch.set_grad_enabled(False)"] == wanted
    assert ("torch.set_grad_enabled(False)" in got) == bool(main.decorator_list)
    # and so is every comment that begins a paragraph, as text
    told = " ".join(" ".join(cell.text for cell in cells).replace("`", "").split())
    for comment in re.findall(r"\n\n +# (.+)\n", script.read_text(encoding="utf-8")):
        assert comment.replace("`", "").strip() in told


def test_each_tutorial_has_a_notebook_or_a_reason() -> None:
    pages = {page.stem for page in (DOCS / "tutorials").glob("*.md")}
    assert {script.stem for script in notebooks.scripts()} == pages - notebooks.LEFT_OUT.keys()
    assert notebooks.LEFT_OUT.keys() <= pages
    table, listed = page_lists.notebook_table(), (DOCS / "tutorials.md").read_text(encoding="utf-8")
    for name in pages:
        assert f"(tutorials/{name}.md)" in table
        assert f"(tutorials/{name}.md)" in listed


def test_a_script_of_another_form_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebooks, "title", lambda name: name)
    script = tmp_path / "script.py"
    script.write_text('"""A script."""\n\nprint(1)\n')
    with pytest.raises(ValueError, match=r"script\.py: expected main\(\)"):
        notebooks.cells(script)
    script.write_text('"""A."""\n@cache\ndef main():\n    pass\n\nif __name__ == "__main__":\n    main()\n')
    with pytest.raises(ValueError, match="has the decorator cache"):
        notebooks.cells(script)


def test_docstrings_become_restructuredtext() -> None:
    text = (
        "Sets ``a_``; see pack_ and *args.\n\n"
        "a, b  the first,\n      and more\nlonger_name  the second\n"
        'c     one of\n      "x"   this\n      "y"   that\n\n'
        "The value of each element:\n\n    y = x * s\n\n- a list\n\n  of two\n\n>>> f(*x)\n1"
    )
    assert docstrings.convert(text.split("\n")) == [
        "Sets ``a_``; see pack\\_ and \\*args.",
        "",
        "``a``, ``b``",
        "    the first,",
        "    and more",
        "",
        "``longer_name``",
        "    the second",
        "",
        "``c``",
        "    one of",
        "",
        '    - ``"x"``: this',
        '    - ``"y"``: that',
        "",
        "",
        "The value of each element:",
        "",
        "::",
        "",
        "    y = x * s",
        "",
        "- a list",
        "",
        "  of two",
        "",
        ">>> f(*x)",
        "1",
    ]


def test_dead_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.html").write_text(
        '<h1 id="top-1">A</h1><a href="sub/b.html#here">b</a><a href="sub/b.html#gone">b</a><img src="no.svg">'
        '<a href="https://example.org/x">x</a><a href="http://bad address">y</a><a href="../out.html">z</a>'
        '<a href="#">t</a>'
    )
    (tmp_path / "sub" / "b.html").write_text('<p id="here"></p><a href="../a.html#top-1">a</a><a href="../sub/">s</a>')
    result = check_links.check(tmp_path)
    assert result.dead == [
        "a.html: sub/b.html#gone: no such anchor",
        "a.html: no.svg: no such file",
        "a.html: http://bad address: no valid address",
        "a.html: ../out.html: leads out of the site",
        "sub/b.html: ../sub/: no such file",
    ]
    assert result.external == ["http://bad address", "https://example.org/x"]
    assert result.links == 9


def test_versions() -> None:
    names = ["v0.2.0rc1", "v0.10.0", "latest", "v0.2.0", "scratch", "v1"]
    found = versions.entries(names, "/docs/")
    assert [entry["version"] for entry in found] == ["latest", "v0.10.0", "v0.2.0", "v0.2.0rc1"]
    assert [entry["version"] for entry in found if entry["preferred"]] == ["v0.10.0"]
    assert found[1] == {"name": "v0.10.0 (stable)", "version": "v0.10.0", "url": "/docs/v0.10.0/", "preferred": True}
    assert versions.entries(["latest"]) == [
        {"name": "latest", "version": "latest", "url": "/latest/", "preferred": True}
    ]


def test_a_site_lists_the_versions_that_were_built() -> None:
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        for name in ("latest", "v0.1.0"):
            (site / name).mkdir()
            (site / name / "index.html").write_text("")
        (site / "v0.2.0").mkdir()  # an interrupted build
        versions.write(site)
        assert [entry["version"] for entry in json.loads((site / "versions.json").read_text())] == ["latest", "v0.1.0"]
        assert check_links.check(site).dead == []
        assert 'href="v0.1.0/index.html"' in (site / "index.html").read_text()


def test_addresses() -> None:
    assert pw.__version__ == project.VERSION
    assert project.source_url(ROOT / "examples") == f"{project.REPOSITORY}/tree/main/examples"
    assert project.source_url(ROOT / "setup.py", "#L3") == f"{project.REPOSITORY}/blob/main/setup.py#L3"


def test_the_first_pages_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python of index.md and get_started/first_model.md, in order; not what downloads a model."""
    monkeypatch.chdir(tmp_path)
    for page in ("index.md", "get_started/first_model.md"):
        fences = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.S | re.M)
        names: dict[str, Any] = {}
        for fence in fences:
            if '"org/model"' not in fence:
                exec(fence, names)
        assert fences
        assert isinstance(names["model"][0].weight, pw.AffineQuantizedTensor)

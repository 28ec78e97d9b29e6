"""Write torchao_names.json: the public names of torchao's modules, by release.

    python make_torchao_names.py FOLDER...     # each holds an unpacked wheel (torchao/ and torchao-*.dist-info/)

Read from the sources, nothing is imported: a module's ``__all__``, or its own classes and functions without underscore.
Modules that are programs, kernels of GPUs or scripts are left out, see SKIPPED.
"""

import ast
import json
import sys
from pathlib import Path

SKIPPED = (
    "_models",
    "experimental",
    ".scripts",
    ".csrc",
    "triton",
    "cutlass",
    "test_",
    "benchmark",
    ".example",
    ".cute",
)


def names(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            try:
                return sorted(ast.literal_eval(node.value))
            except ValueError:
                break
    own = [n.name for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and not n.name.startswith("_")]
    return sorted(set(own))


out = {}
for folder in map(Path, sys.argv[1:]):
    version = next(folder.glob("torchao-*.dist-info")).name.split("-")[1].removesuffix(".dist")
    modules = {}
    for file in sorted((folder / "torchao").rglob("*.py")):
        module = (
            ".".join(file.relative_to(folder / "torchao").with_suffix("").parts).removesuffix("__init__").rstrip(".")
        )
        found = names(ast.parse(file.read_text(encoding="utf-8")))
        if found and not any(s in f".{module}" for s in SKIPPED):
            modules[module] = found
    out[version.removesuffix(".dist-info")] = modules
text = json.dumps(out, separators=(",", ":"), sort_keys=True).replace('"],"', '"],\n"').replace('},"', '},\n"')
(Path(__file__).parent / "torchao_names.json").write_text(text + "\n", encoding="utf-8")

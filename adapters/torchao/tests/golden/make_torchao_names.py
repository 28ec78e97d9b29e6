"""Write torchao_names.json, public names of torchao's modules, and torchao_signatures.json, what they are called with.

    python make_torchao_names.py FOLDER...     # each holds an unpacked wheel (torchao/ and torchao-*.dist-info/)

Read from the sources, nothing is imported: a module's ``__all__``, or its own classes and functions without underscore.
Modules that are programs, kernels of GPUs or scripts are left out, see SKIPPED. Signatures are names of arguments: of
functions, of ``__init__`` or ``__new__``, of fields of dataclasses; those that only go by name come after "*". They
are kept of the modules in SIGNED.
"""

import ast
import json
import sys
from pathlib import Path

SIGNED = ("core", "dtypes", "kernel", "prototype.mx_formats", "prototype.quantization.int4", "prototype.safetensors",
          "quantization", "testing", "utils")  # fmt: skip
UNSIGNED = ("pt2e", ".qat", "GPTQ", "smoothquant", "autoquant", "prototype.qat")
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


def arguments(node: ast.FunctionDef, bound: bool) -> list[str]:
    given = [a.arg for a in (*node.args.posonlyargs, *node.args.args)][bound:]
    by_name = [a.arg for a in node.args.kwonlyargs]
    return [*given, "*", *by_name] if by_name else given


def signature(node: ast.stmt) -> list[str] | None:
    if isinstance(node, ast.FunctionDef):
        return arguments(node, False)
    assert isinstance(node, ast.ClassDef)
    own = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
    maker = own.get("__init__") or own.get("__new__")
    if maker is not None:
        return arguments(maker, True)
    if not any("dataclass" in ast.dump(d) for d in node.decorator_list):
        return None
    fields = (n for n in node.body if isinstance(n, ast.AnnAssign) and "ClassVar" not in ast.dump(n.annotation))
    return [n.target.id for n in fields if isinstance(n.target, ast.Name)]


out, signatures = {}, {}
for folder in map(Path, sys.argv[1:]):
    version = next(folder.glob("torchao-*.dist-info")).name.split("-")[1].removesuffix(".dist")
    modules, calls = {}, {}
    for file in sorted((folder / "torchao").rglob("*.py")):
        module = (
            ".".join(file.relative_to(folder / "torchao").with_suffix("").parts).removesuffix("__init__").rstrip(".")
        )
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found = names(tree)
        if found and not any(s in f".{module}" for s in SKIPPED):
            modules[module] = found
            own = (
                n for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and not n.name.startswith("_")
            )
            if module.startswith(SIGNED) and not any(s in f".{module}" for s in UNSIGNED):
                calls[module] = {n.name: s for n in own if (s := signature(n)) is not None}
    version = version.removesuffix(".dist-info")
    out[version], signatures[version] = modules, {m: c for m, c in calls.items() if c}


def write(name: str, data: object) -> None:
    text = json.dumps(data, separators=(",", ":"), sort_keys=True).replace('"],"', '"],\n"').replace('},"', '},\n"')
    (Path(__file__).parent / name).write_text(text + "\n", encoding="utf-8")


write("torchao_names.json", out)
write("torchao_signatures.json", signatures)

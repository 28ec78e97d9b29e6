"""What the library allocates does not depend on torch's default dtype and device: every factory call names both.

``torch.tensor`` takes its dtype from its numbers, so for integers the device is enough; floats are seen here as such
where they are written as such.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pennyweight

PACKAGE = Path(pennyweight.__file__).parent
# What prints, draws or measures may follow the defaults that its caller has.
FOLLOWS = {"cli", "report"}
FACTORIES = {
    "arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn",
    "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip


def calls() -> Iterator[tuple[str, str, set[str | None]]]:
    """(place, function, names of the arguments given by name) of every factory call."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE)
        if name.parts[0] in FOLLOWS:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES
                and isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            ):  # fmt: skip
                yield f"{name}:{node.lineno}", node.func.attr, {k.arg for k in node.keywords}


def test_every_factory_names_its_device_and_dtype() -> None:
    found = list(calls())
    wrong = [
        f"torch.{function} at {place}"
        for place, function, given in found
        if None not in given and ("device" not in given or ("dtype" not in given and function != "tensor"))
    ]
    assert wrong == []
    assert len(found) > 150

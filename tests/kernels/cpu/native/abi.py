"""Makes pennyweight/kernels/cpu/abi.py from src/abi.h: constants, structures, exported functions.

    python -m tests.kernels.cpu.native.abi    after a change of src/abi.h

The reader is strict: a declaration that it does not know raises ValueError.
"""

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
HEADER, MODULE = ROOT / "pennyweight/kernels/cpu/src/abi.h", ROOT / "pennyweight/kernels/cpu/abi.py"
TYPES = {
    "int": "c_int", "float": "c_float", "int32_t": "c_int32", "uint32_t": "c_uint32", "int64_t": "c_int64",
}  # fmt: skip
START = '''"""Constants, structures and exported functions of the native library, with the names of src/abi.h.

Made from src/abi.h by `python -m tests.kernels.cpu.native.abi`; do not edit. Pointers are plain addresses: the caller
keeps what they point to.
"""

# fmt: off
from collections.abc import Iterator
from ctypes import Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from typing import Any


def _f(kind: Any, names: str) -> Iterator[tuple[str, Any]]:
    for name in names.split():
        yield name, kind

'''
LETTERS = {"int": "_I", "int64_t": "_N"}
SIGNATURES = (
    "_P, _N, _I = c_void_p, c_int64, c_int",
    "SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {  # name: (result, arguments)",
)


def pieces(text: str) -> Iterator[tuple[str, str]]:
    """(what, text) of each declaration: number, enum, struct, table, function."""
    text = re.sub(r"//.*", "", text)
    text = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    patterns = {
        "number": r"constexpr int(?:64_t)? (\w+ = [^;{]+);",
        "enum": r"enum (\w+ : int32_t \{[^}]*)\};",
        "struct": r"struct (\w+ \{[^}]*)\};",
        "table": r"constexpr (GgufBlock GGUF_BLOCKS\[\] = \{.*?\n)\};",
        "function": r"PW_EXPORT ([^;{]+);",
        "inline": r"constexpr \w+ (\w+\(.*?\n)\}",
    }
    at = re.compile("|".join(rf"(?P<{name}>{p})" for name, p in patterns.items()), re.DOTALL)
    end = 0
    for match in at.finditer(text):
        if (between := text[end : match.start()].strip()) not in ("", 'extern "C" {'):
            raise ValueError(f"abi.h: not understood: {between}")
        what, end = str(match.lastgroup), match.end()
        found = re.fullmatch(patterns[what], match.group(), re.DOTALL)
        assert found
        yield what, " ".join(found[1].split())
    if text[end:].strip(" \n}"):
        raise ValueError(f"abi.h: not understood: {text[end:]}")


def lines(items: list[str], indent: int) -> list[str]:
    """The items, separated by commas, in lines of at most 120 columns."""
    found = [" " * indent]
    for item in items:
        if len(found[-1]) + len(item) > 118:
            found.append(" " * indent)
        found[-1] += f"{item}, "
    return [line.rstrip() for line in found]


def constants(text: str) -> list[str]:
    """Kind : int32_t { NONE = 0, F32 = 1 -> NONE, F32 = range(2)"""
    name, _, body = text.partition(" : int32_t { ")
    pairs = [item.split(" = ") for item in body.strip(" ,").split(", ")]
    names, values = [n for n, _ in pairs], [int(v) for _, v in pairs]
    if values == [*range(len(values))]:
        return [f"{', '.join(names)} = range({len(values)})  # {name}"]
    return [
        f"{', '.join(names[i : i + 6])} = {', '.join(map(str, values[i : i + 6]))}  # {name}"
        for i in range(0, len(names), 6)
    ]


def fields(text: str, structures: set[str]) -> list[tuple[str, str]]:
    """(name, ctypes type) of each field."""
    found = []
    for declaration in filter(None, map(str.strip, text.split(";"))):
        kind, stars, names = re.fullmatch(r"(?:const )?(\w+)((?:\* ?(?:const ?)?)*) ?(.+)", declaration).groups()  # type: ignore[union-attr]
        for declared in map(str.strip, names.split(",")):
            match = re.fullmatch(r"(\*?)(\w+)(?:\[(\d)\])?", declared)
            if match is None or not (stars or match[1] or kind in TYPES or kind in structures):
                raise ValueError(f"abi.h: not understood: {declaration}")
            pointer = "c_char_p" if kind == "char" else "c_void_p"
            one = pointer if stars or match[1] else TYPES.get(kind, kind)
            found.append((match[2], f"{one} * {match[3]}" if match[3] else one))
    return found


def structure(text: str, structures: set[str]) -> list[str]:
    name, _, body = text.partition(" { ")
    groups = [
        f"*_f({kind}, {chr(34)}{' '.join(n for n, _ in same)}{chr(34)})"
        for kind, same in groupby(fields(body, structures), key=lambda field: field[1])
    ]
    structures.add(name)
    one = f"    _fields_ = ({', '.join(groups)},)"
    whole = [one] if len(one) <= 120 else ["    _fields_ = (", *lines(groups, 8), "    )"]
    return ["", "", f"class {name}(Structure):", *whole]


def function(text: str) -> list[str]:
    """int pw_finite(const void* x, int kind, int64_t n, int threads) -> its entry in SIGNATURES."""
    result, name, arguments = re.fullmatch(r"(.+?)(pw_\w+)\((.*)\)", text).groups()  # type: ignore[union-attr]

    def kind(declared: str) -> str:
        if "*" in declared:
            return "c_char_p" if "char" in declared else "_P"
        return LETTERS.get(declared.split(maxsplit=1)[0]) or TYPES[declared.split(maxsplit=1)[0]]

    kinds = [kind(a) for a in arguments.split(",")] if arguments else []
    return [f'    "{name}": ({kind(result)}, ({", ".join(kinds)}{"," * (len(kinds) == 1)})),']


def module(header: str) -> str:
    """The Python text."""
    structures: set[str] = set()
    numbers: list[str] = []
    classes: list[str] = []
    functions: list[str] = []
    for what, text in pieces(header):
        if what == "number":
            numbers.append(text)
        elif what == "enum":
            numbers += constants(text)
        elif what == "struct" and not text.startswith("GgufBlock"):  # of a table
            classes += structure(text, structures)
        elif what == "function":
            functions += function(text)
        elif what == "table":
            rows = re.findall(r"\{(\w+), (\d+), (\d+), (\d+), (\d)\}", text)
            body = lines(
                [f"{kind}: ({elements}, {size}, {bits}, {made})" for kind, elements, size, bits, made in rows], 4
            )
            numbers += ["GGUF_BLOCKS = {  # (elements, bytes, bits of a code, made) of a block", *body, "}"]
    return "\n".join([START, *numbers, *classes, "", "", *SIGNATURES, *functions, "}", ""])


if __name__ == "__main__":
    MODULE.write_text(module(HEADER.read_text("utf-8")), "utf-8")

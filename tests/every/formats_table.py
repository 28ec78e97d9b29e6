"""The tables of docs/formats.md, from the registries.

python -m tests.every.formats_table             # write them into docs/formats.md
"""

from __future__ import annotations

from pathlib import Path

import torch

from pennyweight.core.convert_spec import conversion_kind
from pennyweight.core.formats import E2M1, E4M3, INT4, INT8, NF4, UINT4
from pennyweight.core.spec import (
    FP8_BLOCK,
    FP8_ROW,
    INT8_ROW,
    MXFP4,
    MXFP8,
    NF4_DOUBLE,
    NVFP4,
    SPECS,
    TINYGEMM,
    ActivationSpec,
    QuantSpec,
)
from pennyweight.io.codecs import CODECS
from pennyweight.io.gguf.blocks import TYPES
from pennyweight.io.gguf.export import planned_as
from pennyweight.io.gguf.quantize import RULES
from pennyweight.io.lazy_checkpoint import StoredTensor
from pennyweight.io.manifest import Meta
from pennyweight.io.output_formats import EXACT, FLOAT, foreign_target

DOC = Path(__file__).resolve().parents[2] / "docs" / "formats.md"
SHAPE = (256, 512)
F16 = torch.float16
# (what users call it, spec, activation)
WEIGHTS: list[tuple[str, QuantSpec, ActivationSpec | None]] = [
    ("int8 per row", INT8_ROW, None),
    ("int8 per row, int8 inputs", INT8_ROW, ActivationSpec(INT8_ROW)),
    ("int8 in groups of 32, f16 scales", QuantSpec(INT8, (32,), scale=F16), None),
    ("int4 in groups of 32, f16 scales", QuantSpec(INT4, (32,), scale=F16), None),
    ("int4 in groups of 128, f32 scales", QuantSpec(INT4, (128,)), None),
    ("uint4 in groups of 128, zero points", QuantSpec(UINT4, (128,), scale=F16, zero_point=True), None),
    ("uint4 in groups of 128, offsets (tinygemm)", TINYGEMM, None),
    ("float8 per row", FP8_ROW, None),
    ("float8 per row, float8 inputs", FP8_ROW, ActivationSpec(QuantSpec(E4M3, (-1,)))),
    ("float8 in blocks of 128×128", FP8_BLOCK, None),
    ("MXFP8", MXFP8, None),
    ("MXFP4", MXFP4, None),
    ("NVFP4", NVFP4, None),
    ("e2m1 in groups of 32, f32 scales", QuantSpec(E2M1, (32,)), None),
    ("NF4 in blocks of 64", QuantSpec(NF4, (64,)), None),
    ("NF4, scales quantized again", NF4_DOUBLE, None),
    ("GGUF Q4_K", SPECS["q4_k"], None),
    ("GGUF Q6_K", SPECS["q6_k"], None),
]


def formats() -> str:
    """What is read and written, and what its values are compared with."""
    rows = [
        ("`pennyweight`", "docs/format.md", "yes", "yes", "golden files, an independent numpy reader"),
        ("`float`", "safetensors", "yes", "yes", "safetensors 0.8"),
        ("`gguf`", "one file, or `-00001-of-0000N` parts", "24 quantized types", f"{len(written())} types",
         "gguf 0.19, ggml (pywhispercpp 1.5), llama.cpp (llama-cpp-python 0.3.36), transformers 5.23"),
        *((f"`{c.name}`", "safetensors", "yes", "yes" if c.writing else "no", c.oracle) for c in CODECS),
        ("`torchao`", "safetensors, 0.14 and later", "yes", "by `pennyweight_torchao`", "torchao 0.18"),
        ("`torch`", "`.pt`, `.bin`, by `allow_pickle=True`", "yes", "no", "torchao 0.9, 0.12, 0.18"),
    ]  # fmt: skip
    head = "| format | files | read | written | compared with |\n|---|---|---|---|---|\n"
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def written() -> list[str]:
    return [t.name for t in TYPES.values() if not t.plain and t.writable]


def becomes() -> str:
    """What each kind of weight becomes in each format."""
    targets = {c.name: foreign_target(c.name, c.writing) for c in CODECS if c.writing is not None}
    names = [*targets, "gguf"]
    out = f"| weight [256, 512] | {' | '.join(names)} |\n|---|{'---|' * len(names)}\n"
    for word, spec, act in WEIGHTS:
        held = StoredTensor(Meta(spec, SHAPE, torch.float16, act), 0, lambda: torch.empty(0))
        cells = []
        for target in targets.values():
            choice = target.choose("m.up.weight", held)
            if choice.how == EXACT:
                cells.append("exact")
            elif choice.how == FLOAT:
                cells.append("–")
            else:
                assert isinstance(choice.kind, Meta)
                said = conversion_kind(spec, SHAPE, choice.kind.spec)
                inputs = ", float inputs" if choice.kind.act is None and act is not None else ""
                cells.append(
                    (f"requantized: {choice.kind.spec}" if said is None else said.replace("rounded", "codes")) + inputs
                )
        planned = planned_as("blk.0.ffn_up.weight", "m.up.weight", held, None)
        how = "exact" if planned.note == "exact" else "codes" if "scales rounded" in planned.note else "requantized"
        cells.append(f"{how}: {planned.type.name}" if act is None else f"{how}: {planned.type.name}, float inputs")
        out += f"| {word} | {' | '.join(cells)} |\n"
    return out


def types() -> str:
    """GGUF's types."""
    out = "| type | bits | spec | written | floats to it |\n|---|---|---|---|---|\n"
    for t in TYPES.values():
        if not t.plain:
            how = ("by search" if t.name.startswith("IQ4") or "_K" in t.name else "yes") if t.name in RULES else "no"
            out += (
                f"| {t.name} | {8 * t.nbytes / t.elements:g} | `{t.spec}` | {'yes' if t.writable else 'no'} | {how} |\n"
            )
    return out


TABLES = {"formats": formats, "becomes": becomes, "types": types}


def filled(text: str) -> str:
    """The page with its tables generated."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        head, rest = text.split(begin)
        text = head + begin + make() + end + rest.split(end)[1]
    return text


if __name__ == "__main__":
    DOC.write_text(filled(DOC.read_text(encoding="utf-8")), encoding="utf-8")

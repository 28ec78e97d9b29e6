"""``pennyweight explain``: describes one tensor of a checkpoint and the kernels that can run it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .completion import INPUT_DTYPES
from .options import InputDtype, Json, Op, Traceback
from .output import check_report_path, report_errors, show

if TYPE_CHECKING:
    import torch

    from ..core.formats import Format
    from ..core.spec import ActivationSpec, QuantSpec
    from ..io import Opened


EPILOG = """Examples:
  pennyweight explain OUT_DIR model.layers.0.mlp.down_proj
  pennyweight explain OUT_DIR lm_head --dtype bfloat16"""


@report_errors
def explain(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A folder with a quantized checkpoint, one file of it, or a Hub id.")
    ],
    layer: Annotated[
        str, typer.Argument(metavar="LAYER", help="The name of a parameter, or of a module with a weight.")
    ],
    dtype: InputDtype = "",
    op: Op = "",
    json_path: Json = "",
    traceback: Traceback = False,
) -> None:
    """Explain how one tensor is stored and which kernel runs it.

    Prints the storage in words, its bytes, and for each kernel RUNS or why it was rejected.
    """
    check_report_path(json_path, None)
    from ..io import local_path, open

    if dtype and dtype not in INPUT_DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(INPUT_DTYPES)}, got {dtype!r}")
    with open(local_path(path)) as checkpoint:
        data, text = explanation(checkpoint, layer, (dtype,) if dtype else INPUT_DTYPES[:2], op)
    show(data, lambda: text, json_path)


def explanation(checkpoint: Opened, layer: str, dtypes: tuple[str, ...], op: str = "") -> tuple[dict[str, Any], str]:
    """The explanation as data and as text. Raises ValueError for an unknown name, with similar names."""
    import torch

    from ..kernels import Case, explain_case, kernels
    from ..kernels.table import op_of
    from .inspect import contents_of

    found = {t.name: t for t in contents_of(checkpoint).tensors}
    aliases = {alias: t.name for t in found.values() for alias in t.tied}
    name = _resolve(layer, found.keys() | aliases.keys())
    stored = found[aliases.get(name, name)]
    lines = [f"{name} {list(stored.shape)}" + (f", tied to {stored.name}" if name in aliases else "")]
    size = item(
        "bytes",
        f"{stored.bytes:,}" + (f", {8 * stored.bytes / stored.numel:.3f} bits per weight" if stored.numel else ""),
    )
    meta = checkpoint.held[stored.name].meta
    data: dict[str, Any] = {
        "version": 1, "name": name, "tied_to": stored.name if name in aliases else None, "shape": list(stored.shape),
        "dtype": stored.dtype, "scheme": stored.scheme, "bytes": stored.bytes, "op": None, "inputs": [],
    }  # fmt: skip
    if meta is None:
        lines += [item("stored as", f"{stored.dtype}: not quantized, so torch's operators run"), size]
        return data, "\n".join(lines)
    lines += [
        item("stored as", f"{stored.scheme}, dequantizes to {stored.dtype}"),
        size,
        describe(meta.spec, meta.stored_shape, meta.act),
    ]
    op = op or op_of(meta.spec, meta.stored_shape)
    known = sorted({k.op for k in kernels()})
    if op not in known:
        from ..support.arguments import did_you_mean

        raise ValueError(f"no kernels for op {op!r}{did_you_mean(op, known)}; available ops: {', '.join(known)}")
    if meta.axes is not None:
        lines.append(item("axes", f"stored as {list(meta.stored_shape)}, the contracted axis last"))
    data["op"] = op
    for dtype in dtypes:
        case = Case(meta.spec, meta.act, meta.stored_shape, getattr(torch, dtype), "cpu")
        # any layout: files have none; a weight is packed for its kernel when it is loaded
        verdicts = explain_case(op, case, any_layout=True)
        lines += ["", str(verdicts)]
        kernels_here = [{"kernel": name, "rank": rank, "verdict": verdict} for name, rank, verdict in verdicts.rows]
        data["inputs"].append({"dtype": dtype, "row_independent": verdicts.row_independent, "kernels": kernels_here})
    return data, "\n".join(lines)


def _resolve(layer: str, known: set[str]) -> str:
    for name in (layer, f"{layer}.weight"):
        if name in known:
            return name
    modules = {name.rpartition(".")[0] for name in known} - {""}
    inside = sorted(n for n in known if n.startswith(f"{layer}."))
    if inside:
        raise ValueError(f"{layer} contains {len(inside)} tensors; pass one of them: {', '.join(inside[:6])}")
    from ..support.arguments import did_you_mean

    raise ValueError(f"the checkpoint has no tensor {layer!r}{did_you_mean(layer, sorted(known | modules))}")


# -- a QuantSpec in words ----------------------------------------------------------------------------------------------


def item(name: str, text: str) -> str:
    """One line of the description."""
    return f"{name:<14}{text}"


def describe(spec: QuantSpec, shape: tuple[int, ...], act: ActivationSpec | None = None) -> str:
    """Lines that describe how a tensor of that stored shape is stored and dequantized."""
    from ..core import blocks

    lines = [item("codes", codes(spec.format)), *_parts(spec, shape, "")]
    lines.append(item("value", formula(spec)))
    padded, n = blocks.padded(spec.block, shape), shape
    if padded != n:
        lines.append(item("padding", f"{list(n)} is stored as {list(padded)}, whole blocks"))
    if act is None:
        lines.append(item("input", "not quantized"))
    else:
        how = "at each call" if act.mode == "dynamic" else "with a scale stored with the weight"
        part = a_part(act.spec, None, "scale")
        lines.append(item("input", f"quantized {how} to {act.spec.format.name}, {part}"))
    return "\n".join(lines)


def codes(fmt: Format) -> str:
    """The codes of a format."""
    if fmt.kind == "int":
        return f"{fmt.name}: {fmt.bits}-bit integers {fmt.lo:g} to {fmt.hi:g}"
    if fmt.kind == "learned":
        every = "each" if fmt.dim == 1 else f"for {fmt.dim} neighbours of a row"
        return f"{fmt.name}: {fmt.bits}-bit indices, one {every}, into the tensor's own table of {1 << fmt.bits}"
    if fmt.kind == "table":
        return f"{fmt.name}: {fmt.bits}-bit indices into a table of {len(fmt.values)} numbers"
    return f"{fmt.name}: {fmt.bits}-bit floats, largest {fmt.hi:g}"


def formula(spec: QuantSpec) -> str:
    """The formula of a dequantized element."""
    code = "code" if spec.format.kind == "int" else "number(code)"
    terms = [code, *([str(spec.mid)] if spec.mid else []), *(["zero_point"] if spec.zero_point else [])]
    text = terms[0] if len(terms) == 1 else f"({' - '.join(terms)})"
    text += "" if spec.scale is None else " * scale"
    return text + (" + offset" if spec.offset is not None else "")


def _parts(spec: QuantSpec, shape: tuple[int, ...], owner: str) -> Iterator[str]:
    from ..core import blocks
    from ..core.spec import QuantSpec

    for name, kind in spec.part_specs().items():
        yield item(owner + name, a_part(spec, shape, name, f"{owner[:-1]}s" if owner else "elements"))
        if isinstance(kind, QuantSpec):
            yield from _parts(kind, blocks.counts(spec.block, shape), f"{name}.")


def a_part(spec: QuantSpec, shape: tuple[int, ...] | None, name: str, things: str = "elements") -> str:
    """One part: its storage type and the block it applies to. shape None: of an input, whose shape is unknown."""
    from ..core.spec import QuantSpec

    kind = spec.part_specs().get(name)
    if kind is None:
        return f"no {name}"
    stored = kind.format.name if isinstance(kind, QuantSpec) else _dtype(kind)
    return f"one {stored} for {_block(spec.block, shape, things)}"


def _block(block: tuple[int, ...] | None, shape: tuple[int, ...] | None, things: str) -> str:
    from ..core import blocks

    if block is None:
        return "the whole tensor"
    if shape is None:
        if len(block) == 1:
            return "each row (token)" if block == (-1,) else f"each {block[0]} consecutive {things} of a row (token)"
        return f"each block of {'×'.join('all' if b == -1 else str(b) for b in block)}"
    sizes = blocks.resolve(block, shape)
    if any(n > 1 for n in sizes[:-1]):
        return f"each block of {'×'.join(map(str, sizes))} {things}"
    if sizes[-1] == shape[-1]:
        return f"each row of {sizes[-1]} {things}"
    return f"each {sizes[-1]} consecutive {things} of a row" if sizes[-1] > 1 else f"each of the {things}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

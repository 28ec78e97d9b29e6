"""``pennyweight explain``: describes one tensor of a checkpoint and the kernels that can run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .aliases import close_to
from .errors import Traceback, report_errors

if TYPE_CHECKING:
    from ..io import Opened

DTYPES = ("float32", "bfloat16", "float16")
_OP_OF_RANK = {2: "linear", 3: "bmm", 4: "convolution", 5: "convolution"}


@report_errors
def explain(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A folder with a quantized checkpoint, or one file of it.")
    ],
    layer: Annotated[
        str, typer.Argument(metavar="LAYER", help="The name of a parameter, or of a module with a weight.")
    ],
    dtype: Annotated[str, typer.Option(help=f"Input dtype: {', '.join(DTYPES)}. Default: the first two.")] = "",
    op: Annotated[str, typer.Option(help="The op that reads the weight; default by its number of axes.")] = "",
    traceback: Traceback = False,
) -> None:
    """Explain how one tensor is stored and which kernel runs it.

    Prints the storage in words, its bytes, and for each kernel RUNS or why it was rejected.
    """
    from ..io import open

    if dtype and dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    with open(path) as checkpoint:
        typer.echo(text(checkpoint, layer, (dtype,) if dtype else DTYPES[:2], op))


def text(checkpoint: Opened, layer: str, dtypes: tuple[str, ...], op: str = "") -> str:
    """The explanation. Raises ValueError for an unknown name, with similar names."""
    import torch

    from ..kernels import Case, explain_case, kernels
    from .checkpoint_contents import contents_of
    from .spec_prose import describe, item

    found = {t.name: t for t in contents_of(checkpoint).tensors}
    aliases = {alias: t.name for t in found.values() for alias in t.tied}
    name = _resolve(layer, found.keys() | aliases.keys())
    held = found[aliases.get(name, name)]
    lines = [f"{name} {list(held.shape)}" + (f", tied to {held.name}" if name in aliases else "")]
    size = item(
        "bytes", f"{held.bytes:,}" + (f", {8 * held.bytes / held.numel:.3f} bits per weight" if held.numel else "")
    )
    meta = checkpoint.held[held.name].meta
    if meta is None:
        return "\n".join([*lines, item("stored as", f"{held.dtype}: not quantized, so torch's operators run"), size])
    lines += [
        item("stored as", f"{held.scheme}, dequantizes to {held.dtype}"),
        size,
        describe(meta.spec, meta.stored_shape, meta.act),
    ]
    op = op or _OP_OF_RANK.get(len(meta.shape), "linear")
    known = sorted({k.op for k in kernels()})
    if op not in known:
        raise ValueError(f"no kernels for op {op!r}{close_to(op, known)}; available ops: {', '.join(known)}")
    if meta.axes is not None:
        lines.append(item("axes", f"stored as {list(meta.stored_shape)}, the contracted axis last"))
    for dtype in dtypes:
        case = Case(meta.spec, meta.act, meta.stored_shape, getattr(torch, dtype), "cpu")
        # any layout: files have none; a weight is packed for its kernel when it is loaded
        lines += ["", str(explain_case(op, case, any_layout=True))]
    return "\n".join(lines)


def _resolve(layer: str, known: set[str]) -> str:
    for name in (layer, f"{layer}.weight"):
        if name in known:
            return name
    modules = {name.rpartition(".")[0] for name in known} - {""}
    inside = sorted(n for n in known if n.startswith(f"{layer}."))
    if inside:
        raise ValueError(f"{layer} contains {len(inside)} tensors; pass one of them: {', '.join(inside[:6])}")
    raise ValueError(f"the checkpoint has no tensor {layer!r}{close_to(layer, sorted(known | modules))}")

"""export_onnx: exports a quantized model, with its stored codes, as an ONNX file for onnxruntime."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import re
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.model_arguments import check_arguments
from ..io.atomic_write import folder_lock, partial_path, rename_into_place, sync_folder
from ..planning.quantize_report import Report, Row
from ..support import extras
from ..support.progress import Progress, step
from . import codes_2d, onnx_patterns
from .graph import Nodes
from .graph_capture import DOMAIN, Captured, Weight, capture, translations

INLINE = 1_900_000_000  # bytes of weights in one file; the limit of protobuf is 2 GiB, the rest is for the graph
OPSET = 21  # the first with 4-bit types and blockwise DequantizeLinear
# Target engine, written into the file's metadata: other engines may read it, but may round differently
ENGINES = {"auto": "onnxruntime", "matmulnbits": "onnxruntime", "qdq": "any of opset 21; onnxruntime unoptimized"}
_TABLE = {"linear": "linear", "embedding": "embedding", "values": "values", "input": "convolution"}


@dataclass(repr=False)
class OnnxReport(Report):
    """Rows of every parameter; ``kernel`` is its ONNX pattern, ``bytes_after`` its size in the file.

    files    paths written, the ONNX file first
    inputs   names in the order of the arguments; outputs: names of the model's outputs
    """

    verb: str = "exported quantized"
    files: list[str] = field(default_factory=list)
    opset: int = OPSET
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        more = {"files": self.files, "opset": self.opset, "inputs": self.inputs, "outputs": self.outputs}
        return {**super().to_dict(), **more}


@check_arguments()
def export_onnx(
    model: nn.Module,
    args: tuple[Any, ...],
    path: str | os.PathLike[str],
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_batch: bool = True,
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    style: str = "auto",
    opset: int = OPSET,
    accuracy_level: int = 1,
    allow_float: bool = False,
    max_inline_bytes: int = INLINE,
    progress: Progress = None,
) -> OnnxReport:
    """Write ``model`` as ONNX and return a report. docs/export_onnx.md lists the patterns and tolerances.

    args, kwargs    sample inputs on the CPU: they determine the shapes, except dynamic axes
    dynamic_batch   whether axis 0 of every input is dynamic; its size must be the same for all inputs
    dynamic_shapes  as for torch.export: {axis: Dim} for each argument, or {axis: "name"} for an axis as dynamic as the
                    model allows; overrides dynamic_batch
    style           "auto"; "matmulnbits": weights stay packed in memory wherever that op supports them; "qdq": standard
                    QuantizeLinear and DequantizeLinear, for other runtimes
    accuracy_level  of MatMulNBits: 1 is float32, 4 lets onnxruntime round inputs to int8, for speed
    allow_float     write weights without a pattern as float32 instead of raising
    max_inline_bytes  above this size weights go to a second file, PATH.data
    progress        a bar after two seconds by default; False: none; or a function, called with (done, total, name)

    The model is not modified, and is run in eval mode. A file at ``path`` is replaced atomically. Raises ValueError
    naming the layer if something cannot be exported, and for a model that is not float32: ``model.float()`` converts it
    and keeps the codes and scales of its quantized weights.
    """
    require_packages()
    _check(model, style, opset, accuracy_level)
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise ValueError(f"{os.fspath(path)}: there is no folder {folder}")
    kwargs = dict(kwargs or {})
    if dynamic_shapes is None and dynamic_batch:
        args, kwargs, dynamic_shapes = _free_batch(args, kwargs)
    free, names = _axes(dynamic_shapes, len(args), list(kwargs))
    with step("export_onnx", progress) as advance, _evaluating(model), _quietly():
        advance(0, 3, "capturing the graph")
        captured = capture(model, args, kwargs, free)
        cases = [_case(w, style, accuracy_level) for w in captured.weights]
        chosen = [_forms(w, case, allow_float) for w, case in zip(captured.weights, cases, strict=True)]
        advance(1, 3, "translating")
        program = torch.onnx.export(
            captured.program, (), dynamo=True, opset_version=opset, verbose=False, input_names=input_names,
            output_names=output_names, custom_translation_table=translations(),
        )  # fmt: skip
        assert program is not None
        made = _replace_markers(program.model, cases, chosen, style)
        _name_axes(program.model, names)
        advance(2, 3, "writing")
        files = save(program.model, os.fspath(path), max_inline_bytes)
    graph = program.model.graph
    return OnnxReport(
        f"export_onnx(style={style!r})", _report_rows(captured, chosen, made, model), files=files, opset=opset,
        inputs=[v.name or "" for v in graph.inputs], outputs=[v.name or "" for v in graph.outputs],
    )  # fmt: skip


def require_packages() -> None:
    """Raise ImportError, with the remedy, if a dependency of torch's exporter is not installed."""
    missing = [name for name in ("onnx", "onnxscript", "onnx_ir") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"export to ONNX needs {', '.join(missing)}: {extras.install('onnx')}", name=missing[0])


# -- before ----------------------------------------------------------------------------------------------------------


def _check(model: nn.Module, style: str, opset: int, accuracy_level: int) -> None:
    if style not in onnx_patterns.STYLES:
        raise ValueError(f"style must be one of {', '.join(onnx_patterns.STYLES)}, got {style!r}")
    if opset < OPSET:
        raise ValueError(f"opset must be at least {OPSET}, the first with 4-bit types, got {opset}")
    if accuracy_level not in range(5):
        raise ValueError(f"accuracy_level must be 0 to 4, as in MatMulNBits, got {accuracy_level}")
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if tensor.is_floating_point() and tensor.dtype is not torch.float32:
            raise ValueError(
                f"{name} is {str(tensor.dtype).removeprefix('torch.')}; onnxruntime's CPU computes in float32. "
                "model.float() converts it, and keeps the codes and scales of quantized weights"
            )
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}; move the model to the CPU first")


def _free_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Inputs and shapes with axis 0 of every tensor dynamic. A single row is doubled: torch treats 1 as a constant."""
    given = {**{f"argument {i}": a for i, a in enumerate(args)}, **kwargs}
    sizes = {name: (a.shape[0] if a.ndim else None) for name, a in given.items() if isinstance(a, Tensor)}
    if len(sizes) != len(given) or len(set(sizes.values())) != 1 or None in sizes.values():
        raise ValueError(
            f"dynamic_batch=True needs tensors with equal sizes of axis 0, got {sizes or given}; pass dynamic_shapes, "
            "or dynamic_batch=False for fixed shapes"
        )
    if set(sizes.values()) == {1}:
        args = tuple(torch.cat([a, a]) for a in args)
        kwargs = {k: torch.cat([a, a]) for k, a in kwargs.items()}
    shapes: Any = tuple({0: "batch"} for _ in args)
    return args, kwargs, {k: {0: "batch"} for k in kwargs} if not args else (*shapes, *({0: "batch"} for _ in kwargs))


def _axes(shapes: Any, n_args: int, names: list[str]) -> tuple[Any, list[dict[int, str]]]:
    """Dynamic shapes for torch.export, and the names of the axes of each input if known."""
    if shapes is None:
        return None, []
    entries = [shapes[n] for n in names] if isinstance(shapes, Mapping) and n_args == 0 else None
    if entries is None:
        entries = list(shapes.values()) if isinstance(shapes, Mapping) else list(shapes)
    called, free = [], []
    for entry in entries:
        axes = dict(entry) if isinstance(entry, Mapping) else dict(enumerate(entry or ()))
        flat = all(isinstance(axis, int) for axis in axes)
        called.append(
            {a: d if isinstance(d, str) else d.__name__ for a, d in axes.items() if _named(d)} if flat else {}
        )
        free.append(
            {a: torch.export.Dim.DYNAMIC if isinstance(d, str) else d for a, d in axes.items()} if flat else entry
        )
    return (dict(zip(shapes, free, strict=True)) if isinstance(shapes, Mapping) else tuple(free)), called


def _named(dim: Any) -> bool:
    return isinstance(dim, str) or isinstance(getattr(dim, "__name__", None), str)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [m for m in model.modules() if m.training]
    for m in training:
        m.training = False
    try:
        yield
    finally:
        for m in training:
            m.training = True


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Silences the prints, warnings and logs of torch's exporter."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _case(w: Weight, style: str, accuracy_level: int) -> onnx_patterns.OnnxCase:
    reason = codes_2d.refusal(w.tensor)
    if reason is not None:
        return onnx_patterns.OnnxCase(w.name, w.tensor, None, style, accuracy_level, refused=reason)
    r = codes_2d.rows_of(w.tensor, w.name)
    block = onnx_patterns.nbits_block(r)
    packs = style == "matmulnbits" or (style == "auto" and r.storage_bits == 4)
    if packs and block is not None and r.format.kind == "int" and r.storage_bits > 1 and "linear" in w.uses:
        r = r.sub_blocks(block)
    return onnx_patterns.OnnxCase(w.name, w.tensor, r, style, accuracy_level, shared=set(w.uses) != {"linear"})


def _forms(w: Weight, case: onnx_patterns.OnnxCase, allow_float: bool) -> dict[str, onnx_patterns.OnnxPattern]:
    """Use -> its pattern. Raises ValueError naming the weight."""
    found: dict[str, onnx_patterns.OnnxPattern] = {}
    for use in dict.fromkeys(w.uses):
        form = onnx_patterns.choose(case, use)
        if isinstance(form, list) and not allow_float:
            act = "" if w.tensor.act is None else f", input {w.tensor.act}"
            raise ValueError(
                f"{w.name} {list(w.tensor.shape)} ({w.tensor.spec.with_(layout='plain')}{act}) has no ONNX pattern for "
                f"{use}: {'; '.join(form)}. Quantize it another way, skip it, or pass allow_float=True"
            )
        found[use] = onnx_patterns.FLOAT[use] if isinstance(form, list) else form
    if any(form in onnx_patterns.FLOAT.values() for form in found.values()):
        return {use: onnx_patterns.FLOAT[use] for use in found}
    return found


# -- after -----------------------------------------------------------------------------------------------------------


def _replace_markers(model: Any, cases: list[Any], chosen: list[dict[str, Any]], style: str) -> dict[str, Any]:
    """Replace placeholders by patterns. Returns the initializers created, by name."""
    import onnx_ir as ir

    shared: dict[str, Any] = {}
    graph = model.graph
    for node in [n for n in ir.traversal.RecursiveGraphIterator(graph) if n.domain == DOMAIN]:
        number, use = node.attributes["weight"].as_int(), _TABLE[node.op_type]
        inputs = [*node.inputs, None, None]
        n = Nodes(graph, shared, f"pennyweight.{node.outputs[0].name}")
        form = chosen[number][use]
        y = form.build(n, cases[number], inputs[0])
        if node.op_type == "linear" and inputs[1] is not None:
            y = n.op("Add", y, inputs[1])
        old = node.outputs[0]
        y.shape, y.type = old.shape, old.type
        ir.convenience.replace_nodes_and_values(graph, node, [node], n.made, [old], [y])
    model.opset_imports.pop(DOMAIN, None)
    if any(n.domain == "com.microsoft" for n in graph):
        model.opset_imports["com.microsoft"] = 1
    model.producer_name = "pennyweight"
    model.metadata_props["pennyweight.style"] = style
    model.metadata_props["pennyweight.engine"] = ENGINES[style]
    return shared


def _name_axes(model: Any, names: list[dict[int, str]]) -> None:
    """Replace torch's generated size names such as s31 by the caller's names."""
    import onnx_ir as ir

    graph = model.graph
    known: dict[str, str] = {}
    for value, axes in zip(graph.inputs, names, strict=False):
        for axis, name in axes.items():
            if isinstance(value.shape[axis], ir.SymbolicDim):
                known.setdefault(str(value.shape[axis].value), name)
    if not known:
        return
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, known))})\b")
    for value in {*graph.inputs, *graph.outputs, *(v for node in graph for v in node.outputs)}:
        for axis, size in enumerate(value.shape or ()):
            if isinstance(size, ir.SymbolicDim) and size.value is not None:
                value.shape[axis] = ir.SymbolicDim(pattern.sub(lambda m: known[m[0]], size.value))


def _report_rows(captured: Captured, chosen: list[Any], made: dict[str, Any], model: nn.Module) -> list[Row]:
    """Rows of quantized weights, then of float parameters."""
    found = []
    for w, of_use in zip(captured.weights, chosen, strict=True):
        kind = type(model.get_submodule(w.parameter.rpartition(".")[0])).__name__
        after = sum(v.const_value.nbytes for key, v in made.items() if key.rpartition(".")[0] == w.name)
        names = list(dict.fromkeys(form.name for form in of_use.values()))
        act = "" if w.tensor.act is None else f" × {w.tensor.act}"
        scheme, note = str(w.tensor.spec.with_(layout="plain")) + act, ""
        if any(form in onnx_patterns.FLOAT.values() for form in of_use.values()):
            scheme, note = "", f"float32: no pattern for {scheme}"
        found.append(
            Row(w.name, kind, tuple(w.tensor.shape), scheme, ", ".join(names), w.tensor.nbytes, after, None, note)
        )
    for name, t in captured.floats.items():
        kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
        stored = str(t.dtype).removeprefix("torch.")
        found.append(Row(name, kind, tuple(t.shape), "", "", t.nbytes, t.nbytes, note=stored))
    listed = {row.name for row in found} | {w.parameter for w in captured.weights}
    for name, p in model.named_parameters():
        if name not in listed:
            kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
            found.append(Row(name, kind, tuple(p.shape), "", "", p.nbytes, 0, note="not used by any output"))
    return found


# -- atomic writes of ONNX files ---------------------------------------------------------------------------------------


def save(model: Any, path: str, max_inline_bytes: int = INLINE) -> list[str]:
    """Write a model and return its files: one, or, above that many bytes, a second one, ``NAME.data``.

    Both are written under temporary names. The data is renamed before the file that references it, to a name that no
    file there has, such as ``NAME.0a1b2c3d.data``: so the old model stays intact until the new one is complete. Data of
    the old one is removed last.
    """
    import onnx_ir as ir

    folder, name = os.path.split(os.path.abspath(path))
    inside = sum(v.const_value.nbytes for v in model.graph.initializers.values())
    with folder_lock(folder), partial_path(folder, name) as stage:
        old = _data_files(folder, name)
        outside = None
        if inside > max_inline_bytes:
            outside = f"{name}.{secrets.token_hex(4)}.data" if old else f"{name}.data"
        ir.save(model, os.path.join(stage, name), external_data=outside)
        written = [name] if outside is None else [outside, name]
        for part in written:
            with open(os.path.join(stage, part), "rb+") as f:
                os.fsync(f.fileno())
        for part in written:
            rename_into_place(os.path.join(stage, part), os.path.join(folder, part))
        for part in old:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, part))
        if old:
            sync_folder(folder)
    return [os.path.join(folder, part) for part in reversed(written)]


def _data_files(folder: str, name: str) -> list[str]:
    """Files with data of the model called ``name``."""
    ours = re.compile(re.escape(name) + r"(\.[0-9a-f]{8})?\.data")
    return [found for found in os.listdir(folder) if ours.fullmatch(found)]

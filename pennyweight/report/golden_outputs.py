"""Golden outputs: a few inputs and the float model's outputs, stored next to a checkpoint as golden.safetensors.

After loading the checkpoint they show within moments whether this machine, kernel and release compute the expected
outputs. Wrong packing, a broken kernel or a cast to fewer bits all exceed the bound by far.

The file:

__metadata__        {"format": "pt", "pennyweight_golden": JSON {"version": 1, "kind", "bound", "width", "batches"}}
input.<i>.<name>    tensor, keyword argument of batch i;  input.<i>.<j>, j a number: its j-th positional argument
rows.<i>            int32 [rows];  values.<i> float32 [rows, k];  indices.<i> int32 [rows, k]
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.model_arguments import check_arguments
from ..io.atomic_write import partial_path, rename_into_place
from ..io.file import CheckpointError
from ..io.safetensors_file import Entry, File, Writer, place
from ..io.strict_json import parse
from ..planning.run_batch import run_batch
from ..support.arguments import check_number, did_you_mean, show
from ..support.errors import ArgumentTypeError
from ..support.progress import Progress, step
from ..support.tables import FLAG, REAL, TEXT, WHOLE, html_table, to_frame
from .layers import unwrapped
from .metrics import Distribution, distribution, ratio
from .outputs import batches_of, evaluating, floats, kind_of_output, logits_of, mask_of

if TYPE_CHECKING:
    from pandas import DataFrame

FILE = "golden.safetensors"  # its name in a checkpoint's folder
ROWS, TOP = 64, 16
# Running the same weights in bfloat16 causes a mean KL of 5e-5 nats in the language model of benchmarks/accuracy, and
# an error of 0.7 to 0.9 % in the output of all-MiniLM-L6-v2; the bounds are five times the one and twice the other.
SLACK = {"logits": 2.5e-4, "tensor": 0.02}
# A quantized model may have twice the error that was measured when the golden outputs were made
TIMES = 2.0
# The mass outside the k stored classes has float32 precision only
_LEAST_REST = 1e-6
MAX_INPUT_BYTES = 1 << 20


@dataclass(frozen=True)
class Golden:
    """A few inputs and outputs of a model.

    kind     "logits": values are log-probabilities of the k likeliest classes; "tensor": the k largest elements
    inputs   of each batch: a mapping of keyword arguments, or a tuple of arguments; tensors only
    rows     of each batch: row indices into the output flattened over all but its last axis, int32 [rows]
    values   of each batch: float32 [rows, k]; indices: their positions in the last axis, int32 [rows, k]
    width    size of the output's last axis
    bound    limit of :func:`verify`: mean KL in nats, or relative error
    """

    kind: str
    inputs: tuple[Mapping[str, Tensor] | tuple[Tensor, ...], ...]
    rows: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    indices: tuple[Tensor, ...]
    width: int
    bound: float

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write it as safetensors: to a file, or into a folder as golden.safetensors. Returns the path."""
        return write(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Golden:
        """Read a file, or the golden.safetensors of a folder. Raises CheckpointError for an invalid file."""
        return read(path)


@dataclass(frozen=True)
class Verification:
    """The result of :func:`verify`. kl: of each stored row, in nats (None for tensors); error: relative, of the stored
    values; bound: of the mean KL, or of the error."""

    kind: str
    rows: int
    kl: Distribution | None
    error: float
    top1: float
    bound: float

    @property
    def figure(self) -> float:
        """The value that the bound limits."""
        return self.error if self.kl is None else self.kl.mean

    @property
    def ok(self) -> bool:
        return self.figure <= self.bound  # false for NaN

    def __str__(self) -> str:
        what = "relative error" if self.kl is None else "mean KL"
        unit = "" if self.kl is None else " nats"
        sign = "<=" if self.ok else f"is {self.figure / self.bound:.3g} times the bound of"
        figure = f"{what} {self.figure:.3g}{unit} {sign} {self.bound:.3g} over {self.rows} rows, top-1 {self.top1:.1%}"
        return f"{'as expected' if self.ok else 'NOT as expected'}: {figure}"

    def to_pandas(self) -> DataFrame:
        """A data frame with one row: the figures of this result. Raises ImportError without pandas."""
        types = {"kind": TEXT, "ok": FLAG, "rows": WHOLE, "mean_kl": REAL, "max_kl": REAL, "error": REAL, "top1": REAL,
                 "bound": REAL}  # fmt: skip
        kl = (None, None) if self.kl is None else (self.kl.mean, self.kl.max)
        row = {**vars(self), "ok": self.ok, "mean_kl": kl[0], "max_kl": kl[1]}
        return to_frame(types, [row])

    def _repr_html_(self) -> str:
        rows = [["verdict", "as expected" if self.ok else "NOT as expected"]]
        if self.kl is not None:
            rows += [["mean KL", f"{self.kl.mean:.3g} nats"], ["maximum KL", f"{self.kl.max:.3g} nats"]]
        rows += [["relative error", f"{self.error:.3g}"], ["bound", f"{self.bound:.3g}"],
                 ["top-1 agreement", f"{self.top1:.1%}"], ["rows", f"{self.rows:,}"]]  # fmt: skip
        return html_table((), rows, title="verification against golden outputs", bold=0)

    def check(self) -> Verification:
        """Raise ValueError if the outputs differ from the golden ones by more than the bound. Returns itself."""
        if not self.ok:
            raise ValueError(
                f"{self}; the weights, a kernel (see pennyweight doctor) or a dtype differ from those that the golden "
                "outputs were made with. For a quantized model make them with golden(..., quantized=model), or pass "
                "verify a bound"
            )
        return self


@check_arguments()
def golden(
    model: nn.Module,
    batches: Any,
    k: int = TOP,
    *,
    rows: int = ROWS,
    kind: str | None = None,
    quantized: nn.Module | None = None,
    progress: Progress = None,
) -> Golden:
    """Record a model's outputs for a few inputs.

    batches    a few prompts, as for :func:`compare`; tensors only
    k          classes stored per row; rows: total rows stored, evenly spread over the unmasked ones
    kind       "logits" or "tensor"; default: logits if the output has ``.logits``
    quantized  the model that will be verified, if it is not ``model``: its distance is measured now, and the bound
               allows twice that. Without it, the bound is for the same weights on any machine
    progress   a bar after two seconds by default; False: none; or a function, called with (done, total, name)

    Raises ValueError for inputs that are not tensors, or larger than 1 MiB in all.
    """
    if kind not in (None, *SLACK):
        guess = did_you_mean(kind, SLACK, 1)
        raise ValueError(f"kind must be one of {', '.join(SLACK)}, or None to detect it, got {kind!r}{guess}")
    for name, value in (("k", k), ("rows", rows)):
        check_number(name, value, integer=True, positive=True)
    some = [_inputs(batch) for batch in batches_of(batches)]
    if not some:
        raise ValueError("batches is empty; golden outputs need at least one batch")
    nbytes = sum(t.nbytes for batch in some for t in (batch.values() if isinstance(batch, Mapping) else batch))
    if nbytes > MAX_INPUT_BYTES:
        raise ValueError(f"inputs of {nbytes:,} bytes; golden outputs allow a few prompts, {MAX_INPUT_BYTES:,} bytes")
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    width = 0
    model = unwrapped(model)
    with step("golden", progress) as advance, evaluating(model):
        for done, batch in enumerate(some, 1):
            output = run_batch(model, batch)
            kind = kind or kind_of_output(output)
            table, counts = _table(output, batch, kind)
            at = counts.nonzero().flatten()
            count = min(len(at), -(-rows // len(some)))
            at = at[torch.linspace(0, len(at) - 1, count).round().long()] if count else at
            width = table.shape[-1]
            picked = _scores(table[at.to(table.device)], kind)
            top = (picked.abs() if kind == "tensor" else picked).topk(min(k, width), -1).indices
            values = picked.gather(-1, top).float().clamp(min=torch.finfo(torch.float32).min)
            found.append((at.int(), values.cpu(), top.int().cpu()))
            advance(done, len(some), "")
    assert kind is not None
    if not any(len(at) for at, _, _ in found):
        raise ValueError("there are no rows to store: the masks are all zero")
    at_rows, values_of, indices_of = zip(*found, strict=True)
    made = Golden(kind, tuple(some), at_rows, values_of, indices_of, width, SLACK[kind])
    if quantized is None:
        return made
    return replace(made, bound=TIMES * verify(quantized, made, progress=progress).figure + SLACK[kind])


@check_arguments()
def verify(
    model: nn.Module,
    expected: Golden | str | os.PathLike[str],
    bound: float | None = None,
    *,
    progress: Progress = None,
) -> Verification:
    """Run a model on golden inputs and compare its outputs.

    expected  golden outputs, or their path: a file, or a checkpoint's folder
    bound     of the mean KL in nats (of the relative error for tensors), instead of the stored one
    progress  a bar after two seconds by default; False: none; or a function, called with (done, total, name)

    The KL is over the k stored classes and one class for the rest. It is at most the full KL, and close to it if the
    rest has little mass. Raises ValueError if the model's outputs have another shape.
    """
    if bound is not None:
        check_number("bound", bound, positive=True)
    if not isinstance(expected, (Golden, str, os.PathLike)):
        raise ArgumentTypeError(f"expected must be what pw.report.golden returned, or its path, got {show(expected)}")
    expected = expected if isinstance(expected, Golden) else Golden.load(expected)
    model = unwrapped(model)
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    kls, same, signal, noise = [], [], 0.0, 0.0
    stored = list(zip(expected.inputs, expected.rows, expected.values, expected.indices, strict=True))
    with step("verify", progress) as advance, evaluating(model):
        for done, (inputs, rows, values, indices) in enumerate(stored, 1):
            table, _ = _table(run_batch(model, _on(inputs, device)), inputs, expected.kind)
            if table.shape[-1] != expected.width or (len(rows) and int(rows.max()) >= len(table)):
                raise ValueError(
                    f"the model returns {len(table)} rows of {table.shape[-1]}, the golden outputs need rows of "
                    f"{expected.width}, at least {int(rows.max()) + 1}: they belong to another architecture"
                )
            scores = _scores(table[rows.to(table.device).long()], expected.kind).cpu()
            found_scores = scores.gather(-1, indices.long())
            if expected.kind == "logits":
                kls.append(_kl(values.double(), found_scores))
                same.append(scores.argmax(-1) == indices[:, 0])
            else:
                same.append(scores.abs().argmax(-1) == indices[:, 0])
            # for logits the error of the probabilities, which are bounded
            a, b = (x.exp() if expected.kind == "logits" else x for x in (values.double(), found_scores))
            signal, noise = signal + float(a.square().sum()), noise + float((b - a).square().sum())
            advance(done, len(stored), "")
    top1 = torch.cat(same).double()
    kl = distribution(torch.cat(kls)) if kls else None
    return Verification(
        expected.kind, len(top1), kl, ratio(signal, noise), float(top1.mean()),
        expected.bound if bound is None else bound,
    )  # fmt: skip


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL of distributions over k classes and one class for the rest."""
    p = log_p.exp()
    rest_p, rest_q = ((1 - x.exp().sum(-1)).clamp(min=_LEAST_REST) for x in (log_p, log_q))
    terms = torch.where(p == 0, torch.zeros_like(p), p * (log_p - log_q)).sum(-1)
    return (terms + rest_p * (rest_p / rest_q).log()).clamp(min=0)


def _scores(rows: Tensor, kind: str) -> Tensor:
    return rows.double().log_softmax(-1) if kind == "logits" else rows.double()


def _table(output: Any, batch: Any, kind: str) -> tuple[Tensor, Tensor]:
    """(output as rows, mask of the rows that count)."""
    tensors = [logits_of(output)] if kind == "logits" else floats(output)[:1]
    if not tensors or not tensors[0].ndim:
        raise ValueError(f"the model returns no floating-point tensor, got {type(output).__name__}")
    table = tensors[0]
    mask = mask_of(batch, table.shape[:2]) if table.ndim > 2 else None
    lead = table.shape[:-1]
    if mask is not None:
        mask = mask.cpu().reshape(*mask.shape, *(1,) * (len(lead) - 2)).expand(lead).reshape(-1)
    width = table.shape[-1]
    flat = table.reshape(-1, width)
    return flat, torch.ones(len(flat), dtype=torch.bool) if mask is None else mask


def _inputs(batch: Any) -> Mapping[str, Tensor] | tuple[Tensor, ...]:
    values: Any = batch
    if not isinstance(batch, Mapping):
        values = dict(enumerate(batch)) if isinstance(batch, (tuple, list)) else {0: batch}
    bad = next((name for name, v in values.items() if type(v) is not Tensor), None)
    if bad is not None:
        raise ValueError(f"golden outputs need plain tensors; input {bad!r} is {type(values[bad]).__name__}")
    kept = {name: v.detach().cpu().clone() for name, v in values.items()}
    return kept if isinstance(batch, Mapping) else tuple(kept.values())


def _on(inputs: Mapping[str, Tensor] | tuple[Tensor, ...], device: torch.device) -> Any:
    if isinstance(inputs, Mapping):
        return {name: t.to(device) for name, t in inputs.items()}
    return tuple(t.to(device) for t in inputs)


def finite_bound(value: Any) -> bool:
    """Whether it is a valid bound: a positive number."""
    return type(value) in (int, float) and math.isfinite(value) and value > 0


# -- golden.safetensors ------------------------------------------------------------------------------------------------

KEY = "pennyweight_golden"
MAX_BATCHES = 1024
MAX_BYTES = 4 * MAX_INPUT_BYTES
_KEYS = {"version", "kind", "bound", "width", "batches"}
_OUTPUTS = {"rows": (torch.int32, 1), "values": (torch.float32, 2), "indices": (torch.int32, 2)}


def _path(path: str | os.PathLike[str]) -> str:
    path = os.path.abspath(os.fspath(path))
    return os.path.join(path, FILE) if os.path.isdir(path) else path


def write(golden: Golden, path: str | os.PathLike[str]) -> str:
    """Write atomically. Raises CheckpointError for inputs that safetensors cannot store, OSError for disk errors."""
    path = _path(path)
    tensors: dict[str, Tensor] = {}
    for i, inputs in enumerate(golden.inputs):
        named = inputs if isinstance(inputs, Mapping) else {str(j): t for j, t in enumerate(inputs)}
        tensors |= {f"input.{i}.{name}": t for name, t in named.items()}
        for name in _OUTPUTS:
            tensors[f"{name}.{i}"] = getattr(golden, name)[i]
    facts = {
        "version": 1, "kind": golden.kind, "bound": golden.bound, "width": golden.width, "batches": len(golden.inputs),
    }  # fmt: skip
    entries = place({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})
    folder, name = os.path.split(path)
    with partial_path(folder, name) as stage:
        temp = os.path.join(stage, name)
        writer = Writer(temp, entries, {"format": "pt", KEY: json.dumps(facts, sort_keys=True)})
        try:
            for key, tensor in tensors.items():
                writer.put(key, tensor)
            writer.finish()
        finally:
            writer.close()
        rename_into_place(temp, path)
    return path


def read(path: str | os.PathLike[str]) -> Golden:
    """Read and check everything. Raises CheckpointError."""
    path = _path(path)
    with File(os.path.realpath(path)) as file:
        if file.size > MAX_BYTES:
            raise CheckpointError(path, None, f"{file.size} bytes; golden outputs have at most {MAX_BYTES}")
        facts = _facts(path, file.metadata)
        return _golden(path, facts, file.entries, {n: _whole(file, n) for n in file.entries})


def _whole(file: File, name: str) -> Tensor:
    e = file.entries[name]
    return file.read(name, 0, e.numel).reshape(e.shape)


def _facts(path: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    if KEY not in metadata:
        raise CheckpointError(path, None, f"contains no golden outputs: its metadata has no {KEY!r}")
    try:
        facts = parse(metadata[KEY].encode(), max_bytes=4096, max_depth=4, floats=True)
    except ValueError as e:
        raise CheckpointError(path, None, f"{KEY}: {e}") from e
    if not isinstance(facts, dict) or facts.get("version") != 1:
        raise CheckpointError(path, None, f"{KEY}: this release reads version 1, got {str(facts)[:80]}")
    if facts.keys() != _KEYS:
        raise CheckpointError(path, None, f"{KEY} must have exactly {', '.join(sorted(_KEYS))}")
    if facts["kind"] not in SLACK or not finite_bound(facts["bound"]):
        raise CheckpointError(path, None, f"{KEY}: kind must be one of {', '.join(SLACK)}, bound a positive number")
    for name, most in (("width", 1 << 31), ("batches", MAX_BATCHES)):
        if type(facts[name]) is not int or not 0 < facts[name] <= most:
            raise CheckpointError(path, None, f"{KEY}: {name} must be a whole number from 1 to {most}")
    return facts


def _golden(path: str, facts: dict[str, Any], entries: Mapping[str, Entry], tensors: dict[str, Tensor]) -> Golden:
    count, width = facts["batches"], facts["width"]
    outputs: dict[str, list[Tensor]] = {name: [] for name in _OUTPUTS}
    for i in range(count):
        for name, (dtype, ndim) in _OUTPUTS.items():
            key = f"{name}.{i}"
            if key not in tensors:
                raise CheckpointError(path, key, "is missing")
            if entries[key].dtype != dtype or len(entries[key].shape) != ndim:
                raise CheckpointError(path, key, f"must be {dtype} of {ndim} axes, is {entries[key].dtype}")
            outputs[name].append(tensors.pop(key))
        rows, values, indices = (outputs[name][i] for name in _OUTPUTS)
        if values.shape != indices.shape or len(rows) != len(values) or not 1 <= values.shape[1] <= width:
            shapes = f"{list(rows.shape)}, {list(values.shape)}, {list(indices.shape)}"
            raise CheckpointError(path, f"values.{i}", f"shapes of rows, values and indices do not match: {shapes}")
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(path, f"values.{i}", "contains NaN or inf")
        if bool((rows < 0).any()) or bool(((indices < 0) | (indices >= width)).any()):
            raise CheckpointError(
                path, f"indices.{i}", f"rows and indices must be within the output; its width is {width}"
            )
    if not any(len(rows) for rows in outputs["rows"]):
        raise CheckpointError(path, "rows.0", "no row of outputs is stored")
    inputs = _stored_inputs(path, count, tensors)
    at_rows, values_of, indices_of = (tuple(outputs[name]) for name in _OUTPUTS)
    return Golden(facts["kind"], inputs, at_rows, values_of, indices_of, width, float(facts["bound"]))


def _stored_inputs(path: str, count: int, tensors: dict[str, Tensor]) -> tuple[Any, ...]:
    """The inputs of each batch: all remaining tensors."""
    found: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for key, tensor in tensors.items():
        kind, _, rest = key.partition(".")
        number, _, name = rest.partition(".")
        known = kind == "input" and number in {str(i) for i in range(count)}
        if not known or not (name.isidentifier() or (name.isascii() and name.isdecimal())):
            raise CheckpointError(path, key, f"is not an input of one of the {count} batches")
        found[int(number)][name] = tensor
    out: list[Any] = []
    for i, named in enumerate(found):
        if not named:
            raise CheckpointError(path, f"input.{i}", "is missing")
        order = [str(j) for j in range(len(named))]
        if named.keys() == set(order):
            out.append(tuple(named[j] for j in order))
        elif all(name.isidentifier() for name in named):
            out.append(named)
        else:
            raise CheckpointError(path, f"input.{i}", f"arguments must be numbered 0 to {len(named) - 1}, or be named")
    return tuple(out)

"""Every operator that torch has test inputs for, on quantized operands beside the dequantized ones.

    python -m tests.every.ops_table             # sweep all and write docs/ops.md
    python -m tests.every.ops_table add mm      # sweep some, print what differs

Each floating tensor among an operator's arguments is replaced, one at a time, by its quantized version (int8, groups of
4 along the last axis, so that small samples have whole groups, several groups and padding) and by what that one
dequantizes to. Results must agree; in place, the operand must then hold the quantized result.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import pennyweight as pw
from pennyweight.core.formats import INT8
from pennyweight.core.spec import QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT

Make = Callable[[torch.Tensor], QT]
SPEC = QuantSpec(INT8, (4,))
SAMPLES = 4  # per operator
DOC = Path(__file__).resolve().parents[2] / "docs" / "ops.md"

# Operators whose results two equal calls do not share. Compared in shape and dtype only.
RANDOM = "draws random numbers"
UNSET = "returns memory that was never written"
INCOMPARABLE = {
    **dict.fromkeys(
        ["bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "normal.in_place",
         "uniform", "rand_like", "randint_like", "randn_like", "randint", "randn", "nn.functional.alpha_dropout",
         "nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d", "nn.functional.rrelu",
         "nn.functional.feature_alpha_dropout.with_train", "nn.functional.fractional_max_pool2d", "svd_lowrank",
         "nn.functional.fractional_max_pool3d", "nn.functional.multi_head_attention_forward", "normal.number_mean",
         "nn.functional.scaled_dot_product_attention", "pca_lowrank"],
        RANDOM,
    ),
    **dict.fromkeys(
        ["empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"], UNSET
    ),
}  # fmt: skip


@dataclass
class Row:
    """One operator: in how many uses it was native, fell back, was refused; what differed; how a refusal reads."""

    name: str
    native: int = 0
    counted: int = 0
    fallback: int = 0
    refused: int = 0
    wrong: str = ""
    reason: str = ""

    @property
    def status(self) -> str:
        kinds = [k for k in ("native", "counted", "fallback", "refused") if getattr(self, k)]
        names = {
            "native": "native",
            "counted": "dequantizing row",
            "fallback": "counted fallback",
            "refused": "refused",
        }
        return " / ".join(names[k] for k in kinds) or "no floating operand"


def entries() -> list[Any]:
    """Operators with samples in float32 on a CPU, by name."""
    return sorted((op for op in op_db if torch.float32 in op.supported_dtypes("cpu")), key=full_name)


def full_name(op: Any) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def in_order(x: torch.Tensor) -> QT:
    return QT.from_float(x, SPEC)


def reordered(x: torch.Tensor) -> QT:
    """Its last axis stored in another order, the same for every x of that size."""
    perm = torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(x.shape[-1]))
    return QT.from_float(x[..., perm], SPEC).with_(perm=perm)


def uses(op: Any, make: Make) -> Iterator[tuple[Any, Any, QT, torch.Tensor]]:
    """(arguments with one quantized, the same with it dequantized, the quantized tensor, its float twin)."""
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=False), SAMPLES):
        leaves, tree = tree_flatten((sample.input, sample.args, sample.kwargs))
        for i, leaf in enumerate(leaves):
            usable = isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32 and leaf.layout is torch.strided
            if not usable or leaf.ndim == 0 or leaf.numel() == 0 or not bool(leaf.isfinite().all()):
                continue
            q = make(leaf)
            pair = []
            twin = q.dequantize()
            for value in (q, twin):
                copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves]
                copies[i] = value
                pair.append(tree_unflatten(copies, tree))
            yield *pair, q, twin


def call(op: Any, arguments: Any) -> Any:
    first, args, kwargs = arguments
    torch.manual_seed(0)
    return op.op(first, *args, **kwargs)


def in_place(op: Any, make: Make) -> str:
    """What is wrong with ``x.op_(..)`` for a quantized x, or nothing: it must hold the quantized result after it.

    A result that is not finite, or of another shape, is refused and leaves x as it was.
    """
    name = full_name(op)
    samples = itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=False), SAMPLES)
    for x, args, kwargs in ((s.input, s.args, s.kwargs) for s in samples if isinstance(s.input, torch.Tensor)):
        if x.dtype is not torch.float32 or x.ndim == 0 or x.numel() == 0 or not bool(x.isfinite().all()):
            continue
        q = make(x)
        before, twin = q.dequantize(), q.dequantize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                op.inplace_variant(twin, *args, **kwargs)
            except Exception:
                continue
            fits = twin.shape == x.shape and twin.dtype is x.dtype and bool(twin.isfinite().all())
            try:
                op.inplace_variant(q, *args, **kwargs)
            except (RuntimeError, ValueError) as error:
                if fits and name not in INCOMPARABLE:
                    return f"{type(error).__name__}: {str(error).splitlines()[0]}"
                twin = before
            if name in INCOMPARABLE:
                continue
            if twin.shape != q.shape:
                return f"keeps the shape {tuple(q.shape)} where {tuple(twin.shape)} is due"
            expected = before if torch.equal(twin, before) else make(twin).dequantize()
            if not torch.equal(q.dequantize(), expected):
                return f"holds another value, off by {(q.dequantize() - expected).abs().max().item():.3g}"
    return ""


def plain(out: Any) -> list[Any]:
    leaves = tree_leaves(list(out) if isinstance(out, tuple) else out)
    return [x.dequantize() if isinstance(x, QT) else x for x in leaves]


def difference(name: str, mine: list[Any], theirs: list[Any]) -> str:
    """What differs, or nothing."""
    if len(mine) != len(theirs):
        return f"{len(mine)} results for {len(theirs)}"
    for a, b in zip(mine, theirs, strict=True):
        if not isinstance(b, torch.Tensor):
            if a != b and b == b:  # noqa: PLR0124  (NaN is equal to NaN here)
                return f"{a!r} for {b!r}"
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{tuple(a.shape)} {a.dtype} for {tuple(b.shape)} {b.dtype}"
        if name in INCOMPARABLE:
            continue
        a, b = (x.to_dense() if x.layout is not torch.strided else x for x in (a, b))
        if not torch.allclose(a.to(b.dtype), b, rtol=1e-4, atol=1e-5, equal_nan=True):
            return f"values differ by {(a - b).abs().max().item():.3g}"
    return ""


def sweep(op: Any, make: Make = in_order) -> Row:
    """Run one operator. make: how a tensor is quantized."""
    row = Row(full_name(op))
    for quantized, dequantized, q, twin in uses(op, make):
        before = twin.clone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                theirs = plain(call(op, dequantized))
            except Exception:  # the values that quantizing gave are outside what the operator takes
                continue
            pw.reset_fallbacks()
            try:
                mine = call(op, quantized)
            except Exception as error:
                row.refused += 1
                row.reason = row.reason or f"{type(error).__name__}: {str(error).splitlines()[0]}"
                continue
            counts = pw.fallbacks()
            row.wrong = row.wrong or difference(row.name, plain(mine), theirs)
        changed = not torch.equal(twin, before)
        expected = make(twin).dequantize() if changed else before
        if row.name not in INCOMPARABLE and not torch.equal(q.dequantize(), expected):
            row.wrong = row.wrong or "the operand does not hold what the operator wrote to it"
        if any("/" not in key for key in counts):  # rows of the table are counted as op/name
            row.fallback += 1
        elif counts:
            row.counted += 1
        else:
            row.native += 1
    if op.inplace_variant is not None and not row.wrong:
        wrong = in_place(op, make)
        row.wrong = wrong and f"in place: {wrong}"
    return row


# -- all of them, where one that ends the process costs only its chunk -----------------------------------------------


def sweep_all(workers: int = 2, chunk: int = 40) -> list[Row]:
    """Every operator, in processes of their own. An operator that ends one is found and reported as wrong."""
    names = [full_name(op) for op in entries()]
    waiting = [names[i : i + chunk] for i in range(0, len(names), chunk)]
    rows: list[Row] = []
    running: list[tuple[list[str], subprocess.Popen[str]]] = []
    while waiting or running:
        while waiting and len(running) < workers:
            part = waiting.pop(0)
            running.append((part, start(part)))
        part, process = running.pop(0)
        out, err = process.communicate()
        done = [Row(**json.loads(line)) for line in out.splitlines() if line.startswith('{"name"')]
        rows += done
        left = part[len(done) :]
        if left:
            rows.append(Row(left[0], wrong=f"ended the process with {process.returncode}: {err.strip()[-300:]}"))
            waiting.insert(0, left[1:]) if left[1:] else None
    return sorted(rows, key=lambda row: row.name)


def start(names: list[str]) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.every.ops_table", "--json", *names]
    cwd = DOC.parents[1]
    return subprocess.Popen(command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# -- the page --------------------------------------------------------------------------------------------------------

HEAD = """# Operators on quantized tensors

Generated by `python -m tests.every.ops_table`; a test checks that this page is up to date.

Every operator that torch 2.13 has sample inputs for (float32, CPU) was called with each floating operand quantized
(int8, groups of 4 along the last axis) and with that operand dequantized. The results agree, except for the refusals
below. After an in-place op the operand holds the quantized result.

* **native**: works on codes and scales, or on a selected kernel; nothing is dequantized silently.
* **dequantizing row**: a row of the kernel table that dequantizes; counted in `pw.fallbacks()`, no warning.
* **counted fallback**: runs on a dequantized copy; counted, warns once per operator, an error in `pw.kernels.strict()`.
* **refused**: raises, with the reason.

Several entries mean: it depends on which operand is quantized, and on whether blocks are split.

"""


def page(rows: list[Row]) -> str:
    """docs/ops.md."""
    total = {kind: sum(row.status == kind for row in rows) for kind in sorted({row.status for row in rows})}
    text = HEAD + "| | operators |\n|---|---|\n" + "".join(f"| {k} | {n} |\n" for k, n in total.items())
    text += f"| all | {len(rows)} |\n\n## Refused\n\n| operator | reason |\n|---|---|\n"
    text += "".join(f"| `{row.name}` | {reason(row)} |\n" for row in rows if row.refused)
    text += "\n## Native, at least partly\n\n| operator | |\n|---|---|\n"
    text += "".join(f"| `{row.name}` | {row.status} |\n" for row in rows if row.native or row.counted)
    rest = [f"`{row.name}`" for row in rows if row.status == "counted fallback"]
    none = [f"`{row.name}`" for row in rows if row.status == "no floating operand"]
    text += (
        f"\n## Counted fallback\n\n{', '.join(rest)}\n\n## No floating operand among the samples\n\n{', '.join(none)}\n"
    )
    return (
        text
        + "\n## Compared in shape and dtype only\n\n"
        + "".join(
            f"* {why}: {', '.join(f'`{n}`' for n, r in INCOMPARABLE.items() if r == why)}\n" for why in (RANDOM, UNSET)
        )
    )


def reason(row: Row) -> str:
    return row.reason.replace("|", "\\|")[:160]


def main(arguments: list[str]) -> None:
    as_json = "--json" in arguments
    names = [a for a in arguments if a != "--json"]
    if not names:
        rows = sweep_all()
        for row in rows:
            if row.wrong:
                print(f"WRONG {row.name}: {row.wrong}")
        DOC.write_text(page(rows), encoding="utf-8")
        print(f"{DOC}: {len(rows)} operators, {sum(bool(row.wrong) for row in rows)} wrong")
        return
    by_name = {full_name(op): op for op in entries()}
    for name in names:
        row = sweep(by_name[name])
        print(json.dumps(asdict(row)) if as_json else row, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

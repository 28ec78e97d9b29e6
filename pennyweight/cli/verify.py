"""``pennyweight verify``: checks that a checkpoint's outputs match its golden outputs on this machine."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Bound, Fused, Json, Like, Make, Texts, Traceback
from .output import check_report_path, report_errors, show

if TYPE_CHECKING:
    from ..report import Verification

SEQUENCES, LENGTH = 4, 64  # a few prompts: a file of some kilobytes
EPILOG = """Examples:
  pennyweight verify OUT_DIR --make --text text.txt
  pennyweight verify OUT_DIR"""


@report_errors
def verify(
    path: Annotated[
        str, typer.Argument(metavar="DIR", help="A checkpoint's folder with golden.safetensors, or a Hub id.")
    ],
    like: Like = "",
    bound: Bound = None,
    make: Make = False,
    text: Texts = None,
    fused: Fused = False,
    json_path: Json = "",
    traceback: Traceback = False,
) -> None:
    """Check a checkpoint against its golden outputs.

    Loads the model and runs it on the stored inputs. Fails if the outputs differ by more than the bound: then the
    files, a kernel or a dtype have changed. See docs/report.md.
    """
    if make == (not text):
        raise ValueError("--make and --text must be used together: the golden outputs are for that text")
    if bound is not None and not bound > 0:
        raise ValueError(f"--bound must be positive, got {bound}")
    if make and (bound is not None or fused):
        raise ValueError(f"{'--fused' if fused else '--bound'} cannot be used with --make")
    check_report_path(json_path, None)

    from ..io.hub import is_hub_id, local_path
    from ..io.meta_model import load_tokenizer
    from ..report.evaluation_inputs import load_folder, read_texts, text_batches
    from ..report.golden_files import expected_beside
    from ..report.golden_files import make as written

    if make and not os.path.lexists(path) and is_hub_id(path):
        raise ValueError(f"--make writes into a folder, and {path} is not one here; download it with hf download first")
    path, like = local_path(path), local_path(like)
    if make:
        words, tokenizer = read_texts(text or []), load_tokenizer(like or path)
        model = load_folder(path, like)
        batches = text_batches(model, tokenizer, words, batch=SEQUENCES, length=LENGTH, limit=SEQUENCES)
        file = written(model, path, batches)
        show({"version": 1, "written": file}, lambda: f"written: {file}", json_path)
        return
    expected, model = expected_beside(path), load_folder(path, like)
    if not fused:
        _show(_measured(model, path, expected, bound), path, json_path)
        return
    from ..inference import CheckError, checked, fuse_
    from ..inference.fused_module import FusedModule

    report = fuse_(model)
    counts = Counter(module.fused_kind.name for module in model.modules() if isinstance(module, FusedModule))
    if not counts:
        reasons = dict.fromkeys((*report.notes, *(row.note for row in report.rows if row.note)))
        raise ValueError(f"{path}: nothing is fused: {'; '.join(reasons)}")
    try:
        with checked():
            found = _measured(model, path, expected, bound)
    except CheckError as error:
        raise ValueError(f"{path}: {error}") from error
    fused_modules = " and ".join(f"{n} fused {kind}{'s' * (n > 1)}" for kind, n in counts.items())
    said = f"; each call of {fused_modules} agrees with the module's own forward"
    _show(found, path, json_path, said, dict(counts))


def _measured(model: Any, path: str, expected: Any, bound: float | None) -> Verification:
    """The result, within the bound or not. Raises CheckpointError if the outputs have another shape."""
    from ..io import CheckpointError
    from ..report import verify

    try:
        return verify(model, expected, bound)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(path, None, str(error)) from error


def _show(found: Verification, path: str, json_path: str, more: str = "", fused: dict[str, int] | None = None) -> None:
    """Print the result. Raises CheckpointError if it exceeds the bound; then only JSON is printed."""
    from ..io import CheckpointError

    data = {"version": 1, "ok": found.ok, **asdict(found)}
    data["kl"] = None if found.kl is None else found.kl._asdict()
    if found.ok or json_path:
        show(data if fused is None else {**data, "fused": fused}, lambda: f"{found}{more}", json_path)
    try:
        found.check()
    except ValueError as error:
        raise CheckpointError(path, None, str(error)) from error

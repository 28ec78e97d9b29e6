"""``pennyweight eval``: measures the quantization loss on a text; ``quantize --max-kl`` does so before it finishes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import AllLayers, Batch, Json, Length, Limit, MaxKL, Texts, Traceback
from .output import check_report_path, report_errors, show

if TYPE_CHECKING:
    from ..planning.quantize_report import Report
    from ..report import Comparison


EPILOG = """Examples:
  pennyweight eval MODEL_DIR OUT_DIR --text text.txt
  pennyweight eval org/model OUT_DIR --text text.txt --max-kl 0.02 --json results.json"""


@report_errors
def evaluate(
    float_dir: Annotated[str, typer.Argument(metavar="FLOAT_DIR", help="The float model's folder, or a Hub id.")],
    quantized_dir: Annotated[
        str,
        typer.Argument(
            metavar="QUANTIZED_DIR",
            help="The quantized model's folder or file, of any format that inspect reads, or a Hub id.",
        ),
    ],
    text: Texts = None,
    batch: Batch = 8,
    length: Length = 256,
    limit: Limit = 64,
    report_path: Json = "",
    max_kl: MaxKL = None,
    full: AllLayers = False,
    traceback: Traceback = False,
) -> None:
    """Measure the quantization loss on a text.

    KL divergence from float, perplexity, top-1 agreement, and each layer's error. Generative models are compared by
    their logits, encoders by their embeddings. See docs/report.md.
    """
    check_text(text)
    check_bound(max_kl)
    check_report_path(report_path, None)

    from ..io import local_path
    from ..report.evaluation_inputs import load_folder
    from ..report.layers import check_one_model

    float_dir, quantized_dir = local_path(float_dir), local_path(quantized_dir)
    exact, small = load_folder(float_dir), load_folder(quantized_dir, float_dir)
    check_one_model(exact, small, float_dir, quantized_dir)
    found = compare_folders(exact, small, float_dir, text, batch, length, limit)
    show(found.to_dict(), lambda: found.table(full=True) if full else str(found), report_path)
    found.check(max_kl=max_kl)


def check_text(text: list[str] | None) -> None:
    """Raise ValueError if no text is given."""
    if not text:
        raise ValueError("--text is required: a file of text to run both models on")


def check_bound(max_kl: float | None) -> None:
    """Raise ValueError before the work starts, not after an hour."""
    if max_kl is not None and not max_kl > 0:
        raise ValueError(f"--max-kl must be positive, got {max_kl}")


def compare_folders(
    exact: Any, found: Any, folder: str, text: list[str] | None, batch: int, length: int, limit: int
) -> Comparison:
    """Compare both models on a text, with the tokenizer of the float model's folder."""
    from ..io.meta_model import load_tokenizer
    from ..report import compare
    from ..report.evaluation_inputs import kind_of_model, pooling_of, read_texts, text_batches

    batches = text_batches(
        exact, load_tokenizer(folder), read_texts(text or []), batch=batch, length=length, limit=limit or None
    )
    return compare(exact, found, batches, kind=kind_of_model(exact), pooling=pooling_of(folder))


# -- quantize --max-kl -------------------------------------------------------------------------------------------------


def run_gated(
    job: Callable[[str], Report], model_dir: str, out_dir: str, force: bool, max_kl: float, text: list[str],
    finish: Callable[[str, Report, Comparison], None],
) -> Report:  # fmt: skip
    """Run ``job(folder)``, which writes a checkpoint, and return its report; out_dir has the files if it passes.

    The files are written to a folder next to out_dir and loaded from there, so the check covers the stored bytes.
    ``finish`` is called with that folder, the report and the comparison before the folder is put in place.
    Raises ValueError with the worst layers if the mean KL is above ``max_kl``; then no files remain, and out_dir is
    unchanged.
    """
    from ..io.meta_model import load_tokenizer
    from ..io.replace_checkpoint import replacing
    from ..report.evaluation_inputs import load_folder, read_texts

    check_room(out_dir, force)
    read_texts(text)  # fail before the work if the comparison cannot run
    load_tokenizer(model_dir)
    exact = load_folder(model_dir)
    with replacing(out_dir) as folder:
        report = job(folder)
        found = load_folder(folder)
        result = compare_folders(exact, found, model_dir, text, 8, 256, 64)
        result.check(max_kl=max_kl)
        finish(folder, report, result)
    for what, figure in result.summary():
        typer.echo(f"{what + ':':<24}{figure}", err=True)
    return report


def check_room(out_dir: str, force: bool, but: str = "") -> None:
    """Raise ValueError if out_dir contains anything except ``but`` and ``force`` is False."""
    if os.path.lexists(out_dir) and not os.path.isdir(out_dir):
        raise ValueError(f"{out_dir} is not a folder")
    there = sorted(set(os.listdir(out_dir)) - {but}) if os.path.isdir(out_dir) else []
    if there and not force:
        some = ", ".join(there[:3]) + (", ..." if len(there) > 3 else "")
        raise ValueError(f"{out_dir} is not empty ({some}); choose another folder, or pass --force")

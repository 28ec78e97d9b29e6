"""``pennyweight quantize --max-kl``: writes a checkpoint, loads and compares it, and keeps it only if the KL passes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from .evaluate import compare_folders

if TYPE_CHECKING:
    from ..planning.report import Report


def run_gated(
    job: Callable[[str], Report], model_dir: str, out_dir: str, force: bool, max_kl: float, text: list[str]
) -> Report:
    """Run ``job(folder)``, which writes a checkpoint, and return its report; out_dir has the files if it passes.

    The files are written to a folder next to out_dir and loaded from there, so the check covers the stored bytes.
    Raises ValueError with the worst layers if the mean KL is above ``max_kl``; then no files remain, and out_dir is
    unchanged.
    """
    from ..io.replace_checkpoint import replacing
    from ..report.load_inputs import load_folder, load_tokenizer, read_texts

    check_room(out_dir, force)
    read_texts(text)  # fail before the work if the comparison cannot run
    load_tokenizer(model_dir)
    exact = load_folder(model_dir)
    with replacing(out_dir) as folder:
        report = job(folder)
        found = load_folder(folder)
        result = compare_folders(exact, found, model_dir, text, 8, 256, 64)
        result.check(max_kl=max_kl)
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

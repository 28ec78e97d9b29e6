"""``pennyweight quantize --max-kl``: a checkpoint is written, loaded, compared, and kept only if it is close enough."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from .evaluate import compare_folders

if TYPE_CHECKING:
    from ..quantize.report import Report


def run_gated(
    job: Callable[[str], Report], model_dir: str, out_dir: str, force: bool, max_kl: float, text: list[str]
) -> Report:
    """The report of ``job(folder)``, which writes a checkpoint; its files are in out_dir when it passed.

    Until then they are in a folder beside it, so what is judged are the bytes that will be served. Raises ValueError,
    naming the worst layers, where the mean KL is above ``max_kl``; then nothing is left behind, and what was in out_dir
    is as it was.
    """
    from ..io.replace_folder import replacing
    from ..report.load_inputs import load_folder, load_tokenizer, read_texts

    check_room(out_dir, force)
    read_texts(text)  # what cannot be judged must not cost the work before it
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
    """Raise ValueError where out_dir holds anything, ``but`` for that name, and may not be replaced."""
    if os.path.lexists(out_dir) and not os.path.isdir(out_dir):
        raise ValueError(f"{out_dir} is no folder")
    there = sorted(set(os.listdir(out_dir)) - {but}) if os.path.isdir(out_dir) else []
    if there and not force:
        some = ", ".join(there[:3]) + (", ..." if len(there) > 3 else "")
        raise ValueError(f"{out_dir} is not empty ({some}); choose another folder, or pass --force")

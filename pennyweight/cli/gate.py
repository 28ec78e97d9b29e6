"""``pennyweight quantize --max-kl``: a checkpoint is written, loaded, compared, and kept only if it is close enough."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from .evaluate import compare_folders

if TYPE_CHECKING:
    from ..models.report import Report


def gated(
    job: Callable[[str], Report], model_dir: str, out_dir: str, force: bool, max_kl: float, text: list[str]
) -> Report:
    """The report of ``job(folder)``, which writes a checkpoint; its files are in out_dir when it passed.

    Until then they are in a folder beside it, so what is judged are the bytes that will be served. Raises ValueError,
    naming the worst layers, where the mean KL is above ``max_kl``; then nothing is left behind, and what was in out_dir
    is as it was.
    """
    from ..report.folders import load_folder, load_tokenizer, read_texts

    check_room(out_dir, force)
    read_texts(text)  # what cannot be judged must not cost the work before it
    load_tokenizer(model_dir)
    exact = load_folder(model_dir)
    with folder_beside(out_dir) as folder:
        report = job(folder)
        found = load_folder(folder)
        result = compare_folders(exact, found, model_dir, text, 8, 256, 64)
        result.check(max_kl=max_kl)
        move(folder, out_dir)
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


@contextmanager
def folder_beside(out_dir: str) -> Iterator[str]:
    """A new folder on the same disk; it is removed, whatever happens."""
    parent, name = os.path.split(os.path.abspath(out_dir))
    made = not os.path.isdir(parent)
    os.makedirs(parent, exist_ok=True)
    folder = tempfile.mkdtemp(prefix=f".{name}.", dir=parent)
    try:
        yield os.path.join(folder, "model")
    finally:
        shutil.rmtree(folder)
        if made and not os.listdir(parent):
            os.rmdir(parent)


def move(folder: str, out_dir: str) -> None:
    """Put the files in their place, weights after all else; a checkpoint that was there is removed first."""
    from ..io.progress import NAME
    from ..io.shards import is_ours, remove_stale

    if not os.path.isdir(out_dir):
        os.rename(folder, out_dir)
        return
    remove_stale(out_dir, ())
    for name in os.listdir(out_dir):  # what an interrupted job left
        if name == NAME or (name.endswith(".partial") and is_ours(name.removesuffix(".partial"))):
            os.unlink(os.path.join(out_dir, name))
    for name in sorted(os.listdir(folder), key=lambda n: (is_ours(n), n.endswith(".json"), n)):
        target = os.path.join(out_dir, name)
        if os.path.isdir(os.path.join(folder, name)):
            os.makedirs(target, exist_ok=True)
            for inner in os.listdir(os.path.join(folder, name)):
                os.replace(os.path.join(folder, name, inner), os.path.join(target, inner))
        else:
            os.replace(os.path.join(folder, name), target)

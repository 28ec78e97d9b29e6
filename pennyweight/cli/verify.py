"""``pennyweight verify``: does a checkpoint give here what it gave where it was made?"""

from __future__ import annotations

from typing import Annotated

import typer

from .errors import Traceback, report_errors

SEQUENCES, LENGTH = 4, 64  # a few prompts: a file of some kilobytes


@report_errors
def verify(
    path: Annotated[str, typer.Argument(metavar="DIR", help="A checkpoint's folder with golden.safetensors.")],
    like: Annotated[
        str,
        typer.Option("--like", metavar="FLOAT_DIR", help="A folder that tells the architecture, where DIR does not."),
    ] = "",
    bound: Annotated[
        float | None,
        typer.Option(
            "--bound", metavar="X", help="Of the mean KL in nats (relative error of tensors), not the file's."
        ),
    ] = None,
    make: Annotated[
        bool, typer.Option("--make", help="Write golden.safetensors: what this checkpoint makes of --text, here.")
    ] = False,
    text: Annotated[
        list[str] | None, typer.Option("--text", metavar="FILE", help="UTF-8 text for --make. Repeatable.")
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Check a checkpoint against its golden outputs.

    The model is loaded and run on the few inputs that the file holds. Fails where its outputs are beyond the bound: the
    files, a kernel or a dtype are not what they were. See docs/report.md.
    """
    if make == (not text):
        raise ValueError("--make and --text go together: what to write is what the model makes of that text")
    if bound is not None and not bound > 0:
        raise ValueError(f"--bound must be positive, got {bound}")
    if make and bound is not None:
        raise ValueError("--bound is for verifying; leave it out with --make")

    from ..report.load_inputs import load_folder, load_tokenizer, read_texts, text_batches
    from ..report.loading import check, expected_beside
    from ..report.loading import make as written

    if make:
        words, tokenizer = read_texts(text or []), load_tokenizer(like or path)
        model = load_folder(path, like)
        batches = text_batches(model, tokenizer, words, batch=SEQUENCES, length=LENGTH, limit=SEQUENCES)
        typer.echo(f"written: {written(model, path, batches)}")
        return
    expected = expected_beside(path)
    typer.echo(str(check(load_folder(path, like), path, expected, bound)))

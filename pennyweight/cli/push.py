"""``pennyweight push``: uploads a checkpoint's folder to the Hugging Face Hub."""

from __future__ import annotations

from typing import Annotated

import typer

from .output import Traceback, report_errors


@report_errors
def push(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A folder with a complete checkpoint.")],
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="org/name; created if missing.")],
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    revision: Annotated[
        str, typer.Option(metavar="BRANCH", help="Commit to this branch, created if missing; default: the main one.")
    ] = "",
    message: Annotated[str, typer.Option(metavar="TEXT", help="Message of the commit.")] = "",
    card: Annotated[
        bool, typer.Option("--card/--no-card", help="Add a model card (README.md) if there is none.")
    ] = True,
    traceback: Traceback = False,
) -> None:
    """Upload a checkpoint to the Hugging Face Hub, in one commit.

    The token is that of hf auth login or HF_TOKEN. See docs/sharing.md.
    """
    from ..io import push_to_hub

    typer.echo(
        push_to_hub(
            folder, repo_id, private=private or None, revision=revision or None, message=message or None, card=card
        )
    )

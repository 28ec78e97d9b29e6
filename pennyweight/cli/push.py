"""``pennyweight push``: uploads a checkpoint's folder to the Hugging Face Hub."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import Json, Message, Private, Revision, Traceback, UploadCard
from .output import check_report_path, report_errors, resume_hint, show

EPILOG = """Examples:
  pennyweight push OUT_DIR you/model-int4 --private
  pennyweight push OUT_DIR you/model-int4 --revision int4-g32 --message 'Groups of 32'"""


@report_errors
def push(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A folder with a complete checkpoint.")],
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="org/name; created if missing.")],
    private: Private = False,
    revision: Revision = "",
    message: Message = "",
    card: UploadCard = True,
    json_path: Json = "",
    traceback: Traceback = False,
) -> None:
    """Upload a checkpoint to the Hugging Face Hub, in one commit.

    The token is that of hf auth login or HF_TOKEN. See docs/sharing.md.
    """
    check_report_path(json_path, None)

    from ..io import push_to_hub

    with resume_hint():  # the commit is made last, and files that the Hub has are not sent again
        url = push_to_hub(
            folder, repo_id, private=private or None, revision=revision or None, message=message or None, card=card
        )
    show({"version": 1, "folder": folder, "repo_id": repo_id, "url": url}, lambda: url, json_path)

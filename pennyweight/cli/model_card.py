"""The model cards that ``pennyweight quantize`` and ``convert`` write."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..planning.quantize_report import Report
    from ..report import Comparison


def write_card(
    folder: str, out_dir: str, wanted: bool, source: tuple[str, str], report: Report, before: int,
    compared: Comparison | None,
) -> None:  # fmt: skip
    """Write the card of a finished folder that will become out_dir; a card there that someone wrote is kept.

    wanted  False: only keep such a card
    source  the model as given on the command line, and its local path
    before  bytes of its files
    """
    from ..io.hub import is_hub_id
    from ..io.model_card import write_card as write

    given, path = source
    base = given.partition("@")[0] if given != path and is_hub_id(given) else ""
    measured = () if compared is None else tuple(compared.summary())
    write(
        folder, source=path, base=base, report=report, bytes_before=before, measured=measured, replaces=out_dir,
        generate=wanted,
    )  # fmt: skip


def renew_card(folder: str, out_dir: str, source: str) -> None:
    """Write the card of a converted folder that will become out_dir, if the source has a generated one."""
    from ..io.model_card import has_generated_card
    from ..io.model_card import write_card as write

    write(folder, source=source, replaces=out_dir, generate=has_generated_card(source))

"""Options that several commands have, each defined once."""

from __future__ import annotations

from typing import Annotated

import typer

from .command import INPUT, MEASURING, OUTPUT, QUANTIZATION, RUN

# -- what to quantize to -----------------------------------------------------------------------------------------------

GroupSize = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Weights that share a scale, for configs with groups.", rich_help_panel=QUANTIZATION
    ),
]

# -- input -------------------------------------------------------------------------------------------------------------

AllowPickle = Annotated[
    bool,
    typer.Option("--allow-pickle", help="Read torch.save files; only from sources you trust.", rich_help_panel=INPUT),
]

# -- measuring on text -------------------------------------------------------------------------------------------------

Texts = Annotated[
    list[str] | None,
    typer.Option(
        "--text", metavar="FILE", help="UTF-8 text to run both models on. Repeatable.", rich_help_panel=MEASURING
    ),
]
Batch = Annotated[int, typer.Option(metavar="N", help="Sequences per call of a model.", rich_help_panel=MEASURING)]
Length = Annotated[int, typer.Option(metavar="N", help="Maximum tokens per sequence.", rich_help_panel=MEASURING)]
Limit = Annotated[
    int,
    typer.Option(
        metavar="N", help="Total sequences, spread evenly over the text; 0 for all.", rich_help_panel=MEASURING
    ),
]
MaxKL = Annotated[
    float | None,
    typer.Option(
        "--max-kl", metavar="NATS", help="Fail and list the worst layers if the mean KL is above this.",
        rich_help_panel=MEASURING,
    ),
]  # fmt: skip

# -- output ------------------------------------------------------------------------------------------------------------

Json = Annotated[
    str,
    typer.Option(
        "--json", metavar="[FILE]", rich_help_panel=OUTPUT,
        help="Write the results as JSON to a file; without FILE, or with -, to stdout in place of the text.",
    ),
]  # fmt: skip
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.", rich_help_panel=OUTPUT)]
MaxShardSize = Annotated[
    str,
    typer.Option(metavar="SIZE", help="Maximum size of a file, such as 500MB or 2GiB.", rich_help_panel=OUTPUT),
]

# -- the run -----------------------------------------------------------------------------------------------------------

Resume = Annotated[
    bool,
    typer.Option("--resume/--no-resume", help="Continue an interrupted run, or start again.", rich_help_panel=RUN),
]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error.", rich_help_panel=RUN)]

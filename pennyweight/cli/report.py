"""``pennyweight report``: writes an HTML report of a quantized model."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Annotated, Any

import typer

from .options import (
    Batch,
    FloatFolder,
    Inputs,
    Json,
    Length,
    Limit,
    MeasureLayers,
    Page,
    Pareto,
    Rounds,
    Speed,
    Texts,
    Traceback,
    Trials,
)
from .output import check_report_path, report_errors, show

MAX_PARETO_BYTES = 1 << 20
EPILOG = """Examples:
  pennyweight report OUT_DIR
  pennyweight report OUT_DIR --float MODEL_DIR --text text.txt -o small.html"""


@report_errors
def report(
    quantized_dirs: Annotated[
        list[str],
        typer.Argument(
            metavar="QUANTIZED_DIR...",
            help="A quantized checkpoint, of any format that inspect reads, or a Hub id; several of one model are "
            "compared.",
        ),
    ],
    float_dir: FloatFolder = "",
    text: Texts = None,
    inputs: Inputs = "",
    out: Page = "report.html",
    measure: MeasureLayers = False,
    speed: Speed = None,
    rounds: Rounds = 5,
    trials: Trials = None,
    pareto: Pareto = "",
    batch: Batch = 8,
    length: Length = 256,
    limit: Limit = 64,
    json_path: Json = "",
    traceback: Traceback = False,
) -> None:
    """Write a report as one self-contained HTML page.

    Shows a verdict with next steps, sizes and schemes; with --float the error of each weight; with --text or --inputs
    the error of outputs and layers. Several quantizations of one model get a leaderboard. See docs/report.md.
    """
    given = "--text" if text else "--inputs" if inputs else "--speed" if speed else "--trials" if trials else ""
    if text and inputs:
        raise ValueError("--text and --inputs are two ways to give the models' inputs; pass one of them")
    if given and not float_dir:
        raise ValueError(f"{given} needs --float: the model with the reference outputs")
    if measure and not float_dir:
        raise ValueError("--measure needs --float: speed is relative to the float model")
    if given in ("--speed", "--trials"):
        raise ValueError(f"{given} runs the models; pass --text or --inputs")
    if rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {rounds}")
    if trials is not None and trials < 0:
        raise ValueError(f"--trials must be at least 0, got {trials}")
    folder = os.path.dirname(os.path.abspath(out))
    if os.path.isdir(out) or not os.path.isdir(folder):
        raise ValueError(f"{out}: {'is a folder' if os.path.isdir(out) else f'folder {folder} does not exist'}")
    check_report_path(json_path, None)
    points = read_points(pareto) if pareto else None

    from ..io import local_path
    from ..io.atomic_write import write_bytes
    from ..report.page import html
    from ..report.page_assembly import gather

    command = _command(
        *quantized_dirs, float=(float_dir, ""), text=(text or [], ""), inputs=(inputs, ""), measure=(measure, False),
        speed=(speed is True, False), trials=(trials, None), rounds=(rounds, 5), pareto=(pareto, ""),
        batch=(batch, 8), length=(length, 256), limit=(limit, 64), out=(out, "report.html"),
        **{"no-speed": (speed is False, False)},
    )  # fmt: skip
    page = gather(
        [local_path(d) for d in quantized_dirs], local_path(float_dir), text or (), command=command, batch=batch,
        length=length, limit=limit or None, inputs=inputs, measure=measure, speed=speed, rounds=rounds, trials=trials,
        pareto=points, notify=_notify,
    )  # fmt: skip
    data = html(page).encode()
    write_bytes(out, data)
    numbers = {**page.to_dict(), "file": out, "file_bytes": len(data)}
    show(numbers, lambda: _summary(page, f"{out}: {len(data):,} bytes"), json_path)


def _summary(page: Any, file: str) -> str:
    lines = [f"{file}, {len(page.models[0].layers)} layers"]
    for model in page.models:
        name = f"{model.name}: " if len(page.models) > 1 else ""
        lines.append(f"{name}{model.verdict.title}: {model.verdict.text}")
    return "\n".join(lines)


def read_points(path: str) -> Any:
    """The JSON of a file with Pareto points."""
    from ..io.strict_json import parse

    with open(path, "rb") as file:
        data = file.read(MAX_PARETO_BYTES + 1)
    try:
        return parse(data, max_bytes=MAX_PARETO_BYTES, max_depth=8, floats=True)
    except ValueError as error:
        raise ValueError(f"--pareto {path}: {error}") from error


def _command(*arguments: Any, **options: Any) -> str:
    """The command that reproduces the page, without options at their defaults."""
    words = ["pennyweight", "report", *map(str, arguments)]
    for name, (value, usual) in options.items():
        flag = "-o" if name == "out" else f"--{name}"
        for one in value if isinstance(value, list) else [value]:
            if one is True:
                words.append(flag)
            elif one is not False and one != usual:
                words += [flag, str(one)]
    return shlex.join(words)


def _notify(text: str) -> None:
    if sys.stderr.isatty():
        typer.echo(f"pennyweight: {text}", err=True)

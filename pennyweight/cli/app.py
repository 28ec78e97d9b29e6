"""The root of the command line. Commands import torch only when they run, so that --help is fast."""

from __future__ import annotations

from typing import Annotated

import typer

from ..planning.configs.aliases import CONFIGS
from .convert import convert
from .doctor import doctor
from .evaluate import evaluate
from .explain import explain
from .export_onnx import export_onnx
from .inspect import inspect
from .push import push
from .quantize import quantize
from .report import report
from .verify import verify

app = typer.Typer(
    name="pennyweight",
    help="Quantize PyTorch checkpoints, convert and inspect them, and measure the quantization loss.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # its frames print all locals, including whole tensors
    rich_markup_mode=None,
    add_completion=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"pennyweight {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


_width = max(map(len, CONFIGS))
_listing = "\n".join(f"{name:<{_width}}  {entry.text}" for name, entry in CONFIGS.items())
# \b prevents rewrapping of the list
app.command(epilog=f"\b\nConfigs:\n{_listing}")(quantize)
for _command in (convert, push, inspect, verify, report, explain, doctor):
    app.command()(_command)
app.command("export-onnx")(export_onnx)
app.command("eval")(evaluate)

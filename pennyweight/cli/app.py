"""The root of the command line. Commands import torch only when they run, so that --help is fast."""

from __future__ import annotations

from typing import Annotated

import typer

from . import (
    chat,
    convert,
    doctor,
    evaluate,
    explain,
    export_onnx,
    generate,
    inspect,
    push,
    quantize,
    report,
    verify,
)
from .command import Command, Commands, JsonFirst

EPILOG = """Examples:
  pennyweight quantize Qwen/Qwen3-0.6B small --config int4
  pennyweight inspect small
  pennyweight chat small
  pennyweight convert small small.gguf --to gguf --type Q4_K_M

pennyweight COMMAND --help shows the options of a command, with examples.

Exit codes: 0 done; 1 doctor found a problem, or the reader of the output went away; 2 an error, on one line of stderr;
130 interrupted (Ctrl-C), 143 terminated."""

app = typer.Typer(
    name="pennyweight",
    cls=Commands,
    help="Quantize PyTorch checkpoints, convert and inspect them, and measure the quantization loss.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # its frames print all locals, including whole tensors
    rich_markup_mode=None,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from ..support.version import __version__

        typer.echo(f"pennyweight {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("-V", "--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


MAKE, LOOK, RUN, MEASURE = "Make files", "Look at files", "Run a language model", "Measure"
for _heading, _name, _module, _run in (
    (MAKE, "quantize", quantize, quantize.quantize),
    (MAKE, "convert", convert, convert.convert),
    (MAKE, "export-onnx", export_onnx, export_onnx.export_onnx),
    (MAKE, "push", push, push.push),
    (LOOK, "inspect", inspect, inspect.inspect),
    (LOOK, "explain", explain, explain.explain),
    (RUN, "chat", chat, chat.chat),
    (RUN, "generate", generate, generate.generate),
    (MEASURE, "eval", evaluate, evaluate.evaluate),
    (MEASURE, "report", report, report.report),
    (MEASURE, "verify", verify, verify.verify),
    (MEASURE, "doctor", doctor, doctor.doctor),
):
    _class = JsonFirst if _name == "inspect" else Command
    # \b marks what is printed as it is, for the help and for the page of docs/
    _epilog = "\n\n".join(f"\b\n{part}" for part in _module.EPILOG.split("\n\n"))
    app.command(_name, cls=_class, epilog=_epilog, rich_help_panel=_heading)(_run)

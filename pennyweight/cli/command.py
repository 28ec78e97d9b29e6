"""The classes of commands: options under headings, examples, and ``--json`` with an optional value."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

# Headings of options, in the order of the help
QUANTIZATION, INPUT, GENERATION, MEASURING = "Quantization", "Input", "Generation", "Measuring"
OUTPUT, RUN = "Output", "Run"
_HEADINGS = ("Arguments", QUANTIZATION, INPUT, GENERATION, MEASURING, OUTPUT, RUN, "Options")

# options of other libraries' commands -> the parameter that is meant, and what to write
_ELSEWHERE = {
    (option, parameter): remedy
    for options, parameter, remedy in (
        ("--bits --wbits --w-bit --w_bit --qtype --scheme", "config", "bits are part of the config: --config int4"),
        ("--groupsize --group_size --q-group-size --q_group_size", "group_size", "write --group-size 64"),
        ("--output --output-dir --out-dir --outfile --save-dir", "out_dir", "the output is an argument, OUT_DIR"),
        ("--output --output-dir --out-dir --outfile --save-dir", "dst", "the output is an argument, DST"),
        ("--model --model-dir --model-path", "model_dir", "the model is an argument, MODEL_DIR"),
        ("--dataset --calib --calib-data", "calibration", "write --calibration FILE"),
        ("--outtype --quant-type", "gguf_type", "write --type q4_k_m"),
        ("--n-predict --max-tokens --max_new_tokens", "max_new_tokens", "write --max-new-tokens 64"),
    )
    for option in options.split()
}


class Command(TyperCommand):
    """A command. ``rich_help_panel`` of an option is its heading; ``epilog`` is printed as it is, for examples.

    ``--json`` at the end or before another option writes to stdout.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, _with_value(args))
        except Exception as error:  # the class of such errors has moved between releases of typer
            option = str(getattr(error, "option_name", ""))
            for remedy in filter(None, (_ELSEWHERE.get((option, str(p.name))) for p in self.get_params(ctx))):
                error.message = f"{getattr(error, 'message', error)}; {remedy}"  # type: ignore[attr-defined]
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {heading: [] for heading in _HEADINGS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                heading = getattr(param, "rich_help_panel", None) or "Options"
                sections["Arguments" if param.param_type_name == "argument" else heading].append(record)
        _write_sections(formatter, sections)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_epilog(self.epilog, formatter)


class JsonFirst(Command):
    """A command whose ``--json`` may also precede its only argument: ``inspect --json FOLDER``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = _with_value(args)
        try:
            return super().parse_args(ctx, list(given))
        except typer.BadParameter as error:  # --json took the argument as its value
            at = given.index("--json") + 1 if "--json" in given else 0
            taken = at and given[at] != "-" and error.param is not None and error.param.param_type_name == "argument"
            if not taken:
                raise
        ctx.params.clear()
        return super().parse_args(ctx, [*given[:at], "-", *given[at:]])


class Commands(TyperGroup):
    """The root of the commands; ``rich_help_panel`` of a command is its heading."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        names = self.list_commands(ctx)
        room = formatter.width - 6 - max(map(len, names))
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in names:
            command: Any = self.get_command(ctx, name)
            sections.setdefault(command.rich_help_panel, []).append((name, command.get_short_help_str(room)))
        _write_sections(formatter, sections)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_epilog(self.epilog, formatter)


def _with_value(args: list[str]) -> list[str]:
    """The arguments, with "-" after a ``--json`` that ends them or precedes another option."""
    out: list[str] = []
    for i, arg in enumerate(args):
        out.append(arg)
        following = args[i + 1] if i + 1 < len(args) else "--"
        if arg == "--json" and following.startswith("-") and following != "-":
            out.append("-")
    return out


def _write_sections(formatter: Any, sections: dict[str, list[tuple[str, str]]]) -> None:
    for heading, rows in sections.items():
        if rows:
            with formatter.section(heading):
                formatter.write_dl(rows)


def _write_epilog(text: str | None, formatter: Any) -> None:
    if text:
        plain = text.replace("\b\n", "").strip()
        formatter.write(f"\n{plain}\n")

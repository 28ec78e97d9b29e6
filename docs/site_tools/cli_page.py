"""The reference of the command line, from the typer app."""

from __future__ import annotations

import re
import textwrap
from typing import Any

MARK = "<!-- commands -->"  # docs/reference/cli.md: replaced by the commands
_SPECIAL = re.compile(r"([*_\[\]<>|`])")


def commands() -> list[tuple[str, Any, Any]]:
    """(full name, command, context) of the program and of each of its commands, in the order of --help."""
    import typer

    from pennyweight.cli.app import app

    def walk(name: str, command: Any, parent: Any) -> list[tuple[str, Any, Any]]:
        context = command.context_class(command, info_name=name.rpartition(" ")[2], parent=parent)
        found = [(name, command, context)]
        for child in command.list_commands(context) if hasattr(command, "list_commands") else []:
            inner = command.get_command(context, child)
            if not inner.hidden:
                found += walk(f"{name} {child}", inner, context)
        return found

    return walk("pennyweight", typer.main.get_command(app), None)


def _text(text: str) -> str:
    r"""Help as Markdown. Paragraphs after \b are not rewrapped by --help: they become code."""
    out = []
    for paragraph in re.split(r"\n\s*\n", textwrap.dedent(text.strip("\n"))):
        if paragraph.lstrip().startswith("\b"):
            body = paragraph.split("\n", 1)[1]
            heading, _, rest = body.partition("\n")
            if heading.endswith(":") and rest:
                out.append(_SPECIAL.sub(r"\\\1", heading.strip()))
                body = rest
            out.append(f"```text\n{textwrap.dedent(body)}\n```")
        else:
            out.append(_SPECIAL.sub(r"\\\1", paragraph))
    return "\n\n".join(out)


def _anchor(name: str, option: str) -> str:
    return f"{name}-{option.strip('-')}".replace(" ", "-").lower()


def _parameters(name: str, command: Any, context: Any) -> str:
    """Arguments and options as definition lists."""
    groups: dict[str, list[str]] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None:  # hidden
            continue
        label, text = record
        kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
        body = textwrap.indent(_text(text), "  ").strip() or "No description."
        groups[kind].append(f"({_anchor(name, parameter.opts[0])})=\n\n`{label}`\n: {body}")
    return "\n\n".join(f"**{kind}**\n\n" + "\n\n".join(found) for kind, found in groups.items() if found)


def page() -> str:
    """Markdown with a section for each command."""
    out = []
    for name, command, context in commands():
        usage = " ".join([name, *command.collect_usage_pieces(context)])
        parts = [f"## `{name}`", _text(command.help or ""), f"```console\n$ {usage}\n```"]
        if hasattr(command, "list_commands"):
            rows = [
                f"| [`{child}`](#{f'{name} {child}'.replace(' ', '-')}) | "
                f"{_text(command.get_command(context, child).get_short_help_str(200))} |"
                for child in command.list_commands(context)
                if not command.get_command(context, child).hidden
            ]
            parts.append("\n".join(["| command | what it does |", "|---|---|", *rows]))
        parts += [_parameters(name, command, context), _text(getattr(command, "epilog", None) or "")]
        out.append("\n\n".join(part for part in parts if part))
    return "\n\n".join(out)


def _insert(app: Any, docname: str, source: list[str]) -> None:
    if MARK in source[0]:
        source[0] = source[0].replace(MARK, page())


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", _insert)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

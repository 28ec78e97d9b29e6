"""The command line: quantize, convert, eval, report and others. Imports torch only when a command runs."""


def main() -> None:
    """Entry point of the ``pennyweight`` command."""
    from .app import app

    app(prog_name="pennyweight")

"""The ``transformers`` command with the method "pennyweight" registered.

    python -m pennyweight.integrations.transformers serve FOLDER

accepts all arguments of ``transformers``. The command itself imports no third-party packages, so it needs this wrapper
to serve folders in our own format; see docs/integrations.md for the formats it reads by itself.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

from ...support.extras import install


def main() -> None:
    """Run the console script of transformers in this process, with pennyweight imported."""
    found = entry_points(group="console_scripts", name="transformers")
    if not found:
        sys.exit(f"transformers is not installed: {install('hf')} 'transformers[serving]'")
    sys.exit(next(iter(found)).load()())


if __name__ == "__main__":
    main()

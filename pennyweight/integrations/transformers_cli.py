"""The command ``transformers`` with the method "pennyweight" known to it.

    python -m pennyweight.integrations.transformers_cli serve FOLDER

takes every argument that ``transformers`` takes. The command itself imports no third party, so it serves folders in
our own format only through this; see docs/integrations.md for those that it reads by itself.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points


def main() -> None:
    """Run the console script of transformers in this process, which has imported pennyweight."""
    found = entry_points(group="console_scripts", name="transformers")
    if not found:
        sys.exit("transformers is not installed: pip install 'pennyweight[hf]' 'transformers[serving]'")
    sys.exit(next(iter(found)).load()())


if __name__ == "__main__":
    main()

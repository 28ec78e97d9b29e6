"""Other libraries' names over ours. Nothing below this folder knows of it."""

from .install import install, uninstall

__all__ = ["install", "uninstall"]

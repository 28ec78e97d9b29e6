"""Compatibility layers: other libraries' names over ours. No other package imports this one."""

from .install import install, uninstall

__all__ = ["install", "uninstall"]

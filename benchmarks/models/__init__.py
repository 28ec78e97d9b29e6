"""Whole models on a CPU, through pennyweight and through what else users would take; see __main__.py."""

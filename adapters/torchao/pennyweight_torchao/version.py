"""Versions of this package and of torchao."""

TORCHAO = "0.18.0"  # the newest release whose names and numbers were compared
VERSION = f"{TORCHAO}.1"  # that release, then a number of our own

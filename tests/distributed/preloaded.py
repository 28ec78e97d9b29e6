"""Imported by the process from which ranks are forked, after all else: see group.py.

Ranks find compilers imported, and do not copy what they collect no garbage of.
"""

import gc

import torch._dynamo
import torch._inductor  # noqa: F401

gc.freeze()

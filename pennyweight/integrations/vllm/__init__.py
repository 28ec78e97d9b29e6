"""The vLLM plug-in: ``vllm serve FOLDER`` for native checkpoints, ``--quantization pennyweight-int4`` for float ones.

vLLM calls :func:`register` in each of its processes (entry point group ``vllm.general_plugins``). It adds

- the quantization method "pennyweight" for quantized folders. ``quantization="pennyweight"`` also loads other formats
  that :func:`pennyweight.open` reads (GPTQ, AWQ, compressed-tensors, ...) onto our kernels;
- one method per short config name, such as "pennyweight-int8-dynamic", which quantizes a float model while it is
  loaded. Any other config is given by ``hf_overrides``, see :class:`.config.PennyweightVllmConfig`;
- a weight loader for these methods. All others keep vLLM's own.

Written against vLLM 0.32.
"""

from __future__ import annotations

import importlib

from ...support.import_hooks import after_import


def register() -> None:
    """Register the methods and the loader with vLLM. May be called more than once."""
    importlib.import_module(f"{__name__}.config").register()
    # When vLLM imports its loaders, and not now: they are most of its start-up time.
    after_import("vllm.model_executor.model_loader", _register_loader)


def _register_loader() -> None:
    importlib.import_module(f"{__name__}.loader").register()

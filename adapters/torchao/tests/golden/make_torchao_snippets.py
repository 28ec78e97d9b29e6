"""Write torchao_snippets_<version>.safetensors and .json: what the snippets of a user give in the real library.

    PYTHONPATH=<site-packages with one release> python tests/golden/make_torchao_snippets.py

The snippets are in adapters/torchao/tests/snippets; each names the release that it is of. torchao 0.12 does not import
under torch 2.13 without :func:`without_fusion_passes`. A snippet that the real library cannot run on a CPU is kept in
the section "cannot", with its error. Equal tensors are stored once.
"""

import hashlib
import importlib.metadata
import json
import logging
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
VERSION = ".".join(importlib.metadata.version("torchao").split(".")[:2])
logging.disable(logging.WARNING)
torch.set_num_threads(1)


def without_fusion_passes() -> None:
    """An empty stand-in for a module of torchao 0.12 that fails to import."""
    empty = types.ModuleType("torchao.prototype.inductor.int8_sdpa_lowering")
    empty.register_int8_sdpa = lambda *args, **kwargs: None
    sys.modules.setdefault(empty.__name__, empty)


if VERSION == "0.12":
    without_fusion_passes()

import torchao  # noqa: E402

from adapters.torchao.tests.snippets import table  # noqa: E402

tensors: dict[str, torch.Tensor] = {}
by_content: dict[tuple, str] = {}


def stored(value):
    if isinstance(value, list):
        return [stored(v) for v in value]
    if not isinstance(value, torch.Tensor):
        return value
    dtype = str(value.dtype).removeprefix("torch.")
    raw = value.reshape(-1).contiguous().view(torch.uint8)
    digest = hashlib.sha256(raw.numpy().tobytes()).hexdigest()
    key = by_content.setdefault((digest, dtype, tuple(value.shape)), f"t{len(by_content)}")
    tensors[key] = value.contiguous()
    return {"tensor": key}


results, cannot = {}, {}
for name, one in sorted(table.load().items()):
    if one.release != VERSION:
        continue
    try:
        results[name] = {role: stored(value) for role, value in table.run(name).items()}
    except Exception as error:
        cannot[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        print(name, cannot[name])

save_file(tensors, HERE / f"torchao_snippets_{VERSION}.safetensors")
head = {"torchao": torchao.__version__, "torch": torch.__version__.split("+")[0]}
lines = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
for title, entries in (("results", results), ("cannot", cannot)):
    rows = (f"  {json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in entries.items())
    lines.append(f' "{title}": {{\n' + ",\n".join(rows) + "\n }")
(HERE / f"torchao_snippets_{VERSION}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
print(f"{len(results)} results, {len(cannot)} cannot run, {len(tensors)} tensors")

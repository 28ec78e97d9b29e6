"""Who is measured: one family a file, each optional. `FAMILIES` is the registry."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Family:
    """Competitors that share a process.

    module  its file here, with ``competitors(threads)`` and ``versions()``
    needs   packages it imports
    """

    name: str
    module: str
    needs: tuple[str, ...] = ()
    install: str = ""

    def missing(self) -> str | None:
        """What to install, or None where the family can run."""
        absent = [p for p in self.needs if importlib.util.find_spec(p) is None]
        if not absent:
            return None
        return f"{', '.join(absent)} not installed; pip install {self.install}, or the extra pennyweight[bench]"

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


FAMILIES = {
    f.name: f
    for f in (
        Family("limits", "benchmarks.limits"),
        Family("torch", "benchmarks.peers.torch_peer"),
        Family("pennyweight", "benchmarks.peers.pennyweight_peer"),
        Family("torchao", "benchmarks.peers.torchao_peer", ("torchao",), "torchao"),
        Family("onnxruntime", "benchmarks.peers.onnxruntime_peer", ("onnxruntime", "onnx"), "onnxruntime onnx"),
        Family("openvino", "benchmarks.peers.openvino_peer", ("openvino",), "openvino"),
        Family("llamacpp", "benchmarks.peers.llamacpp_peer", ("llama_cpp",), "llama-cpp-python"),
    )
}
BASELINE = "torch bf16 F.linear"

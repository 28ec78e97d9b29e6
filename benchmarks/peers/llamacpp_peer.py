"""llama.cpp: ggml's `mul_mat` out of llama-cpp-python, by ctypes; one graph holds all copies; float32 in and out.

Weights lie in the buffer type that llama.cpp itself would take: interleaved rows ("repack") where ggml has them for the
type and this CPU, plain blocks otherwise. Its activations become int8 in blocks of 32 (Q4_0, Q8_0) or 256 (Q4_K).
"""

from __future__ import annotations

import ctypes as C
from pathlib import Path

import llama_cpp
import torch
from torch import Tensor

from .base import Bind, Competitor, Run, rolled

FAMILY = "llamacpp"
SMALL_ROWS = 64  # above, two copies are enough: the time to read a weight is lost in the time to compute
TYPES = {"Q4_0": 2, "Q8_0": 8, "Q4_K": 12}  # enum ggml_type
F32 = 0


class _Params(C.Structure):
    """struct ggml_init_params"""

    _fields_ = (("mem_size", C.c_size_t), ("mem_buffer", C.c_void_p), ("no_alloc", C.c_bool))


P, I64, INT, SIZE = C.c_void_p, C.c_int64, C.c_int, C.c_size_t
PROTOTYPES = {
    "ggml_init": (P, [_Params]),
    "ggml_free": (None, [P]),
    "ggml_new_tensor_2d": (P, [P, INT, I64, I64]),
    "ggml_mul_mat": (P, [P, P, P]),
    "ggml_new_graph_custom": (P, [P, SIZE, C.c_bool]),
    "ggml_build_forward_expand": (None, [P, P]),
    "ggml_graph_overhead_custom": (SIZE, [SIZE, C.c_bool]),
    "ggml_tensor_overhead": (SIZE, []),
    "ggml_nbytes": (SIZE, [P]),
    "ggml_quantize_chunk": (SIZE, [INT, P, P, I64, I64, I64, P]),
    "ggml_version": (C.c_char_p, []),
    "ggml_backend_alloc_ctx_tensors_from_buft": (P, [P, P]),
    "ggml_backend_buffer_free": (None, [P]),
    "ggml_backend_tensor_set": (None, [P, P, SIZE, SIZE]),
    "ggml_backend_tensor_get": (None, [P, P, SIZE, SIZE]),
    "ggml_backend_graph_compute": (INT, [P, P]),
    "ggml_backend_dev_supports_op": (C.c_bool, [P, P]),
    "ggml_backend_reg_get_proc_address": (P, [P, C.c_char_p]),
    "ggml_backend_reg_dev_get": (P, [P, SIZE]),
    "ggml_backend_dev_init": (P, [P, C.c_char_p]),
    "ggml_backend_cpu_reg": (P, []),
    "ggml_backend_cpu_buffer_type": (P, []),
    "ggml_backend_buft_name": (C.c_char_p, [P]),
    "ggml_backend_cpu_set_n_threads": (None, [P, INT]),
}


class Ggml:
    """The library's functions with their prototypes, a CPU backend, and its buffer types, best first."""

    def __init__(self, threads: int) -> None:
        folder = Path(llama_cpp.__file__).parent / "lib"
        found = [sorted(folder.glob(f"*{name}.*")) for name in ("ggml-base", "ggml-cpu")]
        libraries = [C.CDLL(str(paths[0]), mode=C.RTLD_GLOBAL) for paths in found]
        for name, (result, arguments) in PROTOTYPES.items():
            function = next(getattr(lib, name) for lib in libraries if hasattr(lib, name))
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        registry = self.ggml_backend_cpu_reg()
        self.device = self.ggml_backend_reg_dev_get(registry, 0)
        self.backend = self.ggml_backend_dev_init(self.device, None)
        self.ggml_backend_cpu_set_n_threads(self.backend, threads)
        self.plain = self.ggml_backend_cpu_buffer_type()
        address = self.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        extra = C.CFUNCTYPE(C.POINTER(P), P)(address)(self.device) if address else None
        self.buffer_types = []
        while extra and extra[len(self.buffer_types)]:
            self.buffer_types.append(extra[len(self.buffer_types)])
        self.buffer_types.append(self.plain)

    def context(self, tensors: int, graph: int = 0) -> int:
        size = self.ggml_tensor_overhead() * (tensors + 8)
        if graph:
            size += self.ggml_graph_overhead_custom(graph, False) + 65536
        return self.ggml_init(_Params(size, None, True))

    def weights(self, kind: int, codes: list[Tensor], n: int, k: int) -> Weights:
        """Tensors of a type in the first buffer type whose matrix product the device supports, as llama.cpp does."""
        for buffer_type in self.buffer_types:
            context = self.context(len(codes))
            tensors = [self.ggml_new_tensor_2d(context, kind, k, n) for _ in codes]
            buffer = self.ggml_backend_alloc_ctx_tensors_from_buft(context, buffer_type)
            if buffer and self._multiplies(tensors[0], k):
                for t, data in zip(tensors, codes, strict=True):
                    self.ggml_backend_tensor_set(t, data.data_ptr(), 0, data.numel())
                return Weights(self, tensors, (context, buffer), n, k)
            if buffer:
                self.ggml_backend_buffer_free(buffer)
            self.ggml_free(context)
        raise ValueError(f"ggml has no product for type {kind}")

    def _multiplies(self, weight: int, k: int) -> bool:
        context = self.context(4)
        y = self.ggml_mul_mat(context, weight, self.ggml_new_tensor_2d(context, F32, k, 512))
        fits = self.ggml_backend_dev_supports_op(self.device, y)
        self.ggml_free(context)
        return fits


class Weights:
    """Copies of a weight; calling it binds an input."""

    def __init__(self, ggml: Ggml, tensors: list[int], owned: tuple[int, int], n: int, k: int) -> None:
        self.ggml, self.tensors, self.owned, self.n, self.k = ggml, tensors, owned, n, k

    def __del__(self) -> None:
        self.ggml.ggml_backend_buffer_free(self.owned[1])
        self.ggml.ggml_free(self.owned[0])

    def __call__(self, x: Tensor) -> Run:
        count = len(self.tensors) if x.shape[0] <= SMALL_ROWS else 2
        graph = Graph(self, x.float().contiguous(), count)
        return Run(graph.compute, 1, graph.read, count, count, 1)


class Graph:
    """y[i] = x @ weight[i].T for the first `count` copies."""

    def __init__(self, weights: Weights, x: Tensor, count: int) -> None:
        g = self.ggml = weights.ggml
        self.weights, self.m = weights, x.shape[0]
        size = max(64, 4 * count)
        self.context = g.context(count + 1, size)
        held = g.ggml_new_tensor_2d(self.context, F32, weights.k, self.m)
        self.outputs = [g.ggml_mul_mat(self.context, w, held) for w in weights.tensors[:count]]
        self.buffer = g.ggml_backend_alloc_ctx_tensors_from_buft(self.context, g.plain)
        g.ggml_backend_tensor_set(held, x.data_ptr(), 0, x.nbytes)
        self.graph = g.ggml_new_graph_custom(self.context, size, False)
        for y in self.outputs:
            g.ggml_build_forward_expand(self.graph, y)

    def __del__(self) -> None:
        self.ggml.ggml_backend_buffer_free(self.buffer)
        self.ggml.ggml_free(self.context)

    def compute(self, i: int = 0) -> None:
        if self.ggml.ggml_backend_graph_compute(self.ggml.backend, self.graph):
            raise RuntimeError("ggml_backend_graph_compute failed")

    def read(self, some: list[int]) -> list[Tensor]:
        """Compute, and copy out."""
        self.compute()
        ys = [torch.empty(self.m, self.weights.n) for _ in some]
        for i, y in zip(some, ys, strict=True):
            self.ggml.ggml_backend_tensor_get(self.outputs[i], y.data_ptr(), 0, y.nbytes)
        return ys


_LIBRARY: dict[int, Ggml] = {}


def _ggml(threads: int) -> Ggml:
    if threads not in _LIBRARY:
        _LIBRARY[threads] = Ggml(threads)
    return _LIBRARY[threads]


def versions() -> dict[str, str]:
    return {"llama-cpp-python": llama_cpp.__version__, "ggml": _ggml(1).ggml_version().decode()}


def _make(kind: str, threads: int):
    def make(weight: Tensor, copies: int) -> Bind:
        g, (n, k) = _ggml(threads), weight.shape
        w, row = weight.float().contiguous(), int(k * BITS[kind] / 8)
        codes = torch.empty(n, row, dtype=torch.uint8)
        g.ggml_quantize_chunk(TYPES[kind], w.data_ptr(), codes.data_ptr(), 0, n, k, None)
        return g.weights(TYPES[kind], [rolled(codes, i) for i in range(copies)], n, k)

    return make


BITS = {"Q4_0": 4.5, "Q8_0": 8.5, "Q4_K": 4.5}
BOUNDS = {"Q4_0": 0.1, "Q8_0": 0.011, "Q4_K": 0.085}


def _blocks(kind: str):
    block = 256 if kind == "Q4_K" else 32
    return lambda n, k, m: k % block == 0 or f"{kind} wants whole blocks of {block}"


def competitors(threads: int) -> list[Competitor]:
    return [
        Competitor(
            f"llama.cpp {kind}", FAMILY, int(BITS[kind]), BITS[kind], "int8", BOUNDS[kind], _make(kind, threads),
            _blocks(kind),
        )
        for kind in TYPES
    ]  # fmt: skip

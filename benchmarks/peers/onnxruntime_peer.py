"""onnxruntime: one graph holds all copies and runs them one after another; float32 in and out.

The copies differ in content: onnxruntime merges initializers that are equal. `accuracy_level` 4 quantizes activations
to int8 in blocks of the weight's group, 0 computes in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime as ort
import torch
from onnx import NodeProto, TensorProto, helper
from torch import Tensor

from .base import Bind, Competitor, Run

FAMILY = "onnxruntime"
SMALL_ROWS = 64  # above, two copies are enough: the time to read a weight is lost in the time to compute
DOMAIN = "com.microsoft"
Arrays = dict[str, np.ndarray]


def versions() -> dict[str, str]:
    return {"onnxruntime": ort.__version__}


class Graphs:
    """Sessions from x [M, K] to y0, y1, ..., one product for each copy, by the number of copies.

    copy(i) -> (node, its initializers by name). Weights are handed over in memory: a file of them may exceed 2 GB.
    """

    def __init__(self, copy: Callable[[int], tuple[NodeProto, Arrays]], n: int, k: int, copies: int, threads: int):
        self.copy, self.n, self.k, self.copies, self.threads = copy, n, k, copies, threads
        self.made: dict[int, tuple[ort.InferenceSession, list[ort.OrtValue]]] = {}

    def session(self, count: int) -> ort.InferenceSession:
        if count not in self.made:
            self.made[count] = self._make(count)
        return self.made[count][0]

    def _make(self, count: int) -> tuple[ort.InferenceSession, list[ort.OrtValue]]:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self.threads, 1
        options.log_severity_level = 3
        nodes, declared, values = [], [], []
        for i in range(count):
            node, arrays = self.copy(i)
            nodes.append(node)
            for name, array in arrays.items():
                kind = helper.np_dtype_to_tensor_dtype(array.dtype)
                t = TensorProto(name=name, data_type=kind, dims=array.shape, data_location=TensorProto.EXTERNAL)
                t.external_data.add(key="location", value="memory")
                declared.append(t)
                values.append(ort.OrtValue.ortvalue_from_numpy(array))
        options.add_external_initializers([t.name for t in declared], values)
        floats = helper.make_tensor_value_info
        outputs = [floats(f"y{i}", TensorProto.FLOAT, ["m", self.n]) for i in range(count)]
        graph = helper.make_graph(nodes, "linear", [floats("x", TensorProto.FLOAT, ["m", self.k])], outputs, declared)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]), values

    def __call__(self, x: Tensor) -> Run:
        count = self.copies if x.shape[0] <= SMALL_ROWS else 2
        session, feed = self.session(count), {"x": x.float().numpy()}
        io = session.io_binding()
        io.bind_cpu_input("x", feed["x"])
        for i in range(count):
            io.bind_output(f"y{i}")
        outputs = lambda some: [torch.from_numpy(y) for y in session.run([f"y{i}" for i in some], feed)]  # noqa: E731
        return Run(lambda i: session.run_with_iobinding(io), 1, outputs, count, count, 1)


def _codes(weight: Tensor, bits: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric codes packed as MatMulNBits wants them [N, K/group, group*bits/8], and scales [N, K/group]."""
    half = 1 << (bits - 1)
    w = weight.float().unflatten(1, (-1, group))
    extreme = w.gather(2, w.abs().argmax(2, keepdim=True))  # its sign takes the code -half, which has no opposite
    scale = extreme / -half
    q = ((w / scale).round() + half).clamp(0, 2 * half - 1).to(torch.uint8)
    if bits == 4:
        q = q[..., ::2] | (q[..., 1::2] << 4)
    return q.numpy(), scale.squeeze(2).numpy()


def _nbits(bits: int, group: int, level: int, threads: int):
    def make(weight: Tensor, copies: int) -> Bind:
        n, k = weight.shape
        codes, scale = _codes(weight, bits, group)
        fields = {"N": n, "K": k, "bits": bits, "block_size": group, "accuracy_level": level}

        def copy(i: int) -> tuple[NodeProto, Arrays]:
            arrays = {f"codes{i}": np.roll(codes, i, 0), f"scale{i}": np.roll(scale, i, 0)}
            return helper.make_node("MatMulNBits", ["x", *arrays], [f"y{i}"], domain=DOMAIN, **fields), arrays

        return Graphs(copy, n, k, copies, threads)

    return make


def _dynamic(threads: int):
    """Its fused form of DynamicQuantizeLinear and MatMulInteger: one activation scale for the whole input."""

    def make(weight: Tensor, copies: int) -> Bind:
        n, k = weight.shape
        w = weight.float()
        scale = w.abs().amax(1) / 127
        codes = (w / scale[:, None]).round().to(torch.int8).numpy()

        def copy(i: int) -> tuple[NodeProto, Arrays]:
            columns = np.ascontiguousarray(np.roll(codes, i, 0).T)
            arrays = {f"codes{i}": columns, f"scale{i}": np.roll(scale.numpy(), i, 0)}
            return helper.make_node("DynamicQuantizeMatMul", ["x", *arrays], [f"y{i}"], domain=DOMAIN), arrays

        return Graphs(copy, n, k, copies, threads)

    return make


def competitors(threads: int) -> list[Competitor]:
    rows = (
        ("MatMulNBits int4 g32 level 4", 4, 5, "int8", 0.1, 4, 32),
        ("MatMulNBits int4 g128 level 4", 4, 4.25, "int8", 0.12, 4, 128),
        ("MatMulNBits int4 g32 level 0", 4, 5, "fp32", 0.1, 0, 32),
        ("MatMulNBits int4 g128 level 0", 4, 4.25, "fp32", 0.12, 0, 128),
        ("MatMulNBits int8 g128 level 4", 8, 8.25, "int8", 0.017, 4, 128),
    )
    return [
        *(
            Competitor(f"onnxruntime {name}", FAMILY, *fields, _nbits(fields[0], group, level, threads))
            for name, *fields, level, group in rows
        ),
        Competitor(
            "onnxruntime DynamicQuantizeMatMul", FAMILY, 8, 8, "int8", 0.02, _dynamic(threads),
            detail="per tensor, float32 in and out",
        ),
    ]  # fmt: skip

"""OpenVINO: compressed weights in the form its own tools write; one graph holds all copies; float32 in and out.

Constants of 4 bits are views of numpy memory, which must outlive the model. Its CPU plugin computes in bf16 where it
can, or with activations quantized to int8 in groups ("dynamic quantization").
"""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino.opset13 as op
import torch
from torch import Tensor

from .base import Bind, Competitor, Run

FAMILY = "openvino"
SMALL_ROWS = 64  # above, two copies are enough: the time to read a weight is lost in the time to compute


def versions() -> dict[str, str]:
    return {"openvino": ov.__version__}


def _codes(weight: Tensor, bits: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes (bytes; two 4-bit ones in each) [N, K/group, ..], centred on 8 where of 4 bits; scales [N, K/group, 1]."""
    w = weight.float().unflatten(1, (-1, group))
    if bits == 8:
        scale = w.abs().amax(2, keepdim=True) / 127
        return (w / scale).round().to(torch.int8).numpy(), scale.half().numpy()
    scale = w.gather(2, w.abs().argmax(2, keepdim=True)) / -8
    q = ((w / scale).round() + 8).clamp(0, 15).to(torch.uint8)
    return (q[..., ::2] | (q[..., 1::2] << 4)).numpy(), scale.half().numpy()


def _make(bits: int, group: int, dynamic: int, threads: int):
    def make(weight: Tensor, copies: int) -> Bind:
        n, k = weight.shape
        blocks = group or k
        codes, scale = _codes(weight, bits, blocks)
        core, kept, compiled = ov.Core(), [], {}
        options = {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": dynamic,
        }

        def product(x: ov.Node, i: int) -> ov.Node:
            data = np.ascontiguousarray(np.roll(codes, i, 0))
            kept.append(data)
            shape = [n, k // blocks, blocks] if group else [n, k]
            if bits == 4:
                node = op.constant(ov.Tensor(data, shape, ov.Type.u4), shared_memory=True)
                node = op.convert(node, "f16")
                middle = np.full((n * (k // blocks) + 1) // 2, 0x88, np.uint8)
                kept.append(middle)
                zero = op.constant(ov.Tensor(middle, [n, k // blocks, 1], ov.Type.u4), shared_memory=True)
                node = op.subtract(node, op.convert(zero, "f16"))
            else:
                node = op.convert(op.constant(data.reshape(shape), shared_memory=True), "f16")
            steps = np.ascontiguousarray(np.roll(scale, i, 0)).reshape([n, k // blocks, 1] if group else [n, 1])
            node = op.multiply(node, op.constant(steps))
            if group:
                node = op.reshape(node, op.constant(np.array([n, k])), False)
            return op.matmul(x, op.convert(node, "f32"), False, True)

        def model(count: int) -> ov.CompiledModel:
            if count not in compiled:
                x = op.parameter([-1, k], np.float32)
                graph = ov.Model([op.result(product(x, i)) for i in range(count)], [x])
                compiled[count] = core.compile_model(graph, "CPU", options)
            return compiled[count]

        def bind(x: Tensor) -> Run:
            count = copies if x.shape[0] <= SMALL_ROWS else 2
            request = model(count).create_infer_request()
            held = x.float().numpy()
            request.set_input_tensor(ov.Tensor(held, shared_memory=True))

            def outputs(some: list[int]) -> list[Tensor]:
                request.infer()
                return [torch.from_numpy(request.get_output_tensor(i).data.copy()) for i in some]

            # the numpy memory lives as long as the closure does
            return Run(lambda i, kept=(kept, held): request.infer(), 1, outputs, count, count, 1)

        return bind

    return make


def competitors(threads: int) -> list[Competitor]:
    rows = (
        ("int4 g32", 4, 4.625, "int8", 0.1, 32, 32),
        ("int4 g128", 4, 4.16, "int8", 0.12, 128, 128),
        ("int4 g128 float activations", 4, 4.16, "bf16", 0.12, 128, 0),
        ("int8", 8, 8, "int8", 0.016, 0, 32),
        ("int8 float activations", 8, 8, "bf16", 0.014, 0, 0),
    )
    return [
        Competitor(f"openvino {name}", FAMILY, *fields, _make(fields[0], group, dynamic, threads))
        for name, *fields, group, dynamic in rows
    ]

"""torch.export with torch's quantize and dequantize operators in place of this package's products.

Other compilers (ExecuTorch's backends, inductor's fusions) look for ``quantized_decomposed`` operators around float
ones. :func:`export_quantize_dequantize` makes such a graph: codes, scales and zero points are its buffers, each weight
is dequantized by one operator before its use, and an input that the scheme quantizes passes choose, quantize,
dequantize. The program runs without this package.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..core.qparams import scale_floor
from ..core.spec import ActivationSpec
from .codes_2d import CodeRows, refusal, rows_of
from .graph_capture import Weight, capture, ops

aten = torch.ops.aten
F32 = torch.float32


def export_quantize_dequantize(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, *, dynamic_shapes: Any = None
) -> torch.export.ExportedProgram:
    """The model as an exported program with ``quantized_decomposed`` operators; the model is not modified.

    args, kwargs    sample inputs on the CPU
    dynamic_shapes  as for ``torch.export.export``

        weight, one scale            dequantize_per_tensor
        weight, a scale per row      dequantize_per_channel
        weight in groups             dequantize_per_channel_group; a real offset per group is added
        input, dynamic per token     choose_qparams_per_token_asymmetric (with zero points), quantize_per_token,
                                     dequantize_per_token
        input, dynamic per tensor    quantize_per_tensor.tensor, dequantize_per_tensor.tensor
        input, static per tensor     quantize_per_tensor, dequantize_per_tensor

    Weights have the values of :meth:`dequantize`, bit for bit. Dynamic zero points may differ by one from this
    package's, since torch's operator rounds them by another rule.

    Raises ValueError, naming the layer and the remedy, for a model that is not float32, for formats other than integers
    of at most 8 bits, for blocks that no operator has, and for inputs quantized in groups or to float8.
    """
    from torch.ao.quantization.fx import _decomposed  # noqa: F401 - defines the operators

    other = next((n for n, p in model.named_parameters() if p.is_floating_point() and p.dtype is not F32), None)
    if other is not None:
        raise ValueError(f"{other} is not float32; call model.float(), which keeps codes and scales, and export that")
    captured = capture(model, args, dict(kwargs or {}), dynamic_shapes)
    module: Any = captured.program.module()
    _Replacing(module, captured.weights).run()
    with torch.no_grad():
        return torch.export.export(module, args, dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False)


class _Replacing:
    """Replaces the placeholders of a captured graph."""

    def __init__(self, module: fx.GraphModule, weights: list[Weight]) -> None:
        self.module, self.graph, self.weights = module, module.graph, weights
        self.rows: dict[int, CodeRows] = {}

    def run(self) -> None:
        make = {
            ops.linear.default: self._linear, ops.embedding.default: self._embedding, ops.values.default: self._values,
            ops.input.default: self._rounded,
        }  # fmt: skip
        for node in list(self.graph.nodes):
            if node.op == "call_function" and node.target in make:
                with self.graph.inserting_before(node):
                    node.replace_all_uses_with(make[node.target](*node.args))
                self.graph.erase_node(node)
        self.graph.lint()
        self.module.recompile()

    def _call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(op, args, kwargs)

    def _buffer(self, weight: int, part: str, value: Tensor) -> fx.Node:
        """A buffer of the program, shared by the uses of a weight."""
        name = f"{self.weights[weight].name.replace('.', '_')}_{part}"
        if not hasattr(self.module, name):
            self.module.register_buffer(name, value.contiguous())
        return self.graph.get_attr(name)

    # -- weights -------------------------------------------------------------------------------------------------------

    def _rows(self, weight: int) -> CodeRows:
        if weight not in self.rows:
            w = self.weights[weight]
            why = refusal(w.tensor)
            spec = w.tensor.spec
            if why is None and (spec.format.kind != "int" or spec.format.bits > 8):
                why = f"quantized_decomposed has integers of at most 8 bits, not {spec.format}"
            if why is not None:
                raise ValueError(f"{w.parameter}: {why}; export an integer scheme, or dequantize this layer first")
            self.rows[weight] = rows_of(w.tensor, w.name)
        return self.rows[weight]

    def _matrix(self, weight: int) -> fx.Node:
        """The weight as float32 [R, K]."""
        q, r = torch.ops.quantized_decomposed, self._rows(weight)
        bounds = (int(r.format.lo), int(r.format.hi), r.codes.dtype)
        codes, zeros = r.codes, r.zeros()
        short = r.n_blocks * r.block - r.width
        if short and r.n_blocks > 1:
            codes = torch.nn.functional.pad(codes, (0, short))
        buffer = self._buffer(weight, "codes", codes)
        if r.one_scale:
            x = self._call(q.dequantize_per_tensor.default, buffer, float(r.scale), int(zeros), *bounds)
        else:
            full = (r.height, r.n_blocks)
            scale = self._buffer(weight, "scale", r.scale.expand(full))
            zero = self._buffer(weight, "zero_point", zeros.expand(full))
            if r.n_blocks == 1:
                flat = [self._call(aten.reshape.default, part, [-1]) for part in (scale, zero)]
                x = self._call(q.dequantize_per_channel.default, buffer, *flat, 0, *bounds)
            else:
                x = self._call(q.dequantize_per_channel_group.default, buffer, scale, zero, *bounds, r.block, F32)
        if r.offset is not None:
            offset = self._buffer(weight, "offset", r.offset.expand(r.height, r.n_blocks)[..., None])
            x = self._call(aten.reshape.default, x, [r.height, r.n_blocks, -1])
            x = self._call(aten.reshape.default, self._call(aten.add.Tensor, x, offset), [r.height, -1])
        return self._call(aten.slice.Tensor, x, 1, 0, r.width) if short and r.n_blocks > 1 else x

    def _values(self, weight: int, shape: list[int]) -> fx.Node:
        x = self._matrix(weight)
        return x if len(shape) == 2 else self._call(aten.reshape.default, x, shape)

    def _embedding(self, index: fx.Node, weight: int, width: int) -> fx.Node:
        return self._call(aten.embedding.default, self._matrix(weight), index)

    def _linear(self, x: fx.Node, bias: fx.Node | None, weight: int, width: int) -> fx.Node:
        return self._call(aten.linear.default, self._rounded(x, weight), self._matrix(weight), bias)

    # -- inputs --------------------------------------------------------------------------------------------------------

    def _rounded(self, x: fx.Node, weight: int) -> fx.Node:
        """The input of an op, quantized and dequantized if the scheme does so."""
        w = self.weights[weight]
        act = w.tensor.act
        if act is None:
            return x
        f, block, q = act.spec.format, act.spec.block, torch.ops.quantized_decomposed
        plain = act.spec.offset is None and not act.spec.mid and act.spec.scale is F32
        whole, token = block is None, block is not None and all(b == -1 for b in block)
        if f.kind != "int" or not f.signed or not plain or not (whole or (token and act.mode == "dynamic")):
            raise ValueError(
                f"{w.parameter}: no operator quantizes its input as {act}; use integer inputs with one scale per "
                "tensor or, dynamic, per token"
            )
        bounds = (int(f.lo), int(f.hi), f.code_dtype)
        if act.mode == "static":
            zero = 0 if w.tensor.act_zero_point is None else int(w.tensor.act_zero_point)
            assert w.tensor.act_scale is not None
            args: tuple[Any, ...] = (float(w.tensor.act_scale), zero, *bounds)
            codes = self._call(q.quantize_per_tensor.default, x, *args)
            return self._call(q.dequantize_per_tensor.default, codes, *args)
        if token and act.spec.zero_point and f.bits == 8:
            both = self._call(q.choose_qparams_per_token_asymmetric.default, x, f.code_dtype)
            scale, zeros = (self._call(operator.getitem, both, i) for i in (0, 1))
        else:
            scale, zeros = self._range(x, act, whole)
        if whole:
            codes = self._call(q.quantize_per_tensor.tensor, x, scale, zeros, *bounds)
            return self._call(q.dequantize_per_tensor.tensor, codes, scale, zeros, *bounds)
        codes = self._call(q.quantize_per_token.default, x, scale, zeros, *bounds)
        return self._call(q.dequantize_per_token.default, codes, scale, zeros, *bounds, F32)

    def _range(self, x: fx.Node, act: ActivationSpec, whole: bool) -> tuple[fx.Node, fx.Node]:
        """Scale and zero point by this package's rule, in aten operators."""
        f, least = act.spec.format, float(scale_floor(F32, act.spec, act.eps))
        axes: list[int] = [] if whole else [-1]
        if act.spec.zero_point:
            low = self._call(aten.clamp_max.default, self._call(aten.amin.default, x, axes, not whole), 0)
            high = self._call(aten.clamp_min.default, self._call(aten.amax.default, x, axes, not whole), 0)
            span = self._call(aten.sub.Tensor, high, low)
            scale = self._call(aten.clamp_min.default, self._call(aten.div.Tensor, span, f.hi - f.lo), least)
            steps = self._call(aten.round.default, self._call(aten.div.Tensor, low, scale))
            zeros = self._call(aten.clamp.default, self._call(aten.rsub.Scalar, steps, f.lo), f.lo, f.hi)
        else:
            reach = min(f.hi, -f.lo) if act.rule == "absmax" else (f.hi - f.lo) / 2
            largest = self._call(aten.amax.default, self._call(aten.abs.default, x), axes, not whole)
            scale = self._call(aten.clamp_min.default, self._call(aten.div.Tensor, largest, reach), least)
            zeros = self._call(aten.zeros_like.default, scale)
        return scale, self._call(aten._to_copy.default, zeros, dtype=torch.int32)

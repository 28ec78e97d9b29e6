# pyright: strict, reportUnknownMemberType=true, reportUnknownArgumentType=true, reportUnknownVariableType=true
"""What the public functions return, as type checkers see it: nothing is unknown. Checked by scripts/check, not run."""

from collections.abc import Sequence
from typing import assert_type

import torch
from torch import Tensor, nn

import pennyweight as pw

model = nn.Linear(64, 64)
batches: Sequence[Tensor] = [torch.zeros(4, 64)]

report = pw.quantize_(model, "int4", skip=["lm_head"], calibration=batches, algorithm="gptq", progress=False)
assert_type(report, pw.Report)
assert_type(report.bytes_after, int)
assert_type(report.to_string(full=True), str)
assert_type(report.quantized[0].sqnr, float | None)
assert_type(report.quantized[0].latency[0].speed, float)
assert_type(pw.quantize_(model, pw.FqnToConfig({"a": "int8", "b": pw.Int4WeightOnlyConfig(64), "c": None})), pw.Report)
assert_type(pw.plan(model, "int8"), pw.Plan)
assert_type(pw.dequantize_(model), pw.Report)

assert_type(pw.load("folder", model), nn.Linear)
assert_type(pw.load("folder", model, verify=True), nn.Linear)
assert_type(pw.load("folder"), dict[str, Tensor])
pw.save(model, "folder", progress=lambda done, total, name: None)
with pw.open("folder") as opened:
    assert_type(opened, pw.Opened)
    assert_type(opened.format, str)
assert_type(pw.convert("folder", "other", to="gguf", gguf_type="Q4_K_M"), pw.Report)
assert_type(pw.quantize_checkpoint("folder", "other", "int8"), pw.Report)

found = pw.search(model, batches, ["4.25 bpw", "1.3x latency"])
assert_type(found.config, pw.FqnToConfig)
assert_type(found.bits, float)
assert_type(found.front(), list[tuple[float, float]])
best = pw.recommend(model, batches[0], max_error=0.1)
assert_type(best, pw.Recommendation)
assert_type(best.verdict, str)
assert_type(pw.calibrate(model, batches, pw.Int8StaticActivationInt8WeightConfig), pw.FqnToConfig)
assert_type(pw.algorithms.improve(model, model, batches), pw.Report)
assert_type(pw.sparsify_(model, "magnitude"), pw.Report)

comparison = pw.compare(model, model, batches)
assert_type(comparison, pw.Comparison)
assert_type(comparison.worst()[0].bits_per_weight, float)
assert_type(pw.report.verify(model, pw.report.golden(model, batches)).ok, bool)

assert_type(pw.inference.freeze_(model), pw.Report)
assert_type(pw.fuse_(model, batches[0]), pw.Report)
assert_type(str(pw.explain(torch.float32, model)), str)
assert_type(pw.explain(batches[0], model.weight).rows[0][0], str)
assert_type(pw.fallbacks(), dict[str, int])
assert_type(pw.inference.together(batches[0], [model, model]), list[Tensor])

weight = pw.AffineQuantizedTensor.from_float(batches[0], pw.QuantSpec(pw.get_format("int8"), (-1,)))
assert_type(weight, pw.AffineQuantizedTensor)
assert_type(weight.dequantize(), Tensor)
assert_type(weight.error(batches[0]), float)
assert_type(weight.scale, Tensor | None)
assert_type(weight.spec, pw.QuantSpec)

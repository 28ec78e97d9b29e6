"""torchao. Of its int4 packings only a prototype's runs on a CPU; its numbers are those of the others (tinygemm).

Models are quantized in float32 but where the format's scales take the model's dtype: those from bfloat16, as its users
have them, so that scale and zero take 16 bits each. Their values are then computed in float32 again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.accuracy.accounting import Bits
from benchmarks.accuracy.rivals.base import ALL, SMOLLM2, Row, calibrate, layers
from benchmarks.accuracy.subjects import Subject

TINYGEMM = "bfloat16 scale and zero per group of 128"
Make = Callable[[], Any]


def _filter(subject: Subject) -> Callable[[nn.Module, str], bool]:
    return lambda module, name: name in subject.layers


def _weight_only(config: Make, dtype: torch.dtype = torch.float32) -> Callable[[Subject, nn.Module], nn.Module]:
    def run(subject: Subject, model: nn.Module) -> nn.Module:
        from torchao.quantization import quantize_

        model = model.to(dtype)
        quantize_(model, config(), _filter(subject))
        return _plain(subject, model)

    return run


def _as_it_stands(config: Make) -> Callable[[Subject, nn.Module], nn.Module]:
    def run(subject: Subject, model: nn.Module) -> nn.Module:
        from torchao.quantization import quantize_

        quantize_(model, config(), _filter(subject))
        return model

    return run


def _plain(subject: Subject, model: nn.Module) -> nn.Module:
    """The layers' weights as float32 values; everything else as the float model has it, not rounded to 16 bits."""
    weights = {name: _values(layer) for name, layer in layers(subject, model).items()}
    plain = subject.model()
    for name, layer in layers(subject, plain).items():
        layer.weight.data = weights[name]
    return plain


def _values(layer: nn.Module) -> Tensor:
    w = layer.weight
    if type(w).__name__ != "Int4OpaqueTensor":
        return w.dequantize().float()
    # it cannot be unpacked; its product with the identity is what it holds, in float32 and so without rounding
    wide = type(w)(w.qdata, w.scale_and_zero.float(), w.block_size, w.shape)
    value = nn.functional.linear(torch.eye(w.shape[1]), wide).T.contiguous()
    return value if w.act_pre_scale is None else value * w.act_pre_scale.float()


def _tinygemm(group: int = 128, hqq: bool = False) -> Make:
    def make() -> Any:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
        from torchao.quantization.quantize_.workflows import Int4ChooseQParamsAlgorithm as Algorithm

        return PrototypeInt4WeightOnlyConfig(
            group, int4_choose_qparams_algorithm=Algorithm.HQQ if hqq else Algorithm.TINYGEMM
        )

    return make


def _intx(bits: int, group: int, hqq: bool = False) -> Make:
    def make() -> Any:
        from torchao.quantization import IntxWeightOnlyConfig, PerGroup
        from torchao.quantization.quantize_.workflows import IntxChooseQParamsAlgorithm as Algorithm

        return IntxWeightOnlyConfig(
            getattr(torch, f"int{bits}"), PerGroup(group), scale_dtype=torch.float16,
            intx_choose_qparams_algorithm=Algorithm.HQQ_SCALE_ONLY if hqq else Algorithm.AFFINE,
        )  # fmt: skip

    return make


def _named(name: str, module: str = "torchao.quantization", **options: Any) -> Make:
    def make() -> Any:
        import importlib

        return getattr(importlib.import_module(module), name)(**options)

    return make


def _da4w() -> Any:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup

    return Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32))


def _awq(group: int = 128) -> Callable[[Subject, nn.Module], nn.Module]:
    def run(subject: Subject, model: nn.Module) -> nn.Module:
        from torchao.prototype.awq import AWQConfig
        from torchao.quantization import quantize_

        model = model.to(torch.bfloat16)
        base = _tinygemm(group)()
        quantize_(model, AWQConfig(base, step="prepare"), _filter(subject))
        # its observer joins what it saw along the tokens, so the batches must be of one shape: one sequence a call
        calibrate(subject, model, [_cut({k: t[i : i + 1] for k, t in b.items()}) for b in subject.calibration()
                                   for i in range(len(next(iter(b.values()))))])  # fmt: skip
        quantize_(model, AWQConfig(base, step="convert"), _filter(subject))
        return _plain(subject, model)

    return run


def _cut(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """One sequence without its padding, in the model's dtype."""
    if "x" in batch:
        return {"x": batch["x"].to(torch.bfloat16)}
    n = int(batch["attention_mask"].sum()) if "attention_mask" in batch else None
    return {k: t[:, :n] for k, t in batch.items()}


def _smooth(subject: Subject, model: nn.Module) -> nn.Module:
    from torchao.prototype.smoothquant import SmoothQuantConfig
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    base = Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    observed = lambda m, n: type(m).__name__ == "SmoothQuantObservedLinear"  # noqa: E731
    running = subject.kind == "encoder"  # texts are of different lengths, which its default observer cannot join
    quantize_(model, SmoothQuantConfig(base, step="prepare", use_running_absmax=running), _filter(subject))
    calibrate(subject, model)
    if running:
        step = "prepare_for_smoothquant_smoothing_factor"
        quantize_(model, SmoothQuantConfig(base, step=step, use_running_absmax=True), observed)
        calibrate(subject, model)
    quantize_(model, SmoothQuantConfig(base, step="convert", use_running_absmax=running), observed)
    return model


def _sym(bits: int, group: int) -> Bits:
    return Bits(bits, group, 16, why=f"float16 scale per group of {group}, no zero point")


INT8 = Bits(8, per_row=32, why="float32 scale per row")
_BOTH = ALL + SMOLLM2
_TINYGEMM64 = "bfloat16 scale and zero per group of 64"
_MX = "torchao.prototype.mx_formats.inference_workflow"
_DYNAMIC8 = _named("Int8DynamicActivationInt8WeightConfig", set_inductor_config=False)
ROWS = (
    Row("int4 g128 tinygemm (prototype)", _weight_only(_tinygemm(), torch.bfloat16), Bits(4, 128, 32, why=TINYGEMM)),
    Row("int4 g128 tinygemm, HQQ", _weight_only(_tinygemm(hqq=True), torch.bfloat16), Bits(4, 128, 32, why=TINYGEMM)),
    Row("int4 g32 tinygemm", _weight_only(_tinygemm(32), torch.bfloat16),
        Bits(4, 32, 32, why="bfloat16 scale and zero per group of 32")),
    Row("int4 g128", _weight_only(_intx(4, 128)), _sym(4, 128)),
    Row("int4 g128 hqq_scale_only", _weight_only(_intx(4, 128, True)), _sym(4, 128)),
    Row("int3 g128", _weight_only(_intx(3, 128)), _sym(3, 128)),
    Row("int2 g128", _weight_only(_intx(2, 128)), _sym(2, 128)),
    Row("int4 g32", _weight_only(_intx(4, 32)), _sym(4, 32)),
    Row("int8 weight-only", _weight_only(_named("Int8WeightOnlyConfig", set_inductor_config=False)), INT8,
        subjects=_BOTH),
    Row("float8 weight-only", _weight_only(_named("Float8WeightOnlyConfig", set_inductor_config=False)), INT8,
        subjects=_BOTH),
    Row("NVFP4 weight-only",
        _weight_only(_named("NVFP4WeightOnlyConfig", _MX), torch.bfloat16),
        Bits(4, 16, 8, per_layer=32, why="e4m3 scale per group of 16, float32 scale per layer"), subjects=_BOTH),
    Row("W8A8 dynamic", _as_it_stands(_DYNAMIC8), INT8, "int8", _BOTH),
    Row("W8A8 SmoothQuant", _smooth,
        Bits(8, per_row=32, per_column=32, why="float32 scale per row and factor per column"), "int8", _BOTH),
    Row("W4A8 g32 (8da4w)", _as_it_stands(_da4w), Bits(4, 32, 32, why="float32 scale per group of 32"), "int8"),
    Row("int4 g128 AWQ", _awq(), Bits(4, 128, 32, per_column=16, why=f"{TINYGEMM}, bfloat16 factor per column"),
        slow=True),
    Row("int4 g64 tinygemm (prototype)", _weight_only(_tinygemm(64), torch.bfloat16), Bits(4, 64, 32, why=_TINYGEMM64),
        subjects=SMOLLM2),
    Row("int4 g64 tinygemm, HQQ", _weight_only(_tinygemm(64, hqq=True), torch.bfloat16),
        Bits(4, 64, 32, why=_TINYGEMM64), subjects=SMOLLM2),
    *(Row(f"int{bits} g64", _weight_only(_intx(bits, 64)), _sym(bits, 64), subjects=SMOLLM2) for bits in (4, 3, 2)),
    Row("int4 g64 hqq_scale_only", _weight_only(_intx(4, 64, True)), _sym(4, 64), subjects=SMOLLM2),
    Row("int4 g64 AWQ", _awq(64), Bits(4, 64, 32, per_column=16, why=f"{_TINYGEMM64}, bfloat16 factor per column"),
        subjects=SMOLLM2, slow=True),
)  # fmt: skip

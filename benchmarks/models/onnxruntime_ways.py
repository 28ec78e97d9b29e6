"""onnxruntime on the exported graph: float, weights and inputs int8 by its own quantizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor

from .base import Call, Inputs, Loaded, Way
from .cases import CONVOLUTIONAL, TRANSFORMERS


def versions() -> dict[str, str]:
    return {"onnxruntime": ort.__version__}


def _exported(folder: Path) -> Path:
    path = folder / "model.onnx"
    if not path.exists():
        raise FileNotFoundError("there is no exported graph; pip install onnx onnxscript")
    return path


def _prepared(folder: Path) -> Path:
    """The graph as its quantizers want it: shapes known, constants folded."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    out = folder / "prepared.onnx"
    if not out.exists():
        quant_pre_process(str(_exported(folder)), str(out), skip_symbolic_shape=True)
    return out


def _float(folder: Path) -> Path:
    return _exported(folder)


def _dynamic(folder: Path) -> Path:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    out = folder / "dynamic.onnx"
    quantize_dynamic(
        str(_prepared(folder)), str(out), per_channel=True, weight_type=QuantType.QInt8,
        op_types_to_quantize=["MatMul", "Gemm"],
    )  # fmt: skip
    return out


def _static(folder: Path) -> Path:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    names = [i.name for i in ort.InferenceSession(str(_prepared(folder)), providers=PROVIDERS).get_inputs()]

    class Batches(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter(Inputs(folder).calibration)

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self.left, None)
            return None if batch is None else {n: t.numpy() for n, t in zip(names, batch, strict=True)}

    out = folder / "static.onnx"
    quantize_static(
        str(_prepared(folder)), str(out), Batches(), quant_format=QuantFormat.QDQ, per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip
    return out


PROVIDERS = ["CPUExecutionProvider"]


def _session(make: Callable[[Path], Path]) -> Callable[[Path, int], Loaded]:
    def load(folder: Path, threads: int) -> Loaded:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        path = make(folder)
        session = ort.InferenceSession(str(path), options, providers=PROVIDERS)
        names, inputs = [i.name for i in session.get_inputs()], Inputs(folder)

        def bind(case):
            feed = {n: t.numpy() for n, t in zip(names, inputs.of(case), strict=True)}
            return Call(lambda: session.run(None, feed), _tensor)

        data = path.with_suffix(".onnx.data")
        return Loaded(bind, path.stat().st_size + (data.stat().st_size if data.exists() else 0))

    return load


def _tensor(outputs: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(outputs[0])


def ways() -> list[Way]:
    both, family = (*TRANSFORMERS, *CONVOLUTIONAL), "onnxruntime"
    return [
        Way("onnxruntime fp32", family, 32, 32, "fp32", 1e-3, both, _session(_float)),
        Way("onnxruntime int8 dynamic", family, 8, 8, "int8", 0.5, TRANSFORMERS, _session(_dynamic)),
        Way("onnxruntime int8 static", family, 8, 8, "int8", 0.5, CONVOLUTIONAL, _session(_static)),
    ]

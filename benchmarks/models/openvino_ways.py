"""OpenVINO on the exported graph, compressed or quantized by nncf. Its default float is bf16 where the CPU has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openvino as ov
import torch

from .base import Call, Inputs, Loaded, Way
from .cases import CONVOLUTIONAL, TRANSFORMERS


def versions() -> dict[str, str]:
    import nncf

    return {"openvino": ov.__version__, "nncf": nncf.__version__}


def _plain(model: Any, folder: Path) -> Any:
    return model


def _compressed(model: Any, folder: Path) -> Any:
    """int8 weights, inputs quantized by groups at run time, which is the plugin's default for them."""
    import nncf

    return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)


def _static(model: Any, folder: Path) -> Any:
    import nncf

    batches = [tuple(t.numpy() for t in batch) for batch in Inputs(folder).calibration]
    return nncf.quantize(model, nncf.Dataset(batches), subset_size=len(batches))


def _compiled(change: Callable[[Any, Path], Any], **more: Any) -> Callable[[Path, int], Loaded]:
    def load(folder: Path, threads: int) -> Loaded:
        path = folder / "model.onnx"
        if not path.exists():
            raise FileNotFoundError("there is no exported graph; pip install onnx onnxscript")
        core, inputs = ov.Core(), Inputs(folder)
        options = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY", **more}
        compiled = core.compile_model(change(core.read_model(path), folder), "CPU", options)

        def bind(case):
            request, held = compiled.create_infer_request(), [t.numpy() for t in inputs.of(case)]
            for i, array in enumerate(held):
                request.set_input_tensor(i, ov.Tensor(array, shared_memory=True))
            read = lambda _: torch.from_numpy(request.get_output_tensor(0).data.copy()).float()  # noqa: E731
            return Call(lambda kept=held: request.infer(), read)  # the arrays live as long as the request

        precision = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        return Loaded(bind, detail=f"float computed as {precision}")

    return load


def ways() -> list[Way]:
    both, family = (*TRANSFORMERS, *CONVOLUTIONAL), "openvino"
    fp32 = {"INFERENCE_PRECISION_HINT": "f32"}
    return [
        Way("openvino fp32", family, 32, 32, "fp32", 1e-3, both, _compiled(_plain, **fp32)),
        Way("openvino default float", family, 16, 16, "bf16", 0.2, both, _compiled(_plain)),
        Way("openvino int8 weights", family, 8, 8, "int8", 0.3, TRANSFORMERS, _compiled(_compressed)),
        Way("openvino int8 weights, fp32", family, 8, 8, "int8", 0.3, TRANSFORMERS, _compiled(_compressed, **fp32)),
        Way("openvino int8 static", family, 8, 8, "int8", 0.5, CONVOLUTIONAL, _compiled(_static)),
    ]

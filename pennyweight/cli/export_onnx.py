"""``pennyweight export-onnx``: writes a checkpoint of a text model as an ONNX file."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from ..planning.config_names import CONFIGS
from .options import AccuracyLevel, AllowFloat, FloatConfig, GroupSize, Json, OnnxStyle, Opset, Traceback
from .output import check_report_path, report_errors, show

EPILOG = """Examples:
  pennyweight export-onnx OUT_DIR model.onnx
  pennyweight export-onnx MODEL_DIR model.onnx --config int4 --group-size 32"""


@report_errors
def export_onnx(
    model_dir: Annotated[
        str, typer.Argument(metavar="MODEL_DIR", help="A folder with config.json and safetensors files, or a Hub id.")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT.onnx", help="The file to write; an existing file is replaced.")],
    config: FloatConfig = "",
    group_size: GroupSize = None,
    style: OnnxStyle = "auto",
    opset: Opset = 21,
    accuracy_level: AccuracyLevel = 1,
    allow_float: AllowFloat = False,
    report_path: Json = "",
    traceback: Traceback = False,
) -> None:
    """Write a checkpoint as ONNX for onnxruntime."""
    from ..planning.configs.by_name import by_name

    chosen = by_name(config, group_size) if config else None
    if chosen is None and group_size is not None:
        raise ValueError(f"--group-size needs --config, one of {', '.join(CONFIGS)}")
    if os.path.isdir(out):
        raise ValueError(f"{out} is a folder; pass the name of a file, such as {os.path.join(out, 'model.onnx')}")
    folder = os.path.dirname(os.path.abspath(out))
    if not os.path.isdir(folder):
        raise ValueError(f"{out}: folder {folder} does not exist")
    check_report_path(report_path, None)

    from ..export.onnx import export_onnx as export
    from ..export.onnx import require_packages
    from ..export.text_models import text_model
    from ..io import local_path

    try:
        require_packages()
    except ImportError as error:
        raise ValueError(str(error)) from None
    model = _model(local_path(model_dir), chosen)
    narrow = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()} - {"float32"})
    text = text_model(model.float())
    report = export(
        text.module, (), out, style=style, opset=opset, accuracy_level=accuracy_level, allow_float=allow_float,
        **text.arguments,
    )  # fmt: skip
    if narrow:
        typer.echo(f"note: {', '.join(narrow)} is written as float32; quantized weights keep their codes", err=True)
    sizes = {path: os.path.getsize(path) for path in report.files}
    show(
        {**report.to_dict(), "file_bytes": sizes},
        lambda: f"{report}\n" + "\n".join(f"{path}: {n:,} bytes" for path, n in sizes.items()),
        report_path,
    )


def _model(model_dir: str, config: Any) -> Any:
    """The checkpoint's model, quantized with ``config`` if it is not None."""
    from ..core.tensor import AffineQuantizedTensor
    from ..export.text_models import require_text
    from ..io import load
    from ..io.meta_model import fresh_model
    from ..quantize import quantize_

    model = fresh_model(model_dir)
    require_text(model)
    load(model_dir, model)
    quantized = [name for name, p in model.named_parameters() if isinstance(p, AffineQuantizedTensor)]
    if config is None and not quantized:
        raise ValueError(
            f"{model_dir} contains float weights; pass --config to quantize them, one of {', '.join(CONFIGS)}"
        )
    if config is not None and quantized:
        raise ValueError(
            f"{model_dir} is already quantized ({quantized[0]} and {len(quantized) - 1} more); leave --config out"
        )
    if config is not None:
        quantize_(model, config)
    return model

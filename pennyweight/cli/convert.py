"""``pennyweight convert``: converts a checkpoint to another format, disk to disk."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import completion
from .options import (
    AllowPickle,
    ConvertedFor,
    DryRun,
    FloatDtype,
    Force,
    Format,
    GgufType,
    Imatrix,
    Json,
    MaxShardSize,
    Requantize,
    Resume,
    TensorNames,
    Traceback,
)
from .output import (
    check_report_path,
    output_folder,
    print_report,
    progress_bar,
    publish_output,
    report_errors,
    resume_hint,
    shard_bytes,
)

if TYPE_CHECKING:
    from ..planning.quantize_report import Report


EPILOG = """Examples:
  pennyweight convert org/model model.gguf --to gguf --type Q4_K_M
  pennyweight convert model.gguf OUT_DIR --to compressed-tensors
  pennyweight convert GPTQ_DIR OUT_DIR --for vllm
  pennyweight convert QUANTIZED_DIR OUT_DIR --to float --dtype bfloat16

Formats:
  """ + ", ".join(completion.FORMATS)


@report_errors
def convert(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint of any format: a folder, a file, a Hub id.")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="A folder; a file for gguf.")],
    to: Format = "",
    engine: ConvertedFor = "",
    requantize: Requantize = False,
    dtype: FloatDtype = "",
    gguf_type: GgufType = "",
    imatrix: Imatrix = "",
    names: TensorNames = "",
    allow_pickle: AllowPickle = False,
    dry_run: DryRun = False,
    resume: Resume = True,
    report_path: Json = "",
    max_shard_size: MaxShardSize = "4GB",
    force: Force = False,
    traceback: Traceback = False,
) -> None:
    """Convert a checkpoint, disk to disk.

    Reports for each tensor whether it is exact or was requantized, and the error.
    """
    from ..core.spec import DTYPES
    from ..io import convert as run
    from ..io import local_path
    from ..io.convert_checkpoint import formats
    from ..planning.engines import GGUF, engine_of
    from .inspect import contents
    from .model_card import renew_card

    if not (to or engine):
        raise ValueError(f"--to is required: one of {', '.join(formats())}; or --for an engine")
    if engine and engine_of(engine).formats == (GGUF,):
        to = to or GGUF
    if dtype and dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    size = shard_bytes(max_shard_size)
    src = local_path(src, allow_pickle)

    def job(folder: str = dst, **how: Any) -> Report:
        return run(
            src, folder, to=to or "pennyweight", for_=engine or None, requantize=requantize,
            dtype=DTYPES[dtype] if dtype else None, gguf_type=gguf_type or None, imatrix=imatrix or None,
            names=names or None, allow_pickle=allow_pickle, max_shard_bytes=size, **how,
        )  # fmt: skip

    check_report_path(report_path, None if dry_run or to == "gguf" else dst)
    before = contents(src, allow_pickle).file_bytes
    if dry_run:
        print_report(job(dry_run=True), before, None, report_path)
        return
    folder = dst
    if to != "gguf":
        folder = output_folder(dst, force, job, resume)
    elif os.path.lexists(dst) and not force:
        raise ValueError(f"{dst} already exists; choose another file, or pass --force")
    with progress_bar() as advance, resume_hint():
        report = job(folder, resume=resume, progress=advance)
    if to not in ("gguf", "float"):
        renew_card(folder, dst, src)
    publish_output(folder, dst)
    print_report(report, before, contents(dst).file_bytes, report_path)
    for note in report.notes:
        if note.startswith("warning: "):
            typer.echo(f"pennyweight: {note}", err=True)

"""Rows of one family on one subject, in a process of their own.

    python -m benchmarks.accuracy.worker FAMILY SUBJECT_FOLDER ANSWER_FOLDER ROW ...

The answer folder gets a folder for each row, 0, 1 and so on, and in it ``answer.json``: bits, seconds, and either
figures, or a ``weights.safetensors`` beside it that the caller evaluates; or "failed" and the reason.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.accuracy.rivals import FAMILIES, OURS
from benchmarks.accuracy.rivals.base import Row
from benchmarks.accuracy.subjects import Subject

CLOCK = "process"  # rows without it have seconds of the wall's clock


def measure(row: Row, subject: Subject, folder: Path, hand_back: bool) -> dict[str, Any]:
    """Quantize and answer; weights are handed back where the inputs stay float and ``hand_back``.

    Raises ValueError where a layer was left as it was, or where the state is not the float model's.
    """
    torch.manual_seed(0)
    begin = time.process_time()  # of all threads; what else the machine does is not in it
    result = row.run(subject, subject.model())
    seconds = time.process_time() - begin
    model, bits = result if row.bits is None else (result, row.bits.of(subject.layer_shapes()))
    answer = {"bits": bits, "seconds": round(seconds, 2), "clock": CLOCK, "inputs": row.inputs, "note": row.note}
    if row.bits is not None:
        answer["bits_why"] = row.bits.why
    if row.inputs or not hand_back:
        answer["figures"] = subject.evaluate(model.eval()).to_dict()
    else:
        save_file(changed(subject, model), folder / "weights.safetensors")
    return answer


def changed(subject: Subject, model: nn.Module) -> dict[str, torch.Tensor]:
    """The float32 tensors that are no longer the float model's."""
    was = load_file(subject.folder / "state.safetensors")
    state = {k: v for k, v in model.state_dict().items() if k in was}
    absent = was.keys() - state.keys()
    if absent:
        raise ValueError(f"{len(absent)} tensors of the float model are gone: {', '.join(sorted(absent)[:3])}")
    new = {}
    for name, tensor in state.items():
        tensor = tensor.detach().float().contiguous().clone()
        if tensor.shape != was[name].shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, was {list(was[name].shape)}")
        if not torch.equal(tensor, was[name]):
            new[name] = tensor
    same = [name for name in subject.layers if f"{name}.weight" not in new]
    if same:
        raise ValueError(f"{len(same)} of {len(subject.layers)} layers were left as they were: {', '.join(same[:3])}")
    return new


def sentence(e: BaseException) -> str:
    text = str(e).strip().splitlines()
    return f"{type(e).__name__}: {text[0][:300] if text else ''}"


def main(family: str, subject_folder: str, answer_folder: str, *names: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    hand_back = family != OURS or bool(os.environ.get("PENNYWEIGHT_BENCH_HAND_BACK"))
    subject, rows = Subject.open(Path(subject_folder)), FAMILIES[family].rows()
    for i, name in enumerate(names):
        folder = Path(answer_folder) / str(i)
        folder.mkdir()
        try:
            answer = measure(rows[name], subject, folder, hand_back=hand_back)
        except Exception as e:
            traceback.print_exc()
            answer = {"failed": sentence(e)}
        gc.collect()
        scratch = folder / "unfinished.json"
        scratch.write_text(json.dumps(answer))
        scratch.rename(folder / "answer.json")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # some peers leave threads that never end


if __name__ == "__main__":
    main(*sys.argv[1:])

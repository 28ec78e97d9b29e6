"""torch.distributed.checkpoint without ranks: its own files hold quantized weights, its writer of safetensors refuses.

Ranks are in tests/distributed/test_checkpoint.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

import pennyweight as pw
from tests.integrations.writers import CONFIGS, MODELS, Writer, check_on_models


def load(folder: Path, model: Any) -> Any:
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    return model


def by_hugging_face(state: dict[str, Any], folder: Path) -> None:
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(path=str(folder)))


def flat(folder: Path, model: Any) -> Any:
    tensors, metadata = pw.io.flatten(model.state_dict())
    dcp.load(tensors, storage_reader=HuggingFaceStorageReader(path=str(folder)))
    model.load_state_dict(pw.io.unflatten(tensors, metadata))
    return model


WRITERS = {
    "save": Writer(lambda m, d: dcp.save({"model": m.state_dict()}, checkpoint_id=d), load),
    "async_save": Writer(lambda m, d: dcp.async_save({"model": m.state_dict()}, checkpoint_id=d).result()),
    "StateDictStager": Writer(lambda m, d: StateDictStager().stage(m.state_dict())),
    "HuggingFaceStorageWriter": Writer(lambda m, d: by_hugging_face(m.state_dict(), d)),
    "pw.io.flatten, HuggingFaceStorageWriter": Writer(
        lambda m, d: by_hugging_face(pw.io.flatten(m.state_dict())[0], d), flat
    ),
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.filterwarnings("ignore::pennyweight.FallbackWarning")  # safetensors asks for the last element of tied ones
def test_writers(writer: Writer, make: Any, config: str, tmp_path: Path) -> None:
    check_on_models(writer, make, config, tmp_path)

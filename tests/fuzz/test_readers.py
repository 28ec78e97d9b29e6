"""The readers that are fuzzed take their seeds, so that fuzzing begins inside them, and are told of damage."""

from pathlib import Path

import pytest

import pennyweight as pw
from pennyweight.io import CheckpointError
from pennyweight.io.gguf.imatrix import read_imatrix
from tests.fuzz.readers import READERS, run_folder


def opened(path: Path) -> None:
    """Every tensor of an input."""
    if path.suffix == ".imatrix":
        read_imatrix(path)
        return
    if path.suffix == ".input":
        run_folder(str(path))
        path = path.with_suffix(".folder")
    with pw.open(path) as checkpoint:
        assert checkpoint.quantized or path.suffix == ".gguf"
        checkpoint.state_dict()


@pytest.mark.parametrize("name", READERS)
def test_seeds_are_good_files(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    for i, seed in enumerate(reader.seeds()):
        path = tmp_path / f"{i}{reader.suffix}"
        path.write_bytes(seed)
        opened(path)
        reader.run(str(path))
        path.write_bytes(seed[:-1])
        reader.run(str(path))
        with pytest.raises(CheckpointError):
            opened(path)

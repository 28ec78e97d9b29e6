"""The readers that are fuzzed take their seeds, so that fuzzing begins inside them, and are told of damage."""

from pathlib import Path

import pytest

from pennyweight.io import CheckpointError, load
from pennyweight.io.gguf.container import File
from tests.fuzz.readers import READERS

OPEN = {"gguf": lambda path: File(path).close(), "native": load}


@pytest.mark.parametrize("name", READERS)
def test_seeds_are_good_files(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    for i, seed in enumerate(reader.seeds()):
        path = tmp_path / f"{i}{reader.suffix}"
        path.write_bytes(seed)
        OPEN[name](str(path))
        reader.run(str(path))
        path.write_bytes(seed[:-1])
        reader.run(str(path))
        with pytest.raises(CheckpointError):
            OPEN[name](str(path))

"""config.json and the tokenizer of a checkpoint: those of its folder, or for a GGUF file those of its metadata."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from .config_files import folder_of
from .detect_format import find_gguf
from .file import CheckpointError, no_such_path


@contextmanager
def model_folder(path: str) -> Iterator[str]:
    """The folder from which transformers reads the config and the tokenizer of a checkpoint.

    path   a folder, a file in one, or a GGUF file. The metadata of a GGUF file are written to a temporary folder, which
           is removed at the end; in a folder with a GGUF file and a config.json, config.json is used.

    Raises CheckpointError if there is no such path or the metadata describe no model that transformers has.
    """
    if not os.path.lexists(path):
        raise CheckpointError(path, None, f"there is no such file or folder{no_such_path(path)}")
    found = find_gguf(path)
    if found is None or (os.path.isdir(path) and os.path.lexists(os.path.join(path, "config.json"))):
        yield folder_of(path)
        return
    from .gguf.reader import open_gguf, under_hf_names, write_side_files

    with open_gguf(path, found) as source, tempfile.TemporaryDirectory() as folder:
        write_side_files(under_hf_names(source), folder, None)
        yield folder

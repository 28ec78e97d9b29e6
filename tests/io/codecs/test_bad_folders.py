"""Folders of other libraries with one thing wrong, opened as users open them.

Each ends in CheckpointError that names a tensor or a file, at once, with the model untouched; or what is left means
something, and loads to finite numbers.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.io import CheckpointError
from pennyweight.io.codecs import CODECS
from tests import forked
from tests.io.codecs.bad_configs import JUNK, leaves, replaced
from tests.io.codecs.bad_parts import CHANGES, MAY_LOAD
from tests.io.codecs.bad_rows import ROWS, SHARDS, WORKING
from tests.io.codecs.good_folders import MAKE, Folder, good
from tests.io.codecs.whole_folder import finite, model_for

SECONDS = 2.0  # of CPU time; the costliest of them, patterns that take long, needs 0.4
PARTLY = {  # of which the parts are those of a kind that is gone through
    "compressed-tensors W4-channel-asym", "compressed-tensors W8A8-group", "compressed-tensors FP8-dynamic",
    "compressed-tensors MXFP6", "compressed-tensors by words", "gptq sym", "gptq_v2 g_idx", "bitsandbytes fp4",
    "hqq 8 bits", "torchao int8 with inputs", "torchao intx", "torchao mxfp8",
}  # fmt: skip
FLAGS = MAY_LOAD["hqq"].keys() - {"W_q", "scale", "zero", "axis", "nbits"}  # that change little, and are many
LOADED = ("gone", "NaN", "all bits", "one row", "a row more", "int32")  # tried on a model as well
CONFIGS = [
    "compressed-tensors W4-asym", "compressed-tensors W8A8-static", "compressed-tensors NVFP4A16", "gptq", "awq",
    "bitsandbytes nf4", "fp8", "mxfp4", "hqq 4 bits",
]  # fmt: skip
DESCRIBED = ["torchao int8 with inputs", "torchao intx of 4 bits", "torchao int4", "torchao fp8", "torchao mxfp4"]


def state_of(model: nn.Module) -> list[tuple[str, int, bytes]]:
    """Names, identity and bytes of all parameters."""
    return [(n, id(p), p.detach().numpy().tobytes()) for n, p in model.named_parameters()]


def refused(path: Path, folder: Path, model: nn.Module | None) -> CheckpointError | None:
    """The error of reading everything in ``path``, None where there is none. What must come with it is asserted.

    ``model``, where given, must not take it either, and stay as it is.
    """
    start = time.process_time()
    try:
        finite(path)
        return None
    except CheckpointError as e:
        error = e
    assert time.process_time() - start < SECONDS
    assert error.tensor is not None or str(error.path).startswith(str(folder)), error
    assert len(error.reason) > 10, error
    if model is None:
        return error
    before, start = state_of(model), time.process_time()
    with pytest.raises(CheckpointError):
        pw.load(path, model)
    assert time.process_time() - start < SECONDS
    assert state_of(model) == before
    return error


def converted(path: Path, to: Path) -> None:
    """Converting a bad folder says which tensor, and leaves nothing that looks complete."""
    with pytest.raises(CheckpointError) as caught:
        pw.convert(path, to)
    assert caught.value.tensor is not None
    left = {p.name for p in to.iterdir()} if to.exists() else set()
    assert not {n for n in left if n.endswith((".safetensors", ".safetensors.index.json"))}, left


def part_name(stored: str) -> str:
    """What a stored tensor is to its layer: "weight_scale", "m" of experts is "codes"."""
    for prefix in ("mlp.experts.gate_up_proj", "a.m.", "m._weight_", "m.weight.", "m.", "m"):
        if stored.startswith(prefix):
            return stored.removeprefix(prefix).strip("_").partition(".")[0]
    return stored


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are small: threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAKE)
def test_the_folders_are_good(kind: str, tmp_path: Path) -> None:
    path = good(kind).write(tmp_path / "good")
    assert finite(path) == 1
    model = model_for(path)
    assert pw.load(path, model) is model
    with pw.open(path) as checkpoint:
        assert checkpoint.format == kind.split(maxsplit=1)[0]


def test_every_format_is_there() -> None:
    assert {kind.split()[0] for kind in MAKE} == {*(codec.name for codec in CODECS), "torchao"}


@pytest.mark.parametrize("kind", [kind for kind in MAKE if kind not in PARTLY])
def test_each_part_changed(kind: str, tmp_path: Path) -> None:
    folder = good(kind)
    model = model_for(folder.write(tmp_path / "good"))
    form, loaded, count = kind.split(maxsplit=1)[0], [], 0
    for stored, tensor in folder.tensors.items():
        if stored.endswith(("norm.weight", "n.weight", "bias")):
            continue
        flag = form == "hqq" and part_name(stored) in FLAGS
        for what, change in {"gone": None, **CHANGES}.items():
            if flag and what not in LOADED:
                continue
            new = None if change is None else change(tensor)
            if change is not None and (new is None or same(new, tensor)):
                continue
            path = folder.put(stored, new).write(tmp_path / "bad")
            error = refused(path, tmp_path, model if what in LOADED else None)
            count += 1
            if error is None:
                loaded.append((part_name(stored), what))
                continue
            assert error.tensor is not None, (stored, what, error)
            assert error.tensor.startswith(tuple(stored.split(".")[0])), (stored, what, error)
            if what in ("NaN", "all bits"):
                converted(path, tmp_path / "out" / f"{stored} {what}")
    unexpected = [(part, what) for part, what in loaded if what not in MAY_LOAD[form].get(part, "").split(", ")]
    assert not unexpected
    assert count > len(loaded) > 0


def same(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bytes."""
    raw = [t.contiguous().flatten().view(torch.uint8) for t in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*raw)


# -- what is said of them ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONFIGS)
def test_junk_in_the_config_is_refused_or_harmless(kind: str, tmp_path: Path) -> None:
    folder = good(kind)
    model = model_for(folder.write(tmp_path / "good"))
    outcomes = {True: 0, False: 0}
    for place in leaves(folder.method):
        for junk in JUNK:
            path = Folder(folder.tensors, replaced(folder.method, place, junk)).write(tmp_path / "bad")
            outcomes[refused(path, tmp_path, model if junk in (None, -7) else None) is None] += 1
    assert min(outcomes.values()) > 0


@pytest.mark.parametrize("kind", DESCRIBED)
def test_junk_in_torchaos_metadata_is_refused_or_harmless(kind: str, tmp_path: Path) -> None:
    folder = good(kind)
    described = json.loads(folder.metadata["m.weight"])
    path = tmp_path / "bad"
    model = model_for(folder.write(path))
    outcomes = {True: 0, False: 0}
    for place in leaves(described):
        for junk in JUNK:
            text = json.dumps(replaced(described, place, junk))
            Folder(folder.tensors, folder.method, {**folder.metadata, "m.weight": text}).write(path)
            outcomes[refused(path, tmp_path, model if junk in (None, -7) else None) is None] += 1
    assert outcomes[False] > outcomes[True] > 0


@pytest.mark.parametrize("name", ROWS)
def test_bad_folders(name: str, tmp_path: Path) -> None:
    kind, change, reason = ROWS[name]
    folder = good(kind)
    model = model_for(folder.write(tmp_path / "good"))
    path = change(folder, tmp_path / "bad")
    error = refused(path, tmp_path, model)
    assert error is not None
    assert reason in str(error)
    with pytest.raises(CheckpointError):
        pw.convert(path, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors*"))


@pytest.mark.parametrize("name", WORKING)
def test_odd_folders_that_mean_something(name: str, tmp_path: Path) -> None:
    kind, change = WORKING[name]
    folder = good(kind)
    path = change(folder, tmp_path / "odd")
    assert finite(path) == 1
    model = model_for(folder.write(tmp_path / "good"))
    pw.load(path, model)
    expected, got = pw.load(tmp_path / "good"), pw.load(path)
    for key, tensor in expected.items():
        if isinstance(tensor, pw.AffineQuantizedTensor):
            assert torch.equal(got[key].dequantize(), tensor.dequantize())


@pytest.mark.parametrize("kind", [kind for kind in MAKE if kind not in PARTLY])
def test_parts_over_two_shards(kind: str, tmp_path: Path) -> None:
    folder = good(kind)
    expected = pw.load(folder.write(tmp_path / "good"))
    path = SHARDS(folder, tmp_path / "shards")
    model = model_for(path)
    pw.load(path, model)
    for key, tensor in pw.load(path).items():
        if isinstance(tensor, pw.AffineQuantizedTensor):
            assert torch.equal(tensor.dequantize(), expected[key].dequantize())
        else:
            assert torch.equal(tensor, expected[key])
    model = model_for(path)
    sorted(path.glob("*.safetensors"))[1].unlink()
    error = refused(path, tmp_path, model)
    assert error is not None
    assert "cannot be opened" in error.reason


# -- memory ------------------------------------------------------------------------------------------------------------

CHILD = """
import resource, sys
import torch
import pennyweight as pw
from pennyweight.io.codecs.torchao import reading
from tests.io.codecs.whole_folder import finite, model_for
torch.set_num_threads(1)
good, *bad = sys.argv[1:]
for path in good.split(","):
    finite(path)
    model = model_for(path)
    pw.load(path, model)
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = in_use + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in bad:
    for read in (finite, lambda path: pw.load(path, model)):
        try:
            read(path)
        except pw.CheckpointError:
            continue
        except BaseException as e:
            sys.exit(f"{path}: {e!r}")
        sys.exit(f"accepted {path}")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on address space is Linux's")
def test_refusing_takes_little_memory(tmp_path: Path) -> None:
    """All rows, and each scale NaN, one after the other, under 64 MiB over what the process has after good ones."""
    paths = [ROWS[name][1](good(ROWS[name][0]), tmp_path / str(i)) for i, name in enumerate(ROWS)]
    for kind in MAKE:
        folder = good(kind)
        for stored, tensor in folder.tensors.items():
            new = CHANGES["NaN"](tensor)
            if new is not None and not stored.endswith(("norm.weight", "n.weight", "bias")):
                paths.append(folder.put(stored, new).write(tmp_path / f"{kind} {stored}"))
    kinds = ("compressed-tensors W4", "torchao int8", "torchao mxfp4", "gptq g_idx", "bitsandbytes nf4")
    fine = ",".join(str(good(kind).write(tmp_path / f"good {kind}")) for kind in kinds)
    run = forked.run(["-c", CHILD, fine, *map(str, paths)])
    assert (run.returncode, run.stderr) == (0, "")

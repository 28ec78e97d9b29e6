"""quantize_checkpoint: the same bytes as in memory, after a kill too; and what it refuses to touch."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pennyweight.core.formats import E4M3, INT4, TERNARY
from pennyweight.core.spec import MXFP8, NF4_DOUBLE, NVFP4, TINYGEMM, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io import CheckpointError, load, quantize_checkpoint, save
from pennyweight.io import streaming as streaming_module
from pennyweight.planning.configs import (
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
)
from pennyweight.planning.configs.base import SpecConfig
from pennyweight.quantize import FqnToConfig, PlanError, quantize_
from tests import forked
from tests.io.test_native_format import assert_same


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 100), nn.Linear(100, 64, bias=False)


class Net(nn.Module):
    """Names as in the models that people have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(50, 64)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.conv = nn.Conv1d(8, 8, 3)
        self.lm_head = nn.Linear(64, 50, bias=False)
        self.register_buffer("steps", torch.tensor(7))


def source(folder: Path, dtype: torch.dtype = torch.bfloat16, max_shard_bytes: int = 20_000) -> Net:
    torch.manual_seed(0)
    model = Net().to(dtype)
    save(model, folder, max_shard_bytes=max_shard_bytes)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "config.json").write_text('{"hidden_size": 64, "model_type": "none of these"}')
    (folder / "modeling.py").write_text("print('code')")
    return model


def contents(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in sorted(folder.iterdir())}


CONFIGS = {
    "int8": Int8WeightOnlyConfig(),
    "int8 dynamic": Int8DynamicActivationInt8WeightConfig(),
    "int4": Int4WeightOnlyConfig(group_size=32),
    "tinygemm": SpecConfig(TINYGEMM.with_(block=(32,))),
    "mx": SpecConfig(MXFP8),
    "nested": SpecConfig(NF4_DOUBLE),
    "nested tensor": SpecConfig(NVFP4),
    "tensor": SpecConfig(QuantSpec(TERNARY, None)),
    "square": SpecConfig(QuantSpec(E4M3, (8, 8))),
    "padded": SpecConfig(QuantSpec(INT4, (48,))),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_file_as_quantizing_in_memory_and_saving(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming_module, "ROWS_NUMEL", 300)  # so that a weight is written in many pieces
    monkeypatch.setattr(streaming_module, "COPY_BYTES", 256)
    model = source(tmp_path / "src", dtype)
    report = quantize_checkpoint(tmp_path / "src", tmp_path / "dst", CONFIGS[name])
    in_memory = quantize_(model, CONFIGS[name])
    save(model, tmp_path / "memory")
    assert contents(tmp_path / "dst")["model.safetensors"] == contents(tmp_path / "memory")["model.safetensors"]
    theirs = {r.name: r for r in in_memory.rows}
    assert {r.name for r in report.rows} == set(theirs)
    for row in report.rows:
        assert (row.scheme, row.kernel) == (theirs[row.name].scheme, theirs[row.name].kernel)
        assert row.sqnr == pytest.approx(theirs[row.name].sqnr)
        assert row.bytes_before == theirs[row.name].bytes_before
    assert len(report.quantized) == 7


def test_the_result_runs(tmp_path: Path) -> None:
    model = source(tmp_path / "src")
    quantize_checkpoint(tmp_path / "src", tmp_path / "dst", CONFIGS["int8"], max_shard_bytes=9000)
    quantize_(model, CONFIGS["int8"])
    with torch.device("meta"):
        fresh = Net()
    load(tmp_path / "dst", fresh)
    for key, tensor in model.state_dict().items():
        assert_same(tensor, fresh.state_dict()[key])
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert torch.equal(fresh.layers[0].up(x), model.layers[0].up(x))


def test_small_files_come_along_and_code_does_not(tmp_path: Path) -> None:
    source(tmp_path / "src")
    quantize_checkpoint(tmp_path / "src", tmp_path / "dst", CONFIGS["int4"])
    assert set(contents(tmp_path / "dst")) == {"config.json", "tokenizer.json", "model.safetensors"}
    config = json.loads((tmp_path / "dst" / "config.json").read_text())
    assert config["hidden_size"] == 64
    assert config["quantization_config"] == {
        "quant_method": "pennyweight", "version": 1, "config": {"type": "Int4WeightOnlyConfig", "group_size": 32},
        "modules_to_not_convert": None,
    }  # fmt: skip
    with pytest.raises(CheckpointError, match="already quantized"):
        quantize_checkpoint(tmp_path / "dst", tmp_path / "again", CONFIGS["int4"])


def test_progress_and_dry_run(tmp_path: Path) -> None:
    source(tmp_path / "src")
    told: list[Any] = []
    planned = quantize_checkpoint(tmp_path / "src", tmp_path / "dst", CONFIGS["int4"], dry_run=True)
    assert not (tmp_path / "dst").exists()
    done = quantize_checkpoint(
        tmp_path / "src", tmp_path / "dst", CONFIGS["int4"], progress=lambda *a: told.append(a), max_shard_bytes=9000
    )
    assert [r.name for r in planned.quantized] == [r.name for r in done.quantized]
    assert [count for count, _, _ in told] == list(range(1, 8))
    assert {total for _, total, _ in told} == {7}
    assert "layers guessed from names" in done.config
    assert all(r.sqnr is None for r in planned.rows)
    assert all(r.sqnr is not None and r.sqnr > 10 for r in done.quantized)
    assert sum(r.bytes_after for r in done.rows) + 8 == sum(
        t.nbytes for t in load(tmp_path / "dst").values()
    )  # and the buffer


# -- which tensors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        (["lm_head"], {"lm_head.weight"}),
        (["lm_head.weight"], {"lm_head.weight"}),
        (["up"], {f"layers.{i}.up.weight" for i in range(3)}),
        (["layers.1"], {"layers.1.up.weight", "layers.1.down.weight"}),
        (["layers.*.down", "lm_head"], {f"layers.{i}.down.weight" for i in range(3)} | {"lm_head.weight"}),
    ],
)
@pytest.mark.parametrize("by_name", [False, True], ids=["config", "FqnToConfig"])
def test_skip(skip: list[str], left: set[str], by_name: bool, tmp_path: Path) -> None:
    source(tmp_path / "src")
    config = FqnToConfig({"_default": CONFIGS["int8"]}) if by_name else CONFIGS["int8"]
    report = quantize_checkpoint(tmp_path / "src", tmp_path / "dst", config, skip=skip)
    everything = {r.name for r in quantize_checkpoint(tmp_path / "src", tmp_path / "x", config, dry_run=True).quantized}
    assert {r.name for r in report.quantized} == everything - left
    state = load(tmp_path / "dst")
    assert {n for n, t in state.items() if isinstance(t, QT)} == everything - left
    assert all("skipped by" in r.note for r in report.rows if r.name in left)


def test_a_word_that_skips_nothing_is_an_error(tmp_path: Path) -> None:
    source(tmp_path / "src")
    with pytest.raises(PlanError, match=r"skip='lm_haed' matches no module or parameter \(did you mean .*lm_head"):
        quantize_checkpoint(tmp_path / "src", tmp_path / "dst", CONFIGS["int8"], skip=["lm_haed"])
    assert not (tmp_path / "dst").exists()


def test_filters_and_names_see_layers(tmp_path: Path) -> None:
    source(tmp_path / "src")
    report = quantize_checkpoint(
        tmp_path / "src",
        tmp_path / "a",
        CONFIGS["int8"],
        filter_fn=lambda m, n: isinstance(m, nn.Embedding),
        dry_run=True,
    )
    assert [r.name for r in report.quantized] == ["embed_tokens.weight"]
    config = FqnToConfig({"layers.*.up": CONFIGS["int4"], "re:conv.*": CONFIGS["int8"]})
    report = quantize_checkpoint(tmp_path / "src", tmp_path / "b", config)
    assert {r.name for r in report.quantized} == {"conv.weight", *(f"layers.{i}.up.weight" for i in range(3))}


def test_ties_of_the_source_stay(tmp_path: Path) -> None:
    model = Net()
    model.lm_head.weight = model.embed_tokens.weight
    save(model, tmp_path / "src")
    for skip, kind in (["lm_head"], Tensor), ([], QT):
        quantize_checkpoint(tmp_path / "src", tmp_path / kind.__name__, CONFIGS["int8"], skip=skip)
        out = load(tmp_path / kind.__name__)
        assert out["lm_head.weight"] is out["embed_tokens.weight"]
        assert type(out["lm_head.weight"]) is kind
        fresh = load(tmp_path / kind.__name__, Net())
        assert fresh.lm_head.weight is fresh.embed_tokens.weight


# -- stopping and going on ---------------------------------------------------------------------------------------------

CHILD = """
import os, signal, sys
from pennyweight import Int4WeightOnlyConfig
from pennyweight.io import quantize_checkpoint
src, dst, stop = sys.argv[1:]
def told(done, total, name):
    if done == int(stop):
        os.kill(os.getpid(), signal.SIGKILL)
quantize_checkpoint(src, dst, Int4WeightOnlyConfig(group_size=32), max_shard_bytes=6000, progress=told)
"""


def test_killed_and_resumed_gives_the_same_bytes(tmp_path: Path) -> None:
    source(tmp_path / "src")
    whole = quantize_checkpoint(tmp_path / "src", tmp_path / "whole", CONFIGS["int4"], max_shard_bytes=6000)
    expected = contents(tmp_path / "whole")
    assert len(expected) > 6
    dst = tmp_path / "dst"
    seen: set[str] = set()
    for stop in (1, 4, 6):  # in the first shard, later, and near the end, each going on from the one before
        run = forked.run(["-c", CHILD, str(tmp_path / "src"), str(dst), str(stop)])
        assert run.returncode == -signal.SIGKILL, run.stderr
        there = contents(dst)
        assert "model.safetensors.index.json" not in there
        assert "quantize.progress.json" in there
        assert any(n.endswith(".partial") for n in there)
        finished = {n for n in there if n.endswith(".safetensors")}
        assert seen <= finished
        assert all(there[n] == expected[n] for n in finished)
        seen = finished
        with pytest.raises(CheckpointError, match="is unfinished"):
            load(dst)
    assert seen
    times = {n: (dst / n).stat().st_mtime_ns for n in seen}
    report = quantize_checkpoint(tmp_path / "src", dst, CONFIGS["int4"], max_shard_bytes=6000)
    assert contents(dst) == expected
    assert {n: (dst / n).stat().st_mtime_ns for n in seen} == times
    assert [(r.name, r.bytes_after, r.sqnr) for r in report.rows] == [
        (r.name, r.bytes_after, pytest.approx(r.sqnr)) for r in whole.rows
    ]


def interrupted(tmp_path: Path, config: Any = CONFIGS["int4"], **kwargs: Any) -> Path:
    """A destination in which a job was stopped after its third tensor."""

    def told(done: int, total: int, name: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(tmp_path / "src", tmp_path / "dst", config, max_shard_bytes=6000, progress=told, **kwargs)
    assert not list((tmp_path / "dst").glob("*.partial"))
    return tmp_path / "dst"


def test_another_job_is_not_mixed_in(tmp_path: Path) -> None:
    source(tmp_path / "src")
    dst = interrupted(tmp_path)
    before = contents(dst)
    for change in ({"config": CONFIGS["int8"]}, {"max_shard_bytes": 7000}, {"skip": ["lm_head"]}):
        kwargs: Any = {"config": CONFIGS["int4"], "max_shard_bytes": 6000, **change}
        with pytest.raises(CheckpointError, match="another source, config, release or shard size; pass resume=False"):
            quantize_checkpoint(tmp_path / "src", dst, **kwargs)
    (dst / "quantize.progress.json").write_text("[" * 5000)
    with pytest.raises(CheckpointError, match="cannot be read"):
        quantize_checkpoint(tmp_path / "src", dst, CONFIGS["int4"], max_shard_bytes=6000)
    assert {n: c for n, c in contents(dst).items() if "progress" not in n} == {
        n: c for n, c in before.items() if "progress" not in n
    }
    quantize_checkpoint(tmp_path / "src", dst, CONFIGS["int8"], resume=False)
    assert "model-00001-of-00001" not in str(contents(dst).keys())
    assert set(contents(dst)) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert len(load(dst, Net()).layers) == 3


def test_a_changed_source_is_another_job(tmp_path: Path) -> None:
    source(tmp_path / "src")
    dst = interrupted(tmp_path)
    shard = sorted((tmp_path / "src").glob("*.safetensors"))[0]
    os.utime(shard, ns=(1, 1))
    with pytest.raises(CheckpointError, match="another source"):
        quantize_checkpoint(tmp_path / "src", dst, CONFIGS["int4"], max_shard_bytes=6000)


def test_a_finished_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    source(tmp_path / "src")
    quantize_checkpoint(tmp_path / "src", tmp_path / "dst", CONFIGS["int4"])
    before = contents(tmp_path / "dst")
    for resume in (True, False):
        with pytest.raises(CheckpointError, match="already contains a checkpoint"):
            quantize_checkpoint(tmp_path / "src", tmp_path / "dst", CONFIGS["int8"], resume=resume)
    assert contents(tmp_path / "dst") == before
    original = contents(tmp_path / "src")
    for dst in (tmp_path / "src", tmp_path / "src" / ".", tmp_path / "src" / "config.json"):
        with pytest.raises(CheckpointError):
            quantize_checkpoint(tmp_path / "src", dst, CONFIGS["int8"])
    (tmp_path / "link").symlink_to(tmp_path / "src")
    with pytest.raises(CheckpointError, match="is the folder of the source"):
        quantize_checkpoint(tmp_path / "src", tmp_path / "link", CONFIGS["int8"])
    assert contents(tmp_path / "src") == original


PEAK = """
import resource, sys
from pennyweight.io import quantize_checkpoint
from tests.io.test_quantize_files import CONFIGS
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
quantize_checkpoint(sys.argv[1], sys.argv[2], CONFIGS["int4"])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux")
def test_memory_is_not_the_checkpoints(tmp_path: Path) -> None:
    """192 MB in tensors of 48 MB take less than 160 MB over what the imports take; the size of a piece bounds it."""
    big = {f"layers.{i}.weight": torch.full((3000, 8192), 0.01, dtype=torch.bfloat16) for i in range(4)}
    src = tmp_path / "src"
    save(big, src)
    run = forked.run(["-c", PEAK, str(src), str(tmp_path / "dst")], check=True)
    assert int(run.stdout) < 160_000

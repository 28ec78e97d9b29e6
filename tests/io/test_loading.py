"""Loading into models: float, quantized, on meta; ties, dtypes, strictness; all of it or nothing."""

import copy
import gc
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.core.formats import INT4, INT8
from pennyweight.core.spec import FP8_ROW, TINYGEMM, ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io import CheckpointError, load, save
from pennyweight.kernels.repack import prepare
from tests.io.samples import Model, edit_manifest, join, sample_file, sample_folder, sample_model, split
from tests.io.test_native_format import assert_same

INT4_GROUP = QuantSpec(INT4, (32,), scale=torch.bfloat16)
INT8_ROW = QuantSpec(INT8, (-1,))
DYNAMIC = ActivationSpec(QuantSpec(INT8, (-1,)), "dynamic")


class Net(nn.Module):
    """Embedding tied to the head, two layers, a recurrent one, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 64)
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.rnn = nn.LSTM(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.down(torch.relu(self.up(self.embed(ids))))
        x, _ = self.rnn(x)
        return self.head(self.norm(x.flatten(0, 1)))


def quantize(model: Net, spec: QuantSpec, act: ActivationSpec | None = None) -> Net:
    """Every linear weight by round-to-nearest, packed for its kernel; the tie kept."""
    for layer, ops in ((model.up, ("linear",)), (model.down, ("linear",)), (model.head, ("embedding", "linear"))):
        w = prepare(QT.from_float(layer.weight, spec, act=act), ops)
        layer.weight = nn.Parameter(w, requires_grad=False)
    model.embed.weight = model.head.weight
    return model


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 20, (3, 2))


def on_cpu() -> Net:
    return Net().eval()


def on_meta() -> Net:
    with torch.device("meta"):
        model = Net().eval()
    assert {t.device.type for t in model.state_dict().values()} == {"meta"}
    return model


def already_quantized() -> Net:
    return quantize(Net().eval(), FP8_ROW)


@pytest.mark.parametrize(
    "fresh", [lambda: Net().eval(), on_meta, already_quantized], ids=["float", "meta", "quantized"]
)
@pytest.mark.parametrize("act", [None, DYNAMIC], ids=["float input", "int8 input"])
@pytest.mark.parametrize("spec", [INT8_ROW, INT4_GROUP, TINYGEMM, FP8_ROW], ids=str)
def test_the_loaded_model_is_the_saved_one(
    spec: QuantSpec, act: ActivationSpec | None, fresh: Callable[[], Net], ids: Tensor, tmp_path: Path
) -> None:
    saved = quantize(Net().eval(), spec, act)
    save(saved, tmp_path)
    model = fresh()
    assert load(tmp_path, model) is model
    for name, tensor in saved.state_dict().items():
        assert_same(tensor, model.state_dict()[name])
    assert model.head.weight is model.embed.weight
    assert isinstance(model.head.weight, nn.Parameter)
    assert not model.head.weight.requires_grad
    assert torch.equal(model(ids), saved(ids))


def test_weights_are_packed_for_their_kernels(tmp_path: Path) -> None:
    saved = quantize(Net().eval(), TINYGEMM)
    assert saved.up.weight.spec.layout not in ("plain", "bits")
    save(saved, tmp_path)
    model = load(tmp_path, Net().eval())
    assert model.up.weight.spec.layout == saved.up.weight.spec.layout
    assert model.head.weight.spec.layout == saved.head.weight.spec.layout


def test_float_parts_are_mapped_and_changing_them_leaves_the_file_alone(tmp_path: Path) -> None:
    path = sample_file(tmp_path)
    content = path.read_bytes()
    model = load(path, Model())
    bias, codes = model.int4.bias, model.e4m3.weight.codes
    assert bias.requires_grad
    with torch.no_grad():
        bias.add_(1)
        codes.zero_()
        model.e4m3.weight.copy_(torch.randn(8, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.e4m3(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    assert path.read_bytes() == content


def test_saving_over_the_file_that_is_mapped(tmp_path: Path) -> None:
    save(sample_model(), tmp_path)
    model = load(tmp_path, Model())
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.int4.bias.zero_()
    save(model, tmp_path)
    again = load(tmp_path, Model())
    assert torch.equal(again.int4.bias, torch.zeros(8))
    for name, tensor in model.state_dict().items():
        assert_same(tensor, again.state_dict()[name])
        if name != "int4.bias":
            assert_same(tensor, before[name])


def test_requires_grad_stays_as_the_model_has_it(tmp_path: Path) -> None:
    save(sample_model(), tmp_path)
    model = Model()
    model.e4m3.bias.requires_grad_(False)
    load(tmp_path, model)
    assert not model.e4m3.bias.requires_grad
    assert model.int4.bias.requires_grad
    assert not model.int4.weight.requires_grad


def test_the_files_dtype_counts(tmp_path: Path) -> None:
    save(Model().bfloat16(), tmp_path)
    model = load(tmp_path, Model())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_shard_folder_an_index_and_a_file(tmp_path: Path) -> None:
    folder = sample_folder(tmp_path)
    expected = sample_model().state_dict()
    for path in (folder, str(folder), folder / "model.safetensors.index.json", sample_file(tmp_path)):
        out = load(path)
        assert out.keys() == expected.keys()
        for name, tensor in expected.items():
            assert_same(tensor, out[name])
        assert out["tied.weight"] is out["int4.weight"]


def test_links_within_the_folder_and_the_hubs_cache(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    sample_file(tmp_path).rename(blobs / "1234")
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs/1234"))
    assert "int4.weight" in load(snapshot)
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "real.safetensors").write_bytes((blobs / "1234").read_bytes())
    (inner / "model.safetensors").symlink_to("real.safetensors")
    assert "int4.weight" in load(inner)


def test_device_moves_everything(tmp_path: Path) -> None:
    out = load(sample_file(tmp_path), device="meta")
    assert {t.device.type for t in out.values()} == {"meta"}
    assert out["tied.weight"] is out["int4.weight"]
    model = load(tmp_path / "sample.safetensors", Model(), device="meta")
    assert {t.device.type for t in model.state_dict().values()} == {"meta"}


def test_a_default_device_or_inference_mode_around_it_changes_nothing(tmp_path: Path) -> None:
    path = sample_file(tmp_path)
    with torch.device("meta"), torch.inference_mode():
        out = load(path)
        model = load(path, Model())
    for name, tensor in load(path).items():
        assert_same(tensor, out[name])
        assert_same(tensor, model.state_dict()[name])
    model.e4m3(torch.randn(2, 64)).sum().backward()
    assert model.e4m3.bias.grad is not None


# -- what does not fit -------------------------------------------------------------------------------------------------


def expect_refusal(path: Path, model: nn.Module, *said: str) -> None:
    objects = {k: id(v) for k, v in model.state_dict(keep_vars=True).items()}
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError) as caught:
        load(path, model)
    for text in said:
        assert text in str(caught.value)
    assert {k: id(v) for k, v in model.state_dict(keep_vars=True).items()} == objects
    for name, tensor in model.state_dict().items():
        assert_same(tensor, before[name])


def test_missing_unexpected_and_misshapen(tmp_path: Path) -> None:
    state = sample_model().state_dict()
    save({k: v for k, v in state.items() if k != "mx.weight"}, tmp_path / "less")
    save(state | {"more": torch.zeros(2)}, tmp_path / "more")
    save(state | {"mx.weight": torch.zeros(8, 65)}, tmp_path / "shape")
    save(state | {"steps": torch.tensor(3.0)}, tmp_path / "kind")
    save(state | {"steps": torch.tensor(3, dtype=torch.int32)}, tmp_path / "int32")
    save(state | {"mask": QT.from_float(torch.randn(2, 4), INT8_ROW)}, tmp_path / "quantized")
    expect_refusal(tmp_path / "less", Model(), "mx.weight", "the checkpoint does not", "strict=False")
    expect_refusal(tmp_path / "more", Model(), "more", "the model does not", "strict=False")
    expect_refusal(tmp_path / "shape", Model(), "mx.weight", "[8, 64]", "[8, 65]")
    expect_refusal(tmp_path / "kind", Model(), "steps", "torch.int64", "torch.float32")
    expect_refusal(tmp_path / "int32", Model(), "steps", "torch.int32")
    expect_refusal(tmp_path / "quantized", Model(), "mask")


def test_not_strict_takes_what_fits(tmp_path: Path) -> None:
    state = sample_model().state_dict()
    save({k: v for k, v in state.items() if k != "mx.weight"} | {"more": torch.zeros(2)}, tmp_path)
    model = Model()
    old = model.mx.weight
    load(tmp_path, model, strict=False)
    assert model.mx.weight is old
    assert_same(model.e4m3.weight.data, state["e4m3.weight"])
    save(state | {"mx.weight": torch.zeros(8, 65)}, tmp_path)
    with pytest.raises(CheckpointError, match=r"mx\.weight"):
        load(tmp_path, model, strict=False)


def test_a_bad_value_in_the_last_tensor_changes_nothing(tmp_path: Path) -> None:
    header, data = split(sample_file(tmp_path).read_bytes())
    begin = header["static.weight.scale"]["data_offsets"][0]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(join(header, data[:begin] + b"\xff" * 4 + data[begin + 4 :]))
    expect_refusal(path, Model(), "static.weight", "NaN")
    expect_refusal(path, sample_model(), "static.weight", "NaN")


def test_newer_versions_say_so(tmp_path: Path) -> None:
    header, data = split(sample_file(tmp_path).read_bytes())
    path = tmp_path / "new.safetensors"
    path.write_bytes(join(edit_manifest(header, lambda m: m.update(version=7)), data))
    expect_refusal(path, Model(), "version 7 is newer", "upgrade")


def test_a_module_that_objects_gets_everything_back(tmp_path: Path) -> None:
    class Stubborn(Model):
        locked = False

        def __setattr__(self, name: str, value: Any) -> None:
            if self.locked and name == "steps":
                raise RuntimeError("locked")
            super().__setattr__(name, value)

    save(sample_model(), tmp_path)
    model = Stubborn()
    model.locked = True
    objects = {k: id(v) for k, v in model.state_dict(keep_vars=True).items()}
    with pytest.raises(RuntimeError, match="locked"):
        load(tmp_path, model)
    assert {k: id(v) for k, v in model.state_dict(keep_vars=True).items()} == objects


def test_meta_buffers_that_no_file_holds(tmp_path: Path) -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("freq", torch.arange(4.0), persistent=False)

    save(Rotary(), tmp_path)
    with torch.device("meta"):
        model = Rotary()
    expect = "freq: non-persistent buffers on the meta device, which no checkpoint contains"
    with pytest.raises(CheckpointError, match=expect):
        load(tmp_path, model)
    assert model.layer.weight.device.type == "meta"
    load(tmp_path, model, strict=False)
    assert model.layer.weight.device.type == "cpu"
    assert load(tmp_path, Rotary()).freq[3] == 3


def test_weights_left_as_plain_tensors(tmp_path: Path) -> None:
    """PEFT replaces a layer's weight by a plain tensor, which no state dict lists."""

    def plain() -> nn.Module:
        model = nn.Sequential(nn.Linear(64, 8))
        weight = model[0].weight.detach()
        del model[0].weight
        model[0].weight = weight
        return model

    model = plain()
    model[0].weight = QT.from_float(model[0].weight, INT8_ROW)
    save(model, tmp_path)
    fresh = load(tmp_path, plain())
    assert_same(model[0].weight, fresh[0].weight)
    assert_same(model[0].weight, load(tmp_path, nn.Sequential(nn.Linear(64, 8)))[0].weight.data)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    save(normed, tmp_path / "normed")
    assert set(load(tmp_path / "normed")) == set(normed.state_dict())


def test_a_compiled_model_has_plain_names(tmp_path: Path) -> None:
    model = Model()
    save(torch.compile(model), tmp_path)
    assert load(tmp_path).keys() == model.state_dict().keys()
    compiled = torch.compile(Model())
    assert load(tmp_path, compiled) is compiled
    assert torch.equal(compiled.int4.weight, model.int4.weight)


def test_threads_read_one_checkpoint_without_mapping(tmp_path: Path) -> None:
    """Reads have no place in the file in common."""
    state = {f"t{i}": torch.full((1 << 16,), float(i)) for i in range(8)}
    pw.save(state, tmp_path / "m.safetensors")
    with pw.open(tmp_path / "m.safetensors", mmap=False) as checkpoint, ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            found = pool.map(checkpoint.__getitem__, state)
            assert all(torch.equal(a, b) for a, b in zip(found, state.values(), strict=True))


def open_descriptors(path: Path) -> int:
    """How many descriptors of this process lead to a file. 0 where the system does not list them."""
    folder = Path("/proc/self/fd")
    return sum(os.path.realpath(fd) == str(path) for fd in folder.iterdir()) if folder.is_dir() else 0


@pytest.mark.parametrize("mmap", [True, False])
def test_a_checkpoint_that_nobody_closes(mmap: bool, tmp_path: Path) -> None:
    """The file is closed with the last reference, without a warning (warnings are errors here)."""
    path = tmp_path / "m.safetensors"
    pw.save({"t": torch.ones(3)}, path)
    checkpoint = pw.open(path, mmap=mmap)
    assert open_descriptors(path) == (1 if sys.platform == "linux" else 0)
    del checkpoint
    gc.collect()
    assert open_descriptors(path) == 0
    closed = pw.open(path, mmap=mmap)
    closed.close()
    with pytest.raises(CheckpointError, match="is closed"):
        closed["t"]

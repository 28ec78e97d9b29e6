"""accelerate's hooks move and hold quantized weights like any others."""

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import (
    Accelerator,
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate.utils import set_module_tensor_to_device
from transformers import LlamaForCausalLM

import pennyweight as pw
from pennyweight.integrations.transformers import attach_quantizer
from pennyweight.io import CheckpointError
from tests import forked
from tests.integrations import writers
from tests.integrations.small import IDS, assert_same_weights, float_folder, llama, shape
from tests.integrations.writers import Writer

CONFIGS = {"int8": pw.Int8WeightOnlyConfig(), "int4": pw.Int4WeightOnlyConfig(32), "nf4": pw.NF4WeightOnlyConfig()}


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Any:
    model = llama()
    pw.quantize_(model.model, CONFIGS[request.param])
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


def test_cpu_offload(model: Any) -> None:
    """The weights wait on the meta device, and come for each layer's turn."""
    expected = logits(model)
    moved = cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    assert all(p.is_meta for p in moved.parameters())
    assert torch.equal(logits(moved), expected)
    assert all(p.is_meta for p in moved.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_offload_to_disk(model: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """accelerate's own folder would hold floats, which is refused; files of ours are mapped and hold the codes."""
    model.to(dtype)
    expected = logits(model)
    disk = dict.fromkeys(["model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head"], "disk")
    told = r"as float numbers\. Save the model with pw\.save\(model, folder\) and call"
    with pytest.raises(TypeError, match=told):
        disk_offload(copy.deepcopy(model), tmp_path / "theirs", execution_device=torch.device("cpu"))
    with pytest.raises(TypeError, match=told):
        dispatch_model(copy.deepcopy(model), disk, main_device="cpu", offload_dir=tmp_path / "too", force_hooks=True)
    pw.save(model, tmp_path / "ours")
    with pw.open(tmp_path / "ours") as weights:
        for packed in (True, False):
            moved = copy.deepcopy(model)
            held = weights.packed_for(moved) if packed else weights
            cpu_offload(moved, execution_device=torch.device("cpu"), state_dict=held)
            assert all(p.is_meta for p in moved.parameters())
            for _ in range(2):
                got = logits(moved)
                if packed:  # the same kernels as without offload
                    assert torch.equal(got, expected)
                else:  # files hold no packing, so another kernel runs, on the same codes
                    error = (got - expected).abs().max() / expected.abs().max()
                    assert error <= (2e-2 if dtype is torch.bfloat16 else 2e-5)
                assert all(p.is_meta for p in moved.parameters())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_files_are_packed_as_the_model_is(tied: bool, tmp_path: Path) -> None:
    """Also for a model that is empty, and for tables that are looked up and multiplied."""
    model = llama(tie_word_embeddings=tied)
    pw.quantize_(model, CONFIGS["int4"], lambda m, name: isinstance(m, (torch.nn.Linear, torch.nn.Embedding)))
    pw.save(model, tmp_path)
    with init_empty_weights():
        empty = LlamaForCausalLM(shape(tie_word_embeddings=tied)).eval()
    with pw.open(tmp_path) as weights:
        for like in (model, empty):
            packed = weights.packed_for(like)
            assert set(packed) == set(weights)
            assert len(packed) == len(weights)
            for name, p in model.named_parameters(remove_duplicate=False):
                held = packed[name]
                assert type(held) is type(p) or not isinstance(p, pw.AffineQuantizedTensor)
                if isinstance(p, pw.AffineQuantizedTensor):
                    assert held.spec == p.spec
                assert (
                    torch.equal(held.detach(), p.detach()) if type(p) is torch.nn.Parameter else held.dtype == p.dtype
                )


@pytest.mark.parametrize("quantized", [False, True], ids=["into float", "into quantized"])
def test_load_checkpoint_and_dispatch(model: Any, quantized: bool, tmp_path: Path) -> None:
    """A state dict of torch.save; safetensors of ours are read by pw.load, which dispatch_model may follow."""
    expected = logits(model)
    torch.save(model.state_dict(), tmp_path / "state.bin")
    pw.save(model, tmp_path / "ours")

    def empty() -> Any:
        with init_empty_weights():
            made = LlamaForCausalLM(shape()).eval()
        if quantized:
            pw.quantize_(made.model, pw.Int8WeightOnlyConfig())
        return made

    with warnings.catch_warnings(record=True):
        loaded = load_checkpoint_and_dispatch(empty(), str(tmp_path / "state.bin"), device_map={"": "cpu"})
    assert_same_weights(loaded, model)
    assert torch.equal(logits(loaded), expected)
    loaded = dispatch_model(pw.load(tmp_path / "ours", empty()), {"": "cpu"}, main_device="cpu", force_hooks=True)
    assert_same_weights(loaded, model)
    assert torch.equal(logits(loaded), expected)
    with pytest.raises(TypeError, match=r"as float numbers"):
        load_checkpoint_and_dispatch(
            empty(), str(tmp_path / "state.bin"), device_map={"": "disk"}, offload_folder=tmp_path / "off"
        )


LOADERS = {
    "in_model": load_checkpoint_in_model,
    "in_model, device_map": partial(load_checkpoint_in_model, device_map={"": "cpu"}),
    "and_dispatch": partial(load_checkpoint_and_dispatch, device_map={"": "cpu"}),
}


def empty_llama() -> Any:
    with init_empty_weights():
        return LlamaForCausalLM(shape()).eval()


def other_llama(config: Any = None) -> Any:
    torch.manual_seed(11)
    made = LlamaForCausalLM(shape()).eval()
    if config is not None:
        pw.quantize_(made.model, config)
    return made


@pytest.mark.filterwarnings("ignore:load_state_dict:UserWarning")  # that values are copied into another form
@pytest.mark.parametrize("shards", [1 << 30, 20_000], ids=["one file", "shards"])
@pytest.mark.parametrize("into", ["float", "the same config", "empty"])
@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_loaders_read_native_folders(load: Any, into: str, shards: int, tmp_path: Path) -> None:
    if into == "empty" and load is load_checkpoint_in_model:
        pytest.skip("accelerate needs a device_map for a model without weights, whatever the file")
    model = llama()
    pw.quantize_(model.model, CONFIGS["int4"])
    pw.save(model, tmp_path, max_shard_bytes=shards)
    made = {"float": other_llama, "empty": empty_llama, "the same config": partial(other_llama, CONFIGS["int4"])}[
        into
    ]()
    load(made, str(tmp_path))
    torch.testing.assert_close(logits(made), logits(model), rtol=1e-4, atol=1e-5)


def test_inside_init_empty_weights(tmp_path: Path) -> None:
    """It replaces each parameter that a module gets by type(parameter)(moved, **attributes of the parameter)."""
    model = llama()
    pw.quantize_(model.model, CONFIGS["int4"])
    pw.save(model, tmp_path)
    name = "model.layers.0.mlp.up_proj"
    weight = model.get_submodule(name).weight
    weight.mark = "kept"
    with init_empty_weights():
        made = LlamaForCausalLM(shape()).eval()
        with pytest.raises(CheckpointError, match=r"call pennyweight\.load after the block"):
            pw.load(tmp_path, made)
        made.get_submodule(name).weight = weight
    assert made.get_submodule(name).weight.is_meta
    assert made.get_submodule(name).weight.spec == weight.spec
    assert made.get_submodule(name).weight.mark == "kept"
    assert all(p.is_meta for p in made.parameters())
    assert torch.equal(logits(pw.load(tmp_path, made)), logits(model))
    with pytest.raises(TypeError, match="unexpected arguments"):
        pw.AffineQuantizedTensor(weight.parts, weight.spec, weight.shape, mark="kept")


def test_a_folder_that_cannot_be_read_file_by_file_is_an_error(tmp_path: Path) -> None:
    """transformers gives all shards the whole manifest, and divides the parts of a weight as it likes."""
    model = llama()
    pw.quantize_(model.model, CONFIGS["int4"])
    attach_quantizer(model, CONFIGS["int4"]).save_pretrained(tmp_path, max_shard_size="20KB")
    made = other_llama()
    before = logits(made)
    with pytest.raises(CheckpointError, match=r"pennyweight\.load\(folder, model\)"):
        load_checkpoint_and_dispatch(made, str(tmp_path), device_map={"": "cpu"})
    assert torch.equal(logits(made), before)


WITHOUT_US = """
import sys
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model
from safetensors.torch import load_file
nn = torch.nn
make = lambda: nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64), nn.Linear(64, 32))
for folder in sys.argv[1:]:
    state = load_file(folder + "/model.safetensors")
    for load in (
        lambda m: load_checkpoint_in_model(m, folder),
        lambda m: load_checkpoint_in_model(m, folder, device_map={"": "cpu"}),
        lambda m: load_checkpoint_and_dispatch(m, folder, device_map={"": "cpu"}),
        lambda m: m.load_state_dict(state, strict=False),
        lambda m: m.load_state_dict(state, strict=False, assign=True),
    ):
        try:
            load(make())
        except (RuntimeError, ValueError) as error:
            assert "torch.Size([0])" in str(error), error
        else:
            sys.exit(f"weights that the file in {folder} does not have were left as they were initialized")
assert "pennyweight" not in sys.modules
"""


def test_no_loader_leaves_random_weights_in_a_process_without_us(tmp_path: Path) -> None:
    folders = [str(tmp_path / config) for config in ("int8", "int4", "nvfp4")]
    for folder in folders:
        pw.save(writers.quantized(writers.pair, Path(folder).name), folder)
    command = ["-W", "ignore", "-c", WITHOUT_US, *folders]
    done = forked.run(command)
    assert done.returncode == 0, done.stderr[-2000:]


def test_dispatch_model(model: Any) -> None:
    places = dict.fromkeys(["model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head"], "cpu")
    moved = dispatch_model(copy.deepcopy(model), places, main_device="cpu", force_hooks=True)
    assert torch.equal(logits(moved), logits(model))


def test_a_tensor_is_put_where_another_was(model: Any) -> None:
    moved = copy.deepcopy(model)
    name = "model.layers.0.mlp.up_proj.weight"
    set_module_tensor_to_device(moved, name, "cpu", value=model.get_parameter(name))
    assert isinstance(moved.get_parameter(name), pw.AffineQuantizedTensor)
    assert_same_weights(moved, model)


def test_models_made_without_weights_are_filled(model: Any, tmp_path: Path) -> None:
    pw.save(model, tmp_path / "ours")
    with init_empty_weights():
        empty = LlamaForCausalLM(shape())
    assert_same_weights(pw.load(tmp_path / "ours", empty), model)
    assert torch.equal(logits(empty.eval()), logits(model))

    with init_empty_weights():
        empty = LlamaForCausalLM(shape())
    loaded = load_checkpoint_and_dispatch(empty, str(float_folder(tmp_path / "float")), device_map={"": "cpu"})
    pw.quantize_(loaded.model, pw.Int8WeightOnlyConfig())
    assert torch.isfinite(logits(loaded)).all()


def test_accelerator_prepares(model: Any) -> None:
    prepared = Accelerator(cpu=True).prepare(copy.deepcopy(model))
    assert torch.equal(logits(prepared), logits(model))


def save_state(model: Any, folder: Path, **kwargs: Any) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    accelerator.save_state(str(folder), **kwargs)
    accelerator.free_memory()


def load_state(folder: Path, model: Any) -> Any:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    accelerator.load_state(str(folder))
    accelerator.free_memory()
    return model


def save_pretrained(model: Any, folder: Path) -> None:
    """The lines of accelerate's own documentation."""
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    accelerator.unwrap_model(prepared).save_pretrained(
        folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(prepared),
    )  # fmt: skip


def save_model(model: Any, folder: Path, **kwargs: Any) -> None:
    Accelerator(cpu=True).save_model(model, str(folder), **kwargs)


def load_bin(folder: Path, model: Any) -> Any:
    model.load_state_dict(torch.load(folder / "pytorch_model.bin", weights_only=True), strict=False)
    return model


WRITERS = {
    "save_model": Writer(save_model),
    "save_model, pickle": Writer(partial(save_model, safe_serialization=False), load_bin),
    "save_state": Writer(save_state),
    "save_state, pickle": Writer(partial(save_state, safe_serialization=False), load_state),
}
PRETRAINED = {
    "unwrap_model, save_pretrained": Writer(save_pretrained, lambda d, m: LlamaForCausalLM.from_pretrained(d)),
}


@pytest.mark.parametrize("config", ["int4"])  # one: save_state takes seconds
@pytest.mark.parametrize("make", writers.MODELS.values(), ids=writers.MODELS)
@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_writers(writer: Writer, make: Any, config: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    other = writers.quantized(make, config)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    writers.check(writer, writers.quantized(make, config), other, tmp_path)


@pytest.mark.parametrize("ties", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("writer", [*PRETRAINED.values(), *WRITERS.values()], ids=[*PRETRAINED, *WRITERS])
def test_writers_of_transformers_models(writer: Writer, ties: bool, tmp_path: Path) -> None:
    model, other = llama(tie_word_embeddings=ties), llama(tie_word_embeddings=ties)
    for m in (model, other):
        pw.quantize_(m, pw.Int4WeightOnlyConfig(32))
    writers.check(writer, model, other, tmp_path, logits)


def test_tied_weights_that_are_dispatched_stay_tied_and_others_apart() -> None:
    """accelerate keeps what it moved in a table by address."""
    model = llama(tie_word_embeddings=True)
    pw.quantize_(model, pw.Int8WeightOnlyConfig(), lambda m, name: isinstance(m, (torch.nn.Linear, torch.nn.Embedding)))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    expected = logits(model)
    moved = cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    assert torch.equal(logits(moved), expected)
    places = dict.fromkeys(["model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head"], "cpu")
    moved = dispatch_model(copy.deepcopy(model), places, main_device="cpu", force_hooks=True)
    assert torch.equal(logits(moved), expected)

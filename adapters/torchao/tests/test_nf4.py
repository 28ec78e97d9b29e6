"""NF4: torchao's numbers bit for bit, its attributes and operators, and QLoRA as its users write it."""

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import pennyweight as pw
from pennyweight.kernels.cpu.library import usable
from pennyweight_torchao.dtypes import nf4tensor
from pennyweight_torchao.dtypes._nf4tensor_api import NF4WeightOnlyConfig, nf4_weight_only
from pennyweight_torchao.dtypes.nf4tensor import (
    LinearNF4,
    NF4Tensor,
    SubclassTensorArgs,
    get_block_absmax,
    implements,
    linear_nf4,
    to_nf4,
)
from pennyweight_torchao.nf4 import operators, parts
from pennyweight_torchao.quantization import quantize_
from tests import forked

GOLDEN = Path(__file__).parent / "golden"
TOLD = load_file(GOLDEN / "torchao_dtypes_0.18.safetensors")
CASES = json.loads((GOLDEN / "torchao_dtypes_0.18.json").read_text(encoding="utf-8"))["nf4"]
PARTS = ("quantized_scalers", "quantization_factor", "scaler_mean", "quantized_data", "nf4")
QT = pw.AffineQuantizedTensor


def weight(rows: int = 64, columns: int = 512, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)).to(dtype)


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_the_numbers_are_torchaos(case: dict) -> None:
    told = {k.rpartition(".")[2]: v for k, v in TOLD.items() if k.startswith(f"nf4.{case['name']}.")}
    w = to_nf4(told["weight"], case["block_size"], case["scaler_block_size"])
    assert torch.equal(w.get_original_weight(), told["original"])
    assert torch.equal(w.dequantize(), told["original"])
    assert torch.equal(w.quantized_data, told["quantized_data"])
    if case["whole"]:
        assert (w.block_size, w.scaler_block_size) == (case["block_size"], case["scaler_block_size"])
        for name in PARTS:
            assert torch.equal(getattr(w, name), told[name]), name
            assert getattr(w, name).dtype == told[name].dtype, name
    again = NF4Tensor(
        SubclassTensorArgs(w.shape, w.stride(), 0, w.dtype, w.device, False), case["block_size"],
        told["quantized_scalers"].numel(), case["scaler_block_size"], *(told[n] for n in PARTS),
    )  # fmt: skip
    assert torch.equal(again.dequantize(), told["original"])


def test_static_functions() -> None:
    x = weight(4, 64, torch.float32)
    q, factor, mean = NF4Tensor.double_quantize_scalers(x.flatten(), 32, 4)
    w = to_nf4(x, 32, 4)
    assert torch.equal(q, w.quantized_scalers)
    assert torch.equal(factor, w.quantization_factor)
    assert torch.equal(mean, w.scaler_mean)
    assert torch.equal(NF4Tensor.convert_to_norm_float_weight(x, 8, 32, w.nf4), w.quantized_data)
    assert get_block_absmax(torch.tensor([1.0, -3.0, 2.0, 0.5]), 2).tolist() == [3.0, 2.0]
    assert NF4Tensor.quantize_tensor_nearest(torch.tensor([0.01, -2.0]), w.nf4).tolist() == [7, 0]
    assert NF4Tensor.dequantize(torch.tensor([0, 15]), w.nf4).tolist() == [-1.0, 1.0]
    scalers = w.dequantize_scalers(w.quantized_scalers, w.quantization_factor, w.scaler_block_size)
    assert (scalers - get_block_absmax(x.flatten(), 32)).abs().max() < 0.02


def test_16_bit_values_are_looked_up() -> None:
    """Above 65,536 elements: the same codes as without a table."""
    x = weight(256, 512)
    w = to_nf4(x)
    parts = [to_nf4(part, 64, 256).quantized_data for part in x.split(64)]
    assert torch.equal(w.quantized_data, torch.cat(parts))


def test_zeros_are_zeros() -> None:
    """torchao divides zero by zero and gets the code of -1."""
    x = weight(64, 64, torch.float32)
    x[3] = 0
    assert to_nf4(x, 64, 64).quantized_data.view(64, 32)[3].tolist() == [0x77] * 32
    w = to_nf4(torch.zeros(64, 64), 64, 64)
    assert (w.dequantize() == 0).all()


@pytest.mark.parametrize(
    ("shape", "blocks", "error", "says"),
    [
        ((2, 2, 64), (64, 1), AssertionError, "dim <= 2 but got dim = 3"),
        ((3, 33), (64, 1), AssertionError, "divisible by block size, got 99 and"),
        ((511, 512), (64, 256), AssertionError, "Number of scalers must be divisible by scaler block size, got 4088"),
        ((64, 33), (64, 33), ValueError, "use a block_size that divides 33"),
    ],
)
def test_what_cannot_be_quantized(shape: tuple, blocks: tuple, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        to_nf4(torch.randn(shape), *blocks)


def built(w: torch.Tensor, **changed: torch.Tensor) -> torch.Tensor:
    """NF4Tensor(...) of the parts of w, some of them changed."""
    old = parts.describe(w)
    meta = SubclassTensorArgs(
        old.original_shape, old.original_strides, old.storage_offset, old.dtype, old.device, old.requires_grad
    )
    names = (
        "block_size", "n_blocks", "scaler_block_size", "quantized_scalers", "quantization_factor", "scaler_mean",
        "quantized_data", "nf4",
    )  # fmt: skip
    return NF4Tensor(meta, *(changed[name] if name in changed else getattr(w, name) for name in names))


def test_nan_is_an_error_and_so_are_parts_of_other_sizes() -> None:
    with pytest.raises(ValueError, match="to_nf4: 1 of 64 values are NaN"):
        to_nf4(torch.cat([torch.zeros(63), torch.tensor([float("nan")])]), 32, 2)
    w = to_nf4(weight(), 64, 256)
    with pytest.raises(ValueError, match="quantized_scalers of 2, expected 512"):
        built(w, quantized_scalers=torch.zeros(2, dtype=torch.int8))
    with pytest.raises(ValueError, match="unsupported table"):
        built(w, nf4=w.nf4 * 2)


# -- attributes and operators ------------------------------------------------------------------------------------------


def test_attributes_exist_on_nf4_weights_only() -> None:
    other = QT.from_float(weight(), pw.QuantSpec(pw.get_format("int4"), (64,)))
    assert not any(hasattr(other, name) for name in (*PARTS, "scaler_block_size"))
    assert not isinstance(other, NF4Tensor)
    plain = QT.from_float(weight(), pw.QuantSpec(pw.get_format("nf4"), (64,)))
    assert plain.block_size == 64
    with pytest.raises(AttributeError, match=r"scales of nf4.* are not quantized"):
        _ = plain.quantized_scalers


def test_a_dtype_dequantizes() -> None:
    w = to_nf4(weight())
    told = w.get_original_weight()
    for plain in (w.to(torch.bfloat16), w.to("cpu", torch.bfloat16), w.to(dtype=torch.bfloat16), w.to(told)):
        assert type(plain) is torch.Tensor
        assert torch.equal(plain, told)
    for plain in (w.to(torch.float32), w.float(), w.to(torch.float32, copy=True)):
        assert type(plain) is torch.Tensor
        assert torch.equal(plain, told.float())
    for same in (w.to("cpu"), w.cpu(), w.to("cpu", non_blocking=True)):
        assert isinstance(same, NF4Tensor)
    assert isinstance(w.to("meta"), NF4Tensor)
    # tensors of our own config keep ours
    own = nn.Sequential(nn.Linear(512, 64))
    pw.quantize_(own, pw.NF4WeightOnlyConfig())
    assert isinstance(own[0].weight.to(torch.bfloat16), QT)


def test_a_module_keeps_its_quantized_weight() -> None:
    layer = nn.Linear(512, 64, dtype=torch.bfloat16)
    layer.weight = nn.Parameter(to_nf4(layer.weight.detach()), requires_grad=False)
    told = layer.weight.quantized_data
    for converted in (copy.deepcopy(layer).to(torch.float32), copy.deepcopy(layer).float()):
        assert isinstance(converted.weight, NF4Tensor)
        assert converted.weight.dtype is torch.float32
        assert torch.equal(converted.weight.quantized_data, told)


@pytest.mark.parametrize("shape", [(64, 512), (64 * 512,)])
def test_shards(shape: tuple) -> None:
    w = to_nf4(weight().view(shape), 64, 32)
    chunks = torch.chunk(w, 2)
    assert [c.size(0) for c in chunks] == [shape[0] // 2] * 2
    assert torch.equal(torch.cat([c.get_original_weight() for c in chunks]), w.get_original_weight())
    for name in ("quantized_scalers", "quantization_factor", "quantized_data"):
        assert torch.equal(torch.cat([getattr(c, name) for c in chunks]), getattr(w, name)), name
    shard = w.new_zeros(chunks[0].size())
    assert isinstance(shard, NF4Tensor)
    assert shard.n_blocks == chunks[0].n_blocks
    assert (shard.dequantize() == 0).all()
    shard[: chunks[0].size(0)].copy_(chunks[1])
    assert torch.equal(shard.dequantize(), chunks[1].dequantize())
    with pytest.raises(NotImplementedError, match=r"new size \(33,\): needs .* a multiple of 64 elements"):
        w.new_zeros(33)


def test_views() -> None:
    w = to_nf4(weight(), 64, 32)
    told = w.get_original_weight()
    flat = w.view(-1)
    assert isinstance(flat, NF4Tensor)
    assert torch.equal(flat.dequantize(), told.view(-1))
    assert torch.equal(flat.quantized_scalers, w.quantized_scalers)
    for back in (flat.view(64, 512), flat.reshape([64, -1]), torch.as_strided(flat, (64, 512), (512, 1), 0)):
        assert isinstance(back, NF4Tensor)
        assert torch.equal(back.dequantize(), told)
    assert w[:64].data_ptr() == w.data_ptr()
    assert torch.equal(w.t().get_original_weight(), told.t())
    with pytest.raises(RuntimeError):
        w.view(7, 7)
    with pytest.raises(RuntimeError):
        flat.zero_()  # a view in another shape is a copy, so writes to it must not be lost


def test_copies_are_in_the_blocks_of_the_target() -> None:
    x = weight(2, 64, torch.float32)
    target, source = to_nf4(torch.ones(2, 64), 32, 4), to_nf4(x, 64, 2)
    target.copy_(x)
    assert torch.equal(target.dequantize(), to_nf4(x, 32, 4).dequantize())
    target.copy_(source)
    assert (target.block_size, target.scaler_block_size) == (32, 4)
    assert torch.equal(target.dequantize(), to_nf4(source.dequantize(), 32, 4).dequantize())
    target.copy_(x.bfloat16())
    assert torch.equal(target.dequantize(), to_nf4(x.bfloat16().float(), 32, 4).dequantize())


def test_files_and_copies_are_exact(tmp_path: Path) -> None:
    w = nn.Parameter(to_nf4(weight()), requires_grad=False)
    torch.save({"w": w}, tmp_path / "w.pt")
    layer = nn.Linear(512, 64, bias=False, dtype=torch.bfloat16)
    layer.weight = w
    pw.save(layer, tmp_path / "own")
    loaded = torch.load(tmp_path / "w.pt", weights_only=True)["w"]
    for same in (copy.deepcopy(w), w.clone(), w.detach(), loaded, pw.load(tmp_path / "own")["weight"]):
        assert isinstance(same, NF4Tensor)
        assert torch.equal(same.dequantize(), w.dequantize())
        assert all(torch.equal(getattr(same, name), getattr(w, name)) for name in PARTS)
    assert isinstance(torch.empty_like(w, device="cpu"), NF4Tensor)


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        w = to_nf4(nn.Linear(512, 512, dtype=torch.bfloat16).weight)
    assert (w.device.type, w.block_size, w.scaler_block_size, w.n_blocks) == ("meta", 64, 256, 4096)
    assert w.quantized_scalers.shape == (4096,)
    assert w.requires_grad


def test_your_own_operators() -> None:
    calls = []

    @implements([torch.ops.aten.clone.default])
    def requantize(func, *args, **kwargs):  # as in torchtune
        calls.append(func)
        return to_nf4(args[0][0].get_original_weight())

    try:
        w = to_nf4(weight())
        assert isinstance(w.clone(), NF4Tensor)
        weight().clone()
        assert calls == [torch.ops.aten.clone.default]
    finally:
        del operators.NF4_OPS_TABLE[torch.ops.aten.clone.default]
    assert torch.equal(w.clone().quantized_scalers, w.quantized_scalers)
    assert len(calls) == 1


def test_your_own_functions() -> None:
    @nf4tensor.implements_torch_function(torch.Tensor.trace)
    def trace(x):
        if x.shape[0] == 64:
            raise NotImplementedError
        return "mine"

    assert to_nf4(weight(32, 1024), 64, 256).trace() == "mine"
    with pytest.warns(pw.FallbackWarning, match="trace"):
        assert type(to_nf4(weight()).trace()) is torch.Tensor


# -- QLoRA -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("linear", [linear_nf4, LinearNF4.apply, F.linear])
def test_products_and_gradients(linear, dtype: torch.dtype) -> None:
    w = to_nf4(weight(dtype=dtype))
    x = torch.randn(3, 512, dtype=dtype, requires_grad=True)
    y = linear(x, w)
    (y * torch.arange(64)).sum().backward()
    plain = x.detach().clone().requires_grad_()
    told = F.linear(plain, w.get_original_weight())
    (told * torch.arange(64)).sum().backward()
    limit = 1e-5 if dtype is torch.float32 else 1e-2
    assert (y - told).norm() <= limit * told.norm()
    assert (x.grad - plain.grad).norm() <= limit * plain.grad.norm()
    assert (y.dtype, x.grad.dtype, w.grad) == (dtype, dtype, None)


def test_the_kernel_of_scales_that_rows_share() -> None:
    """256 scalers of one factor are four rows of 4,096 elements."""
    w = to_nf4(weight(64, 4096))
    assert w.spec.layout == "cpu_float" or usable() is not True
    assert w.nbytes * 8 / w.numel() < 4.15


class LoRALinear(nn.Module):
    """As in torchtune."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        linear = nn.Linear(inputs, outputs, bias=False)
        self.register_parameter("weight", nn.Parameter(to_nf4(linear.weight)))
        self.lora_a, self.lora_b = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.lora_b.weight)
        self.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear_nf4(input=x, weight=self.weight) + self.lora_b(self.lora_a(x))


def as_dtype(model, state_dict, *args, dtype=torch.bfloat16, offload_to_cpu=True, **kwargs) -> None:
    """torchtune's state-dict hook."""
    for k, v in state_dict.items():
        if isinstance(v, NF4Tensor):
            state_dict[k] = v.to(dtype)
            if offload_to_cpu:
                state_dict[k] = state_dict[k].cpu()


def test_qlora() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(LoRALinear(512, 64, 4), nn.ReLU(), LoRALinear(64, 512, 4))
    base = {"0.weight": torch.randn(64, 512) / 20, "2.weight": torch.randn(512, 64) / 8}
    model.load_state_dict(base, strict=False)
    assert torch.equal(model[0].weight.dequantize(), to_nf4(base["0.weight"]).dequantize())
    frozen = [m.weight.quantized_data for m in (model[0], model[2])]
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 4
    optimizer, x, y = torch.optim.AdamW(trained, 1e-2), torch.randn(16, 512), torch.randn(16, 512)
    losses = []
    for _ in range(20):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert all(torch.equal(m.weight.quantized_data, q) for m, q in zip((model[0], model[2]), frozen, strict=True))
    told = model(x)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = nn.Sequential(LoRALinear(512, 64, 4), nn.ReLU(), LoRALinear(64, 512, 4))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), told)
    model.register_state_dict_post_hook(as_dtype)
    state = model.state_dict()
    assert {type(v) for v in state.values()} == {torch.Tensor}
    assert state["0.weight"].dtype is torch.bfloat16


@pytest.mark.parametrize("config", [NF4WeightOnlyConfig(), NF4WeightOnlyConfig, nf4_weight_only(32, 64)])
def test_the_config(config) -> None:
    model = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 512))
    told = [model[i].weight.detach().clone() for i in (0, 2)]
    quantize_(model, config)
    sizes = (64, 256) if config is NF4WeightOnlyConfig else (config.block_size, config.scaler_block_size)
    for i, x in zip((0, 2), told, strict=True):
        assert isinstance(model[i].weight, NF4Tensor)
        assert not model[i].weight.requires_grad
        assert torch.equal(model[i].weight.dequantize(), to_nf4(x, *sizes).dequantize())


@pytest.mark.filterwarnings("ignore:.*API of torchao before 0.10")
def test_the_function_of_0_9() -> None:
    model = nn.Sequential(nn.Linear(512, 64))
    quantize_(model, nf4tensor.nf4_weight_only(32, 64))
    assert (model[0].weight.block_size, model[0].weight.scaler_block_size) == (32, 64)


def test_the_report_says_what_stays_float() -> None:
    model = nn.Sequential(nn.Linear(512, 64), nn.Linear(64, 7))
    report = quantize_(model, NF4WeightOnlyConfig())
    assert isinstance(model[0].weight, NF4Tensor)
    assert not isinstance(model[1].weight, NF4Tensor)
    assert "448 elements are not a multiple of 64 elements times 256 scalers" in str(report.to_json())


def test_the_class_alone_has_the_attributes() -> None:
    """Without torchao.quantization, which attaches the attributes of all weights."""
    code = (
        "import torch\n"
        "from pennyweight_torchao.dtypes.nf4tensor import to_nf4\n"
        "w = to_nf4(torch.ones(64, 256))\n"
        "print(w.block_size, w.n_blocks, w.scaler_block_size, type(w.to(torch.float32)).__name__)\n"
    )
    done = forked.run(["-c", code])
    assert done.stdout.split() == ["64", "256", "256", "Tensor"], done.stderr


def test_embeddings_and_joined_weights() -> None:
    table, index = to_nf4(weight(64, 64 * 8), 64, 8), torch.tensor([3, 0, 3, 63])
    assert torch.equal(F.embedding(index, table), table.dequantize()[index])
    pieces = [to_nf4(weight(32, 512) * i) for i in (1, 2)]
    both = torch.cat(pieces)
    assert both.scaler_mean.shape == both.quantization_factor.shape == (2,)  # each piece has its mean
    assert torch.equal(both.get_original_weight(), torch.cat([p.get_original_weight() for p in pieces]))


def test_siblings_in_a_frozen_model() -> None:
    """Layers of one input are joined when the model is frozen."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = (nn.Linear(1024, n, bias=False) for n in (64, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.q(x), self.k(x)], -1)

    model = Attention()
    for layer in (model.q, model.k):
        layer.weight = nn.Parameter(to_nf4(layer.weight.detach(), 64, 128), requires_grad=False)
    x = torch.randn(5, 1024)
    with torch.no_grad():
        y = model(x)
        told = torch.cat([F.linear(x, m.weight.dequantize()) for m in (model.q, model.k)], -1)
        assert torch.allclose(y, told, atol=1e-4)
        pw.inference.freeze_(model)
        assert torch.allclose(model(x), y, atol=1e-6)


@pytest.mark.parametrize("text", ["w.new_zeros(16, 48)", "w.view(-1)"])
def test_torch_distributed_is_still_recognized(text: str) -> None:
    """These functions have handlers here too, which stand between the caller and those of pennyweight.distributed."""
    import torch.distributed as dist

    w = pw.AffineQuantizedTensor.from_float(torch.randn(32, 48), pw.QuantSpec(pw.get_format("int8"), (-1,)))
    names: dict[str, Any] = {"__name__": "torch.distributed.fsdp._fully_shard"}
    exec(f"def run(w): return {text}", names)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert type(names["run"](w)) is pw.AffineQuantizedTensor
    finally:
        dist.destroy_process_group()

"""A weight that is moved to another device is packed for what reads it there; back again it is what it was.

CUDA tensors are fake: they have a device, a dtype and a shape, and every rule of dispatch, but no numbers. What the
packing does to numbers is tested on CPU tensors (test_torch_gpu.py, tests/every/test_layouts.py).
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import pennyweight as pw
from pennyweight.core import layouts
from pennyweight.core.layouts import READABLE, get_layout
from pennyweight.core.ops.parts import stored_tensors
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.kernels import bind_linear, graph_weight, linear_graph, repack
from pennyweight.kernels.bind_linear import bind_kernel
from pennyweight.kernels.linear import bind
from pennyweight.kernels.repack import prepare
from pennyweight.kernels.table import Case, case_of, get_kernel, select
from pennyweight.kernels.target import assume_target
from pennyweight.support.errors import ArgumentError

ROWS = pw.PerRow()
CONFIGS: list[Any] = [
    "int4", "int8", "int8-dynamic", "nf4", pw.Float8DynamicActivationFloat8WeightConfig(granularity=ROWS),
    pw.NVFP4DynamicActivationNVFP4WeightConfig(), pw.MXDynamicActivationMXWeightConfig(),
]  # fmt: skip
TARGETS = ("cuda:sm_80", "cuda:sm_90", "cuda:sm_100", "hip:gfx942")


def model(config: Any, k: int = 256, n: int = 512) -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(k, n, dtype=torch.bfloat16))
    pw.quantize_(layers, config)
    return layers


@pytest.fixture
def fake(fake_cuda: None) -> Iterator[FakeTensorMode]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of fake tensors
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode


def asked_on_arrival(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """The questions that core asks on arrival."""
    asked: list[tuple[Any, Any]] = []
    pack = layouts._PACK[0]
    monkeypatch.setattr(layouts, "_PACK", [lambda w, before: asked.append((w, before)) or pack(w, before)])
    return asked


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_weight_is_packed_on_arrival(config: Any, target: str, fake: FakeTensorMode) -> None:
    with assume_target(target):
        with torch._subclasses.fake_tensor.unset_fake_temporarily():
            layers = model(config)
        w = fake_weight(layers[0].weight, fake)
        wanted = pw.plan(nn.Sequential(nn.Linear(256, 512, dtype=torch.bfloat16)), config, device=target).rows[0]
        there, layout = w.to("cuda"), wanted.layout
        assert (there.spec.layout, there.device.type) == (layout, "cuda")
        assert all(t.device.type == "cuda" for t in stored_tensors(there))
        assert there.nbytes == wanted.bytes_after, "plan tells the bytes of a device that is not there"
        again = there.to("cuda:1")
        assert (again.spec.layout, str(again.device)) == (layout, "cuda:1")
        back = again.cpu()
        assert back.spec == layers[0].weight.spec, "the CPU's layout is chosen again"
        assert [t.shape for t in stored_tensors(back)] == [t.shape for t in stored_tensors(layers[0].weight)]


def fake_weight(w: QT, mode: FakeTensorMode) -> QT:
    """w with fake parts. Real numbers of one element would be computed with, on the device that is not there."""

    def convert(part: Any) -> Any:
        if isinstance(part, QT):
            return fake_weight(part, mode)
        with torch._subclasses.fake_tensor.unset_fake_temporarily():
            like = part.to("meta")
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")

    return w.with_(parts=type(w.parts)(*(None if p is None else convert(p) for p in w.parts)))


def test_modules_move_as_weights_do(fake: FakeTensorMode) -> None:
    with assume_target("cuda:sm_90"):
        # without a bias: torch cannot exchange a parameter that is a fake tensor
        layers = nn.Sequential(nn.Linear(256, 512, bias=False, dtype=torch.bfloat16, device="cuda"))
        pw.quantize_(layers, "int4")
        layout = layers[0].weight.spec.layout
        assert layout not in READABLE, "a kernel's"
        layers.cpu()
        assert get_layout(layers[0].weight.spec.layout).devices in (None, ("cpu",))
        assert layers[0].weight.device.type == "cpu"
        for move in (lambda m: m.to("cuda"), lambda m: m.to("cuda:1"), lambda m: m.to("cpu").to("cuda:0")):
            move(layers)
            assert isinstance(layers[0].weight, nn.Parameter)
            assert layers[0].weight.spec.layout == layout


def test_what_runs_on_a_device_that_is_not_there(fake: FakeTensorMode) -> None:
    """quantize_ -> deep copy -> forward, all on CUDA."""
    with assume_target("cuda:sm_90"):
        for config in ("int4", "int8-dynamic", pw.Float8DynamicActivationFloat8WeightConfig(granularity=ROWS)):
            layers = nn.Sequential(nn.Linear(256, 512, dtype=torch.bfloat16, device="cuda"))
            report = pw.quantize_(layers, config)
            assert get_kernel("linear", report.quantized[0].kernel).rank > 0
            x = torch.randn(3, 5, 256, dtype=torch.bfloat16, device="cuda")
            y = copy.deepcopy(layers)(x)
            assert (y.shape, y.dtype, y.device.type) == ((3, 5, 512), torch.bfloat16, "cuda")


def test_a_graph_holds_the_row_of_the_target(fake: FakeTensorMode) -> None:
    """As torch.compile traces it: one op on plain tensors, for the device of its parts."""
    with assume_target("cuda:sm_90"):
        layers = nn.Sequential(nn.Linear(256, 512, dtype=torch.bfloat16, device="cuda"))
        pw.quantize_(layers, "int4")
        kernel = select("linear", case_of(layers[0].weight, torch.bfloat16))
        graph = make_fx(layers)(torch.empty(2, 256, dtype=torch.bfloat16, device="cuda")).graph
    calls = [node for node in graph.nodes if node.target is torch.ops.pennyweight.linear.default]
    assert len(calls) == 1
    assert kernel.rank > 0
    assert f'"kernel": "{kernel.name}"' in calls[0].args[3]
    assert (calls[0].meta["val"].shape, calls[0].meta["val"].device.type) == ((2, 512), "cuda")


# -- what it is packed for ---------------------------------------------------------------------------------------------


def test_only_readers_that_are_known_are_packed_for(fake: FakeTensorMode) -> None:
    """An embedding's table is a matrix too, and a layout for products would be unpacked at each lookup."""
    with assume_target("cuda:sm_90"):
        table = nn.Sequential(nn.Embedding(512, 256, dtype=torch.bfloat16))
        pw.quantize_(table, "int4", filter_fn=lambda m, name: isinstance(m, nn.Embedding))
        assert table[0].weight.readers == ("embedding",)
        assert table.to("cuda")[0].weight.spec.layout in READABLE
        unknown = QT.from_float(torch.randn(512, 256, dtype=torch.bfloat16), pw.core.spec.TINYGEMM)
        assert unknown.readers is None
        assert unknown.to("cuda").spec.layout == "plain"
        assert prepare(unknown, ("linear",)).to("cuda").spec.layout not in READABLE
        assert prepare(unknown, ("linear", "embedding")).to("cuda").spec.layout in READABLE


def test_readers_stay_with_a_weight() -> None:
    w = model("int4")[0].weight
    assert w.readers == ("linear",)
    for same in (w.detach(), nn.Parameter(w, requires_grad=False), copy.deepcopy(w), w.clone(), w.to(torch.float16)):
        assert same.readers == ("linear",)
    assert QT.from_float(torch.randn(3, 32, 64), pw.core.spec.INT8_ROW)[0].readers is None


def test_a_kernels_layout_tells_the_op() -> None:
    assert [repack._ops_of(name) for name in ("cpu", "cpu_float", "cpu_experts", "cpu_conv", "torch_int4_gpu")] == [
        ("linear",), ("linear",), ("bmm",), ("convolution",), ("linear",)
    ]  # fmt: skip


def test_copies_on_the_same_device_are_not_packed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asked_on_arrival(monkeypatch)
    layers = model("int4")
    w = layers[0].weight
    layers.half().float()
    w.to("cpu", copy=True)
    w.to("meta")
    layers.to("meta")
    assert asked == []


def test_packing_on_a_cpu_waits_for_what_arrives(fake: FakeTensorMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the CPU that does not block has not arrived when it returns."""
    with assume_target("cuda:sm_90"):
        w = prepare(QT.from_float(torch.randn(512, 256, device="cuda").bfloat16(), pw.core.spec.TINYGEMM), ("linear",))
        seen: list[bool] = []
        to = torch.Tensor.to
        monkeypatch.setattr(
            torch.Tensor,
            "to",
            lambda t, *a, **k: (
                seen.append(k["non_blocking"]) or to(t, *a, **k) if "non_blocking" in k else to(t, *a, **k)
            ),
        )
        w.cpu()
        torch.ops.aten._to_copy.default(w, device=torch.device("cpu"), non_blocking=True)
        assert set(seen) == {False}
        torch.ops.aten._to_copy.default(w, device=torch.device("cuda:1"), non_blocking=True)
        assert seen[-1] is True


# -- files -------------------------------------------------------------------------------------------------------------


def test_files_do_not_depend_on_where_a_weight_was(tmp_path: Path) -> None:
    """From layouts of GPUs, on a CPU: the same bytes as from the CPU's."""
    for config, layout in (("int4", "torch_int4_gpu"), (pw.NVFP4WeightOnlyConfig(), "torch_blocks_gpu")):
        layers = model(config)
        pw.save(layers, tmp_path / "cpu.safetensors")
        layers[0].weight = nn.Parameter(layers[0].weight.to_layout(layout), requires_grad=False)
        assert layers[0].weight.spec.layout == layout
        pw.save(layers, tmp_path / "gpu.safetensors")
        assert (tmp_path / "cpu.safetensors").read_bytes() == (tmp_path / "gpu.safetensors").read_bytes()


def test_a_pickle_of_a_gpu_is_packed_for_the_cpu_that_reads_it() -> None:
    w = model("int4")[0].weight
    there = w.to_layout("torch_int4_gpu")
    for read in (pickle.loads(pickle.dumps(there)), _torch_load(there)):
        assert read.spec == w.spec
        assert all(torch.equal(a, b) for a, b in zip(stored_tensors(read), stored_tensors(w), strict=True))


def _torch_load(w: QT) -> Any:
    file = io.BytesIO()
    torch.save(w, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("layout", ["torch_int4_gpu", "bits", "plain"])
def test_back_again_is_exact(layout: str) -> None:
    w = model("int4")[0].weight
    back = prepare(w.to_layout(layout))
    assert back.spec == w.spec
    assert all(torch.equal(a, b) for a, b in zip(stored_tensors(back), stored_tensors(w), strict=True))


# -- devices -----------------------------------------------------------------------------------------------------------


def test_devices_are_compared_whole() -> None:
    """cuda:0 and cuda:1 are of one type: the address of one is another tensor on the other."""
    w = model("int8")[0].weight
    kernel, case = get_kernel("linear", "torch_int8_cast"), case_of(w, torch.bfloat16)

    class There:
        """What the check reads of an input on another device."""

        layout, shape, device = torch.strided, (2, 256), torch.device("cuda:1")

    for place in ("cuda:0", "cpu"):
        run = bind_kernel(kernel, case, torch.device(place))
        assert run(There(), w, None) is None  # type: ignore[arg-type]


def test_the_error_names_both_devices(fake: FakeTensorMode) -> None:
    with assume_target("cuda:sm_90"):
        layers = nn.Sequential(nn.Linear(256, 512, dtype=torch.bfloat16, device="cuda"))
        pw.quantize_(layers, "int4")
        for other in ("cpu", "cuda:1"):
            with pytest.raises(ArgumentError, match=rf"layer '0'.* on {other}.* on cuda:0 do not fit; .*one device"):
                layers(torch.randn(2, 256, dtype=torch.bfloat16, device=other))


def test_an_op_of_a_graph_compares_devices() -> None:
    w = model("int8")[0].weight
    key = linear_graph.graph_key(w, torch.bfloat16)
    parts = graph_weight.flatten(w)[0]
    x = torch.randn(2, 256).bfloat16()
    assert torch.ops.pennyweight.linear.default(x, parts, None, key).shape == (2, 512)
    with pytest.raises(ArgumentError, match=r"on meta.*on cpu do not fit"):
        linear_graph._linear_op(x.to("meta"), parts, None, key)


# -- dequantizing at each call -----------------------------------------------------------------------------------------


def test_a_device_without_a_kernel_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bind_linear, "_WARNED", set())
    kernel = get_kernel("linear", "dequantize")
    case = Case(pw.core.spec.NF4_BLOCK, None, (64, 64), torch.bfloat16, "cuda:sm_90")
    with pytest.warns(UserWarning, match=r"linear: no kernel for weight \[64, 64\] nf4.* on cuda:sm_90; .*dequantized"):
        bind_linear.warn_dequantizes(kernel, case)
    bind_linear.warn_dequantizes(kernel, case)  # warnings are errors here: a second one would raise


def test_no_warning_on_a_cpu_or_for_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bind_linear, "_WARNED", set())
    case = Case(pw.core.spec.NF4_BLOCK, None, (64, 64), torch.bfloat16, "cpu")
    bind_linear.warn_dequantizes(get_kernel("linear", "dequantize"), case)
    bind_linear.warn_dequantizes(get_kernel("linear", "torch_int8_cast"), case)
    w = QT.from_float(torch.randn(64, 64), pw.core.spec.NF4_BLOCK)
    bind(w, torch.float32)
    assert set() == bind_linear._WARNED


def test_fuse_says_that_nothing_is_fused_on_a_gpu(fake: FakeTensorMode) -> None:
    with assume_target("cuda:sm_90"):
        model = nn.Sequential(nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16), nn.ReLU())
        pw.quantize_(model, "int8")
        report = pw.fuse_(model)
    assert any("the model is on cuda" in note and "fused for CPUs only" in note for note in report.notes)


@pytest.mark.parametrize("known", [True, False])
def test_a_weight_in_tiles_of_a_gpu_comes_back_for_the_cpu(fake: FakeTensorMode, known: bool) -> None:
    with assume_target("cuda:sm_90"):
        model = nn.Linear(128, 64, device="cuda", dtype=torch.bfloat16)
        pw.quantize_(model, "int4")
        w: Any = model.weight
        assert w.spec.layout == "gpu"
        if not known:
            w.readers = None
        assert get_layout(w.to("cpu").spec.layout).devices in (None, ("cpu",))
        assert w.to("cpu").to("cuda").spec.layout == "gpu"

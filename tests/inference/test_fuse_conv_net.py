"""Fused convolution nets beside their own forward: which nodes are taken, equal outputs, calls that are not fused."""

import copy
import io
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.inference import CheckError, checked
from pennyweight.inference.fuse_conv_net import FusedConvNet, difference
from pennyweight.kernels.cpu import library

pytestmark = pytest.mark.skipif(library.available() is not True, reason=str(library.available()))


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.two = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.down = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.one(x))
        y = self.two(y)
        y += self.down(x)
        return self.act(y)


class Inverted(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand, self.project = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)
        self.depthwise = nn.Conv2d(4 * width, 4 * width, 3, 1, 1, groups=4 * width)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.clamp(self.expand(x), 0, 6)
        return x + self.project(F.relu6(self.depthwise(y)))


class Scaled(nn.Module):
    """Squeeze and excitation: a product of images is no step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.gate = (
            nn.Conv2d(width, width, 3, 1, 1),
            nn.Conv2d(width, width, 1),
            nn.Conv2d(width, width, 1),
        )
        self.pool, self.act = nn.AdaptiveAvgPool2d(1), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.a(x))
        return self.b(y * torch.sigmoid(self.gate(self.pool(y)))).relu()


class Branches(nn.Module):
    """Readers of one tensor with different scales, an average pool, concatenation, two outputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(width, 16, k, 1, k // 2) for k in (1, 3, 5))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        pooled = F.avg_pool2d(x, 3, 1, 1)
        return {
            "all": torch.cat([self.a(x).relu(), self.b(F.max_pool2d(x, 3, 1, 1)), self.c(pooled)], 1),
            "x": F.relu(x),
        }


class Untraceable(nn.Module):
    """torch.fx cannot trace what depends on values; its parts are fused."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), Residual(8, 8, 1)])

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) > 1e30:
            return x
        for part in self.parts:
            x = part(x)
        return x


def head(width: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]


def stem(width: int) -> list[nn.Module]:
    return [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]


NETS: dict[str, Any] = {
    "residual": lambda: nn.Sequential(*stem(16), Residual(16, 16, 1), Residual(16, 40, 2), *head(40)),
    "inverted": lambda: nn.Sequential(*stem(16), Inverted(16), nn.Dropout(), Inverted(16), nn.Hardswish(), *head(16)),
    "groups": lambda: nn.Sequential(
        *stem(24), nn.Conv2d(24, 48, 3, groups=3), nn.ReLU(), nn.Conv2d(48, 20, 3, groups=4)
    ),
    "scaled": lambda: nn.Sequential(*stem(16), Scaled(16), Scaled(16), *head(16)),
    "branches": lambda: nn.Sequential(*stem(20), Branches(20)),
    "gelu": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, padding="valid"), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1), nn.GELU("tanh")
    ),
}
TAKEN = {"residual": 6, "inverted": 7, "groups": 2, "scaled": 7, "branches": 4, "gelu": 2}


def layers(module: nn.Module, name: str) -> bool:
    return isinstance(module, (nn.Linear, nn.Conv2d))


def made(name: str, seed: int = 0, **options: Any) -> nn.Module:
    """A quantized net, its batch norms folded."""
    torch.manual_seed(seed)
    net = NETS[name]().eval() if name in NETS else Untraceable().eval()
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.uniform_(m.weight, 0.5, 1.5)
            m.running_mean.uniform_(-0.2, 0.2)  # type: ignore[union-attr]
    data = [torch.randn(4, 3, 33, 30) for _ in range(2)]
    config = pw.calibrate(net, data, partial(pw.Int8StaticActivationInt8WeightConfig, **options), filter_fn=layers)
    folds = any(isinstance(m, nn.BatchNorm2d) for m in net.modules())
    pw.quantize_(net, config, calibration=data, algorithm=["fold", "nearest"] if folds else "nearest")
    return net.eval()


@pytest.fixture(autouse=True)
def _plain() -> Iterator[None]:
    pw.reset_fallbacks()
    threads = torch.get_num_threads()
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def fused(net: nn.Module) -> Any:
    report = pw.fuse_(net, torch.randn(2, 3, 33, 30))
    assert isinstance(net, FusedConvNet), str(report)
    return report


def reasons() -> list[str]:
    found = [name.removeprefix("fused net: ") for name in pw.fallbacks() if name.startswith("fused net: ")]
    pw.reset_fallbacks()
    return found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", NETS)
def test_outputs_are_those_of_the_net(name: str, threads: int) -> None:
    net = made(name)
    own, state = copy.deepcopy(net), {k: v.clone() for k, v in net.state_dict().items()}
    report = fused(net)
    assert report.rows[0].note.startswith(f"{TAKEN[name]} convolutions in "), report.rows[0].note
    assert sum(row.kernel == "chains" and row.scheme != "net" for row in report.rows) == TAKEN[name]
    torch.set_num_threads(threads)
    for batch, h, w in ((1, 33, 30), (3, 33, 30), (2, 41, 52)):
        for form in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(batch, 3, h, w).contiguous(memory_format=form)
            y, want = net(x), own(x)
            # sums are exact; a mean and functions round differently, which may move codes by one
            assert difference(y, want) <= (1e-6 if name in ("groups", "branches") else 2e-3)
            for a, b in zip(torch.utils._pytree.tree_leaves(y), torch.utils._pytree.tree_leaves(want), strict=True):
                if min(a.shape) > 1:
                    assert a.stride() == b.stride()
    assert reasons() == []
    assert list(net.state_dict()) == list(state)
    assert all(torch.equal(net.state_dict()[k].dequantize() if hasattr(v, "dequantize") else net.state_dict()[k],
                           v.dequantize() if hasattr(v, "dequantize") else v) for k, v in state.items())  # fmt: skip
    pw.inference.thaw_(net)
    assert type(net) is nn.Sequential
    assert [type(m) for m in net.modules()] == [type(m) for m in own.modules()]
    assert difference(net(x), want) == 0


INPUTS = {
    "chosen by layer": {},
    "symmetric": {"act_mapping_type": pw.MappingType.SYMMETRIC},
    "asymmetric": {"act_mapping_type": pw.MappingType.ASYMMETRIC},
}


@pytest.mark.parametrize("inputs", INPUTS)
def test_conv_and_relu_have_the_same_bits(inputs: str) -> None:
    net = made("groups", **INPUTS[inputs])
    own = copy.deepcopy(net)
    fused(net)
    x = torch.randn(3, 3, 33, 30)
    assert torch.equal(net(x), own(x))


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", NETS)
def test_chains_take_inputs_with_and_without_zero_points(name: str, inputs: str) -> None:
    net = made(name, **INPUTS[inputs])
    own = copy.deepcopy(net)
    report = fused(net)
    assert report.rows[0].note.startswith(f"{TAKEN[name]} convolutions in "), report.rows[0].note
    points = [m.weight.act_zero_point is not None for m in own.modules() if isinstance(m, nn.Conv2d)]
    assert (any(points), all(points)) == {"symmetric": (False, False), "asymmetric": (True, True)}.get(
        inputs, (True, all(points))
    )
    x = torch.randn(2, 3, 33, 30)
    assert difference(net(x), own(x)) <= (1e-6 if name in ("groups", "branches") else 2e-3)
    assert reasons() == []


def test_a_report_tells_what_is_left() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3, groups=2), nn.ReLU(), nn.Conv2d(6, 8, 3)
    ).eval()
    config = pw.calibrate(net, [torch.randn(2, 3, 33, 30)], pw.Int8StaticActivationInt8WeightConfig, filter_fn=layers)
    pw.quantize_(net, config)
    own = copy.deepcopy(net)
    note = fused(net).rows[0].note
    assert note.startswith("2 convolutions in 2 chains")
    assert "2: groups are not multiples" in note
    x = torch.randn(2, 3, 20, 20)
    assert difference(net(x), own(x)) == 0


def test_dynamic_inputs_are_left() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    pw.quantize_(net, pw.Int8DynamicActivationInt8WeightConfig(), filter_fn=layers)
    report = pw.fuse_(net)
    assert type(net) is nn.Sequential
    assert "static scale" in report.rows[0].note


def test_parts_of_a_net_that_cannot_be_traced() -> None:
    net = made("untraceable")
    own = copy.deepcopy(net)
    report = pw.fuse_(net, torch.randn(2, 3, 33, 30))
    assert type(net) is Untraceable
    assert isinstance(net.parts[1], FusedConvNet)
    assert [row.name for row in report.rows if row.scheme == "net"] == ["parts.1"]
    x = torch.randn(2, 3, 33, 30)
    assert difference(net(x), own(x)) == 0


def test_without_an_example_one_is_made() -> None:
    net = made("residual")
    assert "chain" in pw.fuse_(net).rows[0].note
    assert isinstance(net, FusedConvNet)


def test_an_example_that_does_not_fit() -> None:
    net = made("residual")
    report = pw.fuse_(net, torch.randn(2, 4, 9, 9))
    assert type(net) is nn.Sequential
    assert "does not fit" in report.rows[0].note


def test_an_in_place_activation_of_a_tensor_that_is_read_again_is_left() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            z = F.relu_(y)
            return self.b(z) + y

    net = Again().eval()
    config = pw.calibrate(net, [torch.randn(2, 3, 9, 9)], pw.Int8StaticActivationInt8WeightConfig, filter_fn=layers)
    pw.quantize_(net, config)
    own, x = copy.deepcopy(net), torch.randn(2, 3, 9, 9)
    pw.fuse_(net, x)
    assert difference(net(x), own(x)) == 0


def test_calls_that_are_not_fused() -> None:
    net = made("residual")
    own = copy.deepcopy(net)
    fused(net)
    x = torch.randn(2, 3, 33, 30)
    want = own(x)

    def reason(text: str) -> None:
        found = reasons()
        assert len(found) == 1
        assert text in found[0]

    with torch.enable_grad():
        assert torch.equal(net(x), want)
    reason("gradients")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net(x)
    reason("autocast")
    seen = []
    handle = net[4].one.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(net(x), want)
    assert seen == [1]
    handle.remove()
    reason("hook")
    handle = net.register_forward_hook(lambda *_: seen.append(2))
    net(x)
    assert seen == [1, 2]
    assert reasons() == []
    handle.remove()
    assert torch.equal(net(input=x), want)
    reason("other arguments")
    with pytest.raises(RuntimeError):
        net(torch.randn(2, 4, 33, 30))
    reason("input channels")
    net.train()
    net(x)
    reason("training")
    net.eval()
    torch.func.vmap(lambda t: net(t[None])[0], randomness="different")(x)
    reason("observes")
    assert difference(net(x), want) < 2e-3
    assert reasons() == []


def test_changes_are_noticed() -> None:
    net = made("residual", **INPUTS["symmetric"])
    fused(net)
    x = torch.randn(2, 3, 33, 30)
    first = net(x)
    other = made("residual", seed=3, **INPUTS["symmetric"])
    want = other(x)
    net.load_state_dict(other.state_dict())
    assert difference(net(x), want) < 2e-3
    assert reasons() == []
    net[4].one.bias.add_(1.0)  # in place
    other[4].one.bias.add_(1.0)
    assert difference(net(x), other(x)) < 2e-3
    net[4].two.bias = nn.Parameter(torch.zeros(16))
    other[4].two.bias = nn.Parameter(torch.zeros(16))
    assert difference(net(x), other(x)) < 2e-3
    net[4].one = nn.Identity()
    net(x)
    assert "replaced" in reasons()[0]
    assert difference(first, want) > 1e-2


def _own_forward(net: nn.Module) -> None:
    layer: Any = net[4].one  # type: ignore[index]
    own = layer.forward
    layer.forward = lambda x: own(x) * 2


CHANGES: dict[str, Any] = {
    "stride": lambda net: setattr(net[4].two, "padding", (0, 0)) or setattr(net[4], "down", nn.ZeroPad2d(-1).eval()),
    "slope": lambda net: setattr(net[4], "act", nn.LeakyReLU(0.2).eval()),
    "ceil": lambda net: setattr(net[3], "ceil_mode", True),
    "forward": _own_forward,
    "bias": lambda net: _replace_data(net, lambda t: t * 3),
    "bias that is expanded": lambda net: _replace_data(net, lambda t: t[:1].expand(16)),
}


def _replace_data(net: Any, change: Any) -> None:
    bias = net[4].one.bias
    bias.data = change(bias.data)


@pytest.mark.parametrize("name", CHANGES)
def test_attributes_and_forwards_that_change(name: str) -> None:
    net = made("residual")
    own = copy.deepcopy(net)
    fused(net)
    x = torch.randn(2, 3, 33, 30)
    net(x)
    for m in (net, own):
        CHANGES[name](m)
    for _ in range(2):
        assert difference(net(x), own(x)) < 1e-3


def test_copies_and_pickles() -> None:
    net = made("residual")
    fused(net)
    x = torch.randn(2, 3, 33, 30)
    want = net(x)
    loaded = pickle.loads(pickle.dumps(net))
    for other in (copy.deepcopy(net), copy.copy(net), loaded):
        assert isinstance(other, FusedConvNet)
        assert torch.equal(other(x), want)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    assert reasons() == []
    pw.inference.thaw_(loaded)
    assert type(loaded) is nn.Sequential
    assert torch.equal(net(x), want)
    assert pw.fuse_(net, x).rows[0].note == "already fused"


def test_each_call_can_be_checked() -> None:
    net: Any = made("residual")
    fused(net)
    x = torch.randn(2, 3, 33, 30)
    with checked():
        net(x)
        chain = type(net).bound.items[0][0]
        next(iter(chain._weights.values())).sums.add_(100)
        with pytest.raises(CheckError, match="of the fused net differs"):
            net(x)

"""Frozen layers with one input: computed together, with the bits each has alone, and only while they do share it."""

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.kernels.cpu import library
from pennyweight.models.siblings import Siblings
from tests.models.test_freeze import SCHEMES
from tests.tensors import quantized

pytestmark = pytest.mark.skipif(library.missing() is not True, reason="no native library here")
LAYERS = {"q_proj": 48, "k_proj": 16, "v_proj": 19}
TOGETHER = ["int8_row", "int4_group", "tinygemm", "int8_dynamic", "int8_dynamic_int4", "uint8_dynamic_int4"]


class Attention(nn.Module):
    """Gives each projection what it is told to."""

    def __init__(self, scheme: str, dtype: torch.dtype, bias: bool = True) -> None:
        super().__init__()
        name, act = SCHEMES[scheme]
        for i, (child, n) in enumerate(LAYERS.items()):
            layer = nn.Linear(96, n, bias=bias and i != 1).to(dtype)
            w = quantized(name, (n, 96), dtype, act)
            layer.weight = nn.Parameter(w.to_layout("cpu"), requires_grad=False)
            self.add_module(child, layer)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        inputs = inputs * 3 if len(inputs) == 1 else inputs
        return [getattr(self, name)(x) for name, x in zip(LAYERS, inputs, strict=True)]


class Counter:
    """How many results were taken, of calls together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken = 0
        take = Siblings.take

        def counted(*args: Any) -> Any:
            y = take(*args)
            self.taken += y is not None
            return y

        monkeypatch.setattr(Siblings, "take", counted)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    return Counter(monkeypatch)


def pair(scheme: str = "int8_row", dtype: torch.dtype = torch.float32) -> tuple[Attention, Attention]:
    torch.manual_seed(0)
    model = Attention(scheme, dtype)
    ice = copy.deepcopy(model)
    pw.freeze_(ice)
    with torch.no_grad():
        ice(torch.zeros(1, 96, dtype=dtype))  # each selects its kernel
    return model, ice


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("isa", [*library.isas()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", TOGETHER)
def test_the_bits_that_each_has_alone(
    scheme: str, dtype: torch.dtype, isa: str, threads: int, counter: Counter
) -> None:
    model, ice = pair(scheme, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    library.use_isa(isa)
    try:
        with torch.no_grad():
            for i, shape in enumerate([(1, 96), (1, 96), (16, 96), (2, 3, 96), (96,), (0, 96), (3, 96)]):
                x = torch.randn(shape, dtype=dtype)
                assert same(ice(x), model(x))
                assert counter.taken == 3 * i
            x = torch.randn(5, 200, dtype=dtype)[:, 7:103]  # rows apart
            assert same(ice(x), model(x))
            assert counter.taken == 21
    finally:
        torch.set_num_threads(before)
        library.use_isa("")


def test_many_rows_and_other_kernels_go_alone(counter: Counter) -> None:
    model, ice = pair()
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(17, 96)
            assert same(ice(x), model(x))
    static, frozen = pair("int8_static")
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(1, 96)
            assert same(frozen(x), static(x))
    assert counter.taken == 0


def test_other_inputs_are_noticed(counter: Counter) -> None:
    model, ice = pair()
    a, b = torch.randn(1, 96), torch.randn(1, 96)
    with torch.no_grad():
        for _ in range(2):
            assert same(ice(a), model(a))
        assert counter.taken == 3
        assert same(ice(a, b, b), model(a, b, b))  # as in cross attention: the first was computed in vain, once
        assert counter.taken == 4
        for _ in range(3):
            assert same(ice(a, b, b), model(a, b, b))
        assert counter.taken == 4
        assert same(ice(a), model(a))  # seen to share again
        assert same(ice(a), model(a))
        assert counter.taken == 7


def test_an_input_written_to_in_between(counter: Counter) -> None:
    model, ice = pair()
    x = torch.randn(1, 96)
    with torch.no_grad():
        ice(x)
        ice.q_proj(x)
        x.mul_(2)
        assert torch.equal(ice.k_proj(x), model.k_proj(x))
        with torch.inference_mode():  # has no versions: nothing is shared
            x = torch.randn(1, 96)
            for _ in range(3):
                ice.q_proj(x)
                x.mul_(2)
                assert torch.equal(ice.k_proj(x), model.k_proj(x))
    assert counter.taken == 1


def test_a_layer_that_is_not_called_or_called_twice() -> None:
    model, ice = pair()
    x = torch.randn(1, 96)
    with torch.no_grad():
        for _ in range(3):
            assert same(ice(x), model(x))
        for _ in range(3):
            assert torch.equal(ice.q_proj(x), model.q_proj(x))
            assert torch.equal(ice.q_proj(x), model.q_proj(x))
            assert torch.equal(ice.v_proj(x), model.v_proj(x))
            assert torch.equal(ice.v_proj(x), model.v_proj(x))


def test_gradients_reach_the_input() -> None:
    model, ice = pair()
    for _ in range(3):
        grads = []
        for m in (model, ice):
            x = torch.ones(1, 96, requires_grad=True)
            sum(y.sum() for y in m(x)).backward()
            grads.append(x.grad)
        assert torch.equal(*grads)


def test_new_weights_and_biases_are_seen() -> None:
    _, ice = pair()
    x = torch.randn(1, 96)
    with torch.no_grad():
        for _ in range(3):
            ice(x)
        other = Attention("int8_row", torch.float32)
        ice.load_state_dict(other.state_dict())
        for _ in range(3):
            assert same(ice(x), other(x))
        bias = nn.Parameter(torch.randn(16))
        ice.q_proj(x)
        ice.k_proj.bias = other.k_proj.bias = bias
        assert torch.equal(ice.k_proj(x), other.k_proj(x))
        ice.half()
        other.half()
        for _ in range(3):
            assert same(ice(x.half()), other(x.half()))


def test_thawed_copied_and_pickled() -> None:
    model, ice = pair()
    x = torch.randn(1, 96)
    with torch.no_grad():
        for _ in range(2):
            ice(x)
        for other in (copy.deepcopy(ice), pickle.loads(pickle.dumps(ice))):
            for _ in range(3):
                assert same(other(x), model(x))
        assert len(pickle.dumps(ice.k_proj)) < 0.6 * len(pickle.dumps(ice))
        pw.freeze_(ice)  # again
        pw.thaw_(ice)
        assert same(ice(x), model(x))
        assert not any("_siblings" in layer.__dict__ for layer in ice.children())
        pw.freeze_(ice)
        pw.thaw_(ice.k_proj)
        for _ in range(3):
            assert same(ice(x), model(x))


def test_threads_do_not_mix() -> None:
    model, ice = pair()
    wrong = []

    def work(seed: int) -> None:
        x = torch.randn(1, 96, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            expected = model(x)
            wrong.extend(1 for _ in range(300) if not same(ice(x), expected))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_it_compiles_without_a_break() -> None:
    model, ice = pair()
    with torch.no_grad():
        x = torch.randn(1, 96)
        for _ in range(2):
            ice(x)
        assert same(torch.compile(ice, fullgraph=True, backend="aot_eager")(x), model(x))

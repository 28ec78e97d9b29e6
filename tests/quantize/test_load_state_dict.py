"""load_state_dict: assign=False writes numbers into the parameters that are there, assign=True replaces them. So it is
for every module, frozen or not, whatever was loaded before."""

import copy
import io
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw

QT = pw.AffineQuantizedTensor
FORMS = {
    "float": None, "int8": pw.Int8WeightOnlyConfig(), "int8 dynamic": pw.Int8DynamicActivationInt8WeightConfig(),
    "int4": pw.Int4WeightOnlyConfig(group_size=32),
}  # fmt: skip
SAME = {"int8", "int8 dynamic"}  # weights stored alike
WARNS = r"load_state_dict\(assign=False\) writes the values of quantized tensors"


class Renaming(nn.Linear):
    """A layer that reads an older name of its weight."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if f"{prefix}kernel" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}kernel")
        super()._load_from_state_dict(state_dict, prefix, *args)


def net(form: str, seed: int = 0, kind: type[nn.Linear] = nn.Linear) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(kind(64, 32), nn.LayerNorm(32), kind(32, 8, bias=False)).requires_grad_(False)
    if FORMS[form] is not None:
        pw.quantize_(model, FORMS[form])
    return model


def form_of(w: Tensor) -> Any:
    return (w.spec.with_(layout="plain"), w.act) if isinstance(w, QT) else "float"


def value(w: Tensor) -> Tensor:
    return w.dequantize() if isinstance(w, QT) else w.detach()


def loses(target: str, source: str) -> bool:
    """Whether copying has to be said: the state dict is quantized, and the module not so."""
    return source not in ("float", target)


@pytest.fixture(params=[False, True], ids=["copied", "swapped"])
def swapping(request: pytest.FixtureRequest) -> Iterator[bool]:
    """torch's two ways to put a value into a parameter."""
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield request.param
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("ice", [False, True], ids=["thawed", "frozen"])
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("source", FORMS)
@pytest.mark.parametrize("target", FORMS)
def test_every_combination(target: str, source: str, assign: bool, ice: bool, strict: bool, swapping: bool) -> None:
    model, state, x = net(target), net(source, 1).state_dict(), torch.randn(3, 64)
    given, before = (
        {n: value(t).clone() for n, t in state.items()},
        [form_of(model[0].weight), form_of(model[2].weight)],
    )
    held, biases = [model[0].weight, model[2].weight], [model[0].bias, model[1].weight]
    if ice:
        pw.inference.freeze_(model)
    if swapping:  # torch does not swap what others refer to
        held, biases = [], []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = model.load_state_dict(state, assign=assign, strict=strict)
    assert not found.missing_keys
    assert not found.unexpected_keys
    assert bool(told) == (not assign and loses(target, source))
    assert all("assign=True" in str(w.message) for w in told)
    theirs = [form_of(state["0.weight"]), form_of(state["2.weight"])]
    assert [form_of(model[0].weight), form_of(model[2].weight)] == (theirs if assign else before)
    quantized = (source if assign else target) != "float"
    assert isinstance(model[0], pw.inference.FrozenLinear) == (ice and target != "float" and quantized)
    if not swapping and not assign:
        now = (model[0].weight, model[2].weight, model[0].bias, model[1].weight)
        assert all(a is b for a, b in zip(held + biases, now, strict=True))  # in place
    for name, exact in given.items():
        got = value(model.get_parameter(name))
        if (
            target == "float"
            or {target, source} <= SAME
            or target == source
            or assign
            or "weight" not in name
            or name[0] == "1"
        ):
            assert torch.equal(got, exact), name
        else:  # what there was under the form of the module
            expected = value(net(target).get_parameter(name).copy_(exact))
            assert torch.equal(got, expected), name
        assert torch.equal(value(state[name]), exact)
    expected = copy.deepcopy(model)
    pw.inference.thaw_(expected)
    assert torch.equal(model(x), expected(x))


@pytest.mark.parametrize("ice", [False, True])
@pytest.mark.parametrize("target", ["float", "int8"])
def test_what_is_missing_or_too_much(target: str, ice: bool) -> None:
    for strict in (True, False):
        model, state = net(target), net("int8", 1).state_dict()
        if ice:
            pw.inference.freeze_(model)
        before = value(model[2].weight).clone()
        state["3.weight"] = state.pop("2.weight")
        if strict:
            with pytest.raises(RuntimeError, match=r"(?s)Missing key.*2\.weight.*Unexpected key.*3\.weight"):
                model.load_state_dict(state, assign=True)
        else:
            found = model.load_state_dict(state, assign=True, strict=False)
            assert (found.missing_keys, found.unexpected_keys) == (["2.weight"], ["3.weight"])
        assert torch.equal(value(model[2].weight), before)
        assert torch.equal(value(model[0].weight), value(state["0.weight"]))


@pytest.mark.parametrize("stored", [False, True], ids=["in memory", "through torch.save"])
@pytest.mark.parametrize("source", ["float", "int8"])
@pytest.mark.parametrize("target", ["float", "int8", "int4"])
def test_an_earlier_call_changes_nothing(target: str, source: str, stored: bool) -> None:
    state = net(source, 1).state_dict()
    fresh, again = net(target), net(target)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", WARNS)
        fresh.load_state_dict(copy.deepcopy(state))
        for first in ("int8", "int4"):
            net(first).load_state_dict(state, assign=True)
        if stored:
            stream = io.BytesIO()
            torch.save(state, stream)
            stream.seek(0)
            state = torch.load(stream, weights_only=True)
        again.load_state_dict(state)
    for name, p in fresh.named_parameters():
        q = again.get_parameter(name)
        assert form_of(p) == form_of(q)
        assert torch.equal(value(p), value(q))
        assert q is not state[name]


def test_a_mark_left_by_a_load_of_floats_is_refused_once() -> None:
    state = net("float", 1).state_dict()
    net("float").load_state_dict(state, assign=True)
    for kind in (nn.Linear, Renaming):
        model, fresh = net("int8", kind=kind), net("int8", kind=kind)
        before = value(model[0].weight).clone()
        marked = copy.deepcopy(state)
        marked._metadata = copy.deepcopy(state._metadata)
        with pytest.raises(RuntimeError, match=r"an earlier call with assign=True left a mark .* at 0\)"):
            model.load_state_dict(marked)
        assert torch.equal(value(model[0].weight), before)
        model.load_state_dict(marked)
        fresh.load_state_dict({**state})
        assert all(torch.equal(value(a), value(b)) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
        assert isinstance(model[0].weight, QT)
    model.load_state_dict(state, assign=True)
    assert form_of(model[0].weight) == "float"


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("ice", [False, True])
@pytest.mark.parametrize("source", ["float", "int8"])
def test_overrides_and_hooks_of_the_layers_run(source: str, ice: bool, assign: bool) -> None:
    model, plain = net("int8", kind=Renaming), net("int8")
    other = net(source, 1).state_dict()
    state = {n.replace("0.weight", "0.kernel"): t for n, t in other.items()}
    state["9.bias"] = state.pop("0.bias")
    seen: list[str] = []
    if ice:
        pw.inference.freeze_(model)

    model.register_load_state_dict_pre_hook(
        lambda module, entries, *rest: entries.update({"0.bias": entries.pop("9.bias")})
    )
    model[0].register_load_state_dict_post_hook(lambda module, keys: seen.append(type(module.weight).__name__))
    model.load_state_dict(state, assign=assign)
    plain.load_state_dict(other, assign=assign)
    for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert form_of(p) == form_of(q), n
        assert torch.equal(value(p), value(q)), n
    assert seen == ["Parameter" if assign and source == "float" else "AffineQuantizedTensor"]
    pw.inference.thaw_(model)
    assert type(model[0]) is Renaming

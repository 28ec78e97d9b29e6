"""Fused blocks that follow each other run as one native call, and nobody can tell but by the time it takes."""

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import pennyweight as pw
from pennyweight.inference import lazy_output
from pennyweight.inference.lazy_output import LazyOutput
from pennyweight.kernels.native import block as native_block
from pennyweight.kernels.native.block import NativeStack
from pennyweight.support.errors import ArgumentError
from tests.inference.conftest import native
from tests.inference.fuse_models import DECODERS, FAMILIES, inputs, model_of

transformers = pytest.importorskip("transformers")
from transformers.cache_utils import DynamicCache, StaticCache  # noqa: E402

from pennyweight.inference.kv_cache import QuantizedCache  # noqa: E402

pytestmark = pytest.mark.skipif(not native(), reason="native code cannot run blocks here")


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of blocks of each native call of several."""
    found: list[int] = []
    run = NativeStack.run

    def counted(self: Any, ready: Any, x: Any, calls: Any, like: Any) -> Any:
        found.append(len(calls))
        return run(self, ready, x, calls, like)

    monkeypatch.setattr(NativeStack, "run", counted)
    return found


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """Runs a function without lazy outputs."""

    def run(call: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(lazy_output, "MOST", -1)
            return call()

    return run


def fused(family: str = "llama", scheme: str = "int8", dtype: torch.dtype = torch.float32) -> Any:
    model = model_of(family, scheme, dtype)
    pw.fuse_(model)
    return model


def blocks(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if hasattr(type(m), "fused_kind")]


CACHES: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=24),
    "codes": lambda config: QuantizedCache(config, bits=8, group=4, residual=4),
    "rotated codes": lambda config: QuantizedCache(config, bits=4, group=4, residual=4, sinks=2),
}


def decode(model: Any, cache: Any, steps: int = 6, batch: int = 2, **options: Any) -> list[Tensor]:
    """Logits of a prompt and of single tokens after it, and at the end the keys and values."""
    ids = torch.arange(batch * (steps + 7)).reshape(batch, -1) % 90 + 4
    with torch.no_grad():
        outs = [model(ids[:, :7], past_key_values=cache, **options).logits]
        outs += [model(ids[:, 7 + i : 8 + i], past_key_values=cache, **options).logits for i in range(steps)]
    return outs + [t for layer in cache.layers for t in (layer.keys, layer.values)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    ("scheme", "dtype"), [("int8", torch.float32), ("int4", torch.bfloat16), ("int8-dynamic", torch.float16)]
)
def test_decoding_gives_the_same_bits(scheme: str, dtype: Any, cache: str, stacks: list[int], one_by_one: Any) -> None:
    model = fused("llama", scheme, dtype)
    expected = one_by_one(lambda: decode(model, CACHES[cache](model.config)))
    assert not stacks
    pw.reset_fallbacks()
    for batch in (2, 1):
        expected = one_by_one(lambda: decode(model, CACHES[cache](model.config), batch=batch))  # noqa: B023
        found = decode(model, CACHES[cache](model.config), batch=batch)
        assert same(found, expected)
    assert stacks.count(2) >= 11, stacks
    assert not pw.fallbacks()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_same_bits(family: str, stacks: list[int], one_by_one: Any) -> None:
    model = fused(family)
    given = inputs(family)

    def run() -> list[Tensor]:
        with torch.inference_mode():
            y = model(**given) if isinstance(given, dict) else model(*given)
        return [y] if isinstance(y, Tensor) else [t for t in y.values() if isinstance(t, Tensor)]

    expected = one_by_one(run)
    for _ in range(3):
        found = run()
        assert same(found, expected)
        assert all(type(t) is Tensor for t in found)
    if family in ("bert", "vit", "gpt2", "llama", "encoder"):
        assert stacks
    if family == "encoder tokens first":
        assert not stacks


@pytest.mark.parametrize("family", DECODERS)
def test_generation(family: str, one_by_one: Any) -> None:
    model = fused(family, "int4" if family in ("llama", "phi3") else "int8")
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    given = inputs(family)
    for options in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
        run = lambda: model.generate(**given, max_new_tokens=12, do_sample=False, **options)  # noqa: B023, E731
        assert torch.equal(run(), one_by_one(run))


def test_threads(one_by_one: Any) -> None:
    model = fused()
    expected = one_by_one(lambda: decode(model, DynamicCache()))
    decode(model, DynamicCache())
    results: list[list[Tensor]] = []

    def work() -> None:
        for _ in range(4):
            results.append(decode(model, DynamicCache()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 16
    assert all(same(found, expected) for found in results)


# -- what reads a lazy output ------------------------------------------------------------------------------------------


@pytest.fixture
def chain() -> tuple[list[Any], Tensor]:
    """Three fused blocks that have followed each other, and an input."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(64, 4, 96, batch_first=True).eval() for _ in range(3)]
    model = nn.TransformerEncoder(layers[0], 3, enable_nested_tensor=False).eval()
    model.layers = nn.ModuleList(layers)
    pw.quantize_(model, pw.Int8WeightOnlyConfig())
    x = torch.randn(2, 5, 64)
    pw.fuse_(model, x)
    found = list(model.layers)
    with torch.no_grad():
        through(found, x)
    return found, x


def through(modules: list[Any], x: Any) -> Any:
    for module in modules:
        x = module(x)
    return x


READERS: dict[str, Callable[[Any], Any]] = {
    "add": lambda h: h + 1,
    "in place": lambda h: h.mul_(2),
    "inplace operator": lambda h: h.__iadd__(1),
    "linear": lambda h: nn.functional.linear(h, torch.ones(3, 64)),
    "index": lambda h: h[:, 0],
    "numpy": lambda h: torch.as_tensor(h.numpy()),
    "list": lambda h: torch.tensor(h.tolist()),
    "deepcopy": copy.deepcopy,
    "pickle": lambda h: pickle.loads(pickle.dumps(h)),
    "out": lambda h: torch.sin(h, out=torch.empty(2, 5, 64)),
    "cat": lambda h: torch.cat([h, h]),
    "dlpack": torch.from_dlpack,
    "aten": torch.ops.aten.relu,
    "dict of tensors": lambda h: torch.utils._pytree.tree_map(lambda t: t * 2, {"a": [h]})["a"][0],
    "data": lambda h: h.data.clone(),
    "detach": lambda h: h.detach(),
    "item": lambda h: torch.tensor(h.sum().item()),
    "compiled": torch.compile(lambda t: t * 2 + 1, backend="eager", dynamic=False),
}


@pytest.mark.parametrize("how", READERS)
def test_an_operation_gets_the_values(chain: Any, how: str, one_by_one: Any) -> None:
    modules, x = chain
    read = READERS[how]
    with torch.no_grad():
        expected = one_by_one(lambda: read(through(modules[:2], x)))
        h = through(modules[:2], x)
        assert type(h) is LazyOutput
        assert (h.shape, h.dtype, h.device, h.ndim, len(h)) == (x.shape, x.dtype, x.device, 3, 2)
        found = read(h)
    assert type(found) is Tensor
    assert torch.equal(found, expected)


def test_the_next_block_gets_it_by_name(chain: Any, one_by_one: Any) -> None:
    modules, x = chain
    with torch.no_grad():
        expected = one_by_one(lambda: modules[1](src=modules[0](x)))
        pw.reset_fallbacks()
        assert torch.equal(modules[1](src=modules[0](x)), expected)
    assert not pw.fallbacks()


def test_torch_save_and_print(chain: Any, one_by_one: Any) -> None:
    modules, x = chain
    with torch.no_grad():
        expected = one_by_one(lambda: through(modules[:2], x))
        h = through(modules[:2], x)
        text = repr(h)
        stored = io.BytesIO()
        torch.save({"h": h}, stored)
    assert text == repr(expected)
    stored.seek(0)
    assert torch.equal(torch.load(stored)["h"], expected)


def test_each_of_the_outputs_can_be_read_later(chain: Any, one_by_one: Any) -> None:
    modules, x = chain

    def run() -> list[Tensor]:
        states = [x]
        for module in modules:
            states.append(module(states[-1]))
        return [s.clone() for s in reversed(states)]

    with torch.no_grad():
        assert same(run(), one_by_one(run))


def test_the_input_may_be_overwritten(chain: Any, one_by_one: Any) -> None:
    modules, x = chain

    def run() -> Tensor:
        y = x.clone()
        h = modules[0](y)
        y.zero_()
        return through(modules[1:], h).clone()

    with torch.inference_mode():
        assert torch.equal(run(), one_by_one(run))


def test_blocks_that_are_read_in_between_stop_being_lazy(chain: Any) -> None:
    modules, x = chain
    with torch.no_grad():
        kinds = []
        for _ in range(lazy_output.TRIES + 2):
            h = modules[0](x)
            kinds.append(type(h))
            through(modules[1:], h + 0)
    assert kinds == [LazyOutput] + [Tensor] * (len(kinds) - 1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_that_is_written_to_between_blocks(mode: Any, one_by_one: Any) -> None:
    model = fused("bert")
    layers = list(model.encoder.layer)

    def run() -> Tensor:
        with mode():
            generator = torch.Generator().manual_seed(0)
            x, mask = torch.randn(1, 6, 64, generator=generator), torch.zeros(1, 1, 6, 6)
            h = layers[0](x, mask)
            mask[..., 3:] = -100.0
            return layers[1](h, mask).clone()

    expected = one_by_one(run)
    for _ in range(4):
        assert torch.equal(run(), expected)


def test_a_mask_that_is_written_to_after_blocks_became_lazy(one_by_one: Any) -> None:
    model = fused("bert")
    layers = list(model.encoder.layer)

    def run(write: bool) -> Tensor:
        with torch.no_grad():
            x, mask = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 1, 6, 6)
            h = layers[0](x, mask)
            if write:
                mask[..., 3:] = -100.0
            return layers[1](h, mask).clone()

    for _ in range(2):
        run(False)
    with torch.no_grad():
        assert type(layers[0](torch.randn(1, 6, 64), torch.zeros(1, 1, 6, 6))) is LazyOutput
    assert torch.equal(run(True), one_by_one(lambda: run(True)))


# -- what is not lazy --------------------------------------------------------------------------------------------------


def test_hooks_get_tensors(chain: Any, one_by_one: Any) -> None:
    modules, x = chain
    seen: list[Any] = []
    for module in modules[:2]:
        module.register_forward_hook(lambda m, a, y: seen.append((a[0], y)))
    with torch.no_grad():
        y = through(modules, x)
        found = [t for pair in seen for t in pair]
        seen.clear()
        expected = one_by_one(lambda: through(modules, x))
    assert all(type(t) is Tensor for t in found)
    assert same([*found, y], [*(t for pair in seen for t in pair), expected])


def test_hidden_states_of_all_layers(one_by_one: Any) -> None:
    model = fused()
    ids = torch.arange(4, 9)[None]

    def run(**options: Any) -> list[Tensor]:
        with torch.no_grad():
            out = model(ids, **options)
        return [out.logits, *(out.hidden_states or ())]

    for options in ({}, {"output_hidden_states": True}, {}, {}):
        found = run(**options)
        assert same(found, one_by_one(lambda: run(**options)))  # noqa: B023
        assert all(type(t) is Tensor for t in found)


@pytest.mark.parametrize("what", ["gradients", "autocast", "a mode", "checks", "a forward of its own"])
def test_calls_that_are_not_lazy(chain: Any, what: str, stacks: list[int]) -> None:
    modules, x = chain
    stacks.clear()
    if what == "gradients":
        through(modules, x)
    with torch.no_grad():
        if what == "autocast":
            with torch.autocast("cpu"):
                through(modules, x)
        elif what == "a mode":
            with FlopCounterMode(display=False):
                through(modules, x)
        elif what == "checks":
            with pw.inference.checked():
                through(modules, x)
        elif what == "a forward of its own":
            forward = modules[1].forward
            modules[1].forward = lambda h: forward(h)  # noqa: PLW0108
            through(modules, x)
    assert not stacks


def test_values_that_are_read_under_another_mode(chain: Any, one_by_one: Any) -> None:
    modules, x = chain
    with torch.no_grad():
        expected = one_by_one(lambda: through(modules[:2], x))
        for change in (False, True):
            h = through(modules[:2], x)
            assert type(h) is LazyOutput
            if change:
                modules[1].norm1.eps = 0.5
                expected = one_by_one(lambda: through(modules[:2], x))
            with torch.enable_grad(), torch.autocast("cpu"):
                found = h + 0
            assert torch.equal(found, expected)
            assert not found.requires_grad
            through(modules, x)
            through(modules, x)
        pw.reset_fallbacks()
        modules[1].norm1.eps = 1e-5
        h, expected = through(modules[:2], x), one_by_one(lambda: through(modules[:2], x))
        with FlopCounterMode(display=False):
            torch.testing.assert_close(h + 0, expected)


def test_hooks_of_accelerate(one_by_one: Any) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    seen: list[tuple[Any, Any]] = []

    class Watching(hooks.ModelHook):  # type: ignore[misc]
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append((type(args[0]), args[0].clone()))
            return args, kwargs

        def post_forward(self, module: Any, output: Any) -> Any:
            seen.append((type(output), output.clone()))
            return output

    model = fused("llama")
    decode(model, DynamicCache())
    for layer in model.model.layers:
        hooks.add_hook_to_module(layer, Watching())
    found, outputs = decode(model, DynamicCache()), seen.copy()
    seen.clear()
    assert same(found, one_by_one(lambda: decode(model, DynamicCache())))
    assert all(kind is Tensor for kind, _ in outputs)
    assert same([t for _, t in outputs], [t for _, t in seen])
    hooks.remove_hook_from_module(model, recurse=True)
    assert same(decode(model, DynamicCache()), found)


def test_blocks_that_append_to_one_layer_of_a_cache(one_by_one: Any) -> None:
    model = fused("llama")
    for layer in model.model.layers:
        layer.self_attn.layer_idx = 0
    pw.fuse_(model)
    x = torch.randn(1, 3, 64)
    rotation = model.model.rotary_emb(x, torch.arange(3)[None])

    def run() -> list[Tensor]:
        cache, h = DynamicCache(), x
        with torch.no_grad():
            for layer in model.model.layers:
                h = layer(h, position_embeddings=rotation, past_key_values=cache)
        return [h.clone(), cache.layers[0].keys]

    expected = one_by_one(run)
    for _ in range(3):
        assert same(run(), expected)


def test_a_compiled_block(stacks: list[int]) -> None:
    layers = list(fused("bert").encoder.layer)
    x = torch.randn(1, 6, 64)
    with torch.no_grad():
        expected = [through(layers, x) for _ in range(2)][1]
        assert stacks.pop() == 2
        layers[1].compile(backend="eager")
        torch.testing.assert_close(through(layers, x), expected)
    assert not stacks


def test_blocks_that_return_more_than_usual(one_by_one: Any) -> None:
    """Attention weights are asked for: a block returns them by its own forward."""
    model = fused("llama")
    model.set_attn_implementation("eager")
    ids = torch.arange(4, 9)[None]

    def run(**options: Any) -> list[Tensor]:
        with torch.no_grad():
            out = model(ids, **options)
        return [out.logits, *(out.attentions or ())]

    for options in ({}, {"output_attentions": True}, {}):
        assert same(run(**options), one_by_one(lambda: run(**options)))  # noqa: B023


def test_a_changed_block_runs_as_it_is(chain: Any, one_by_one: Any) -> None:
    modules, x = chain
    modules[1].norm1.eps = 0.5
    with torch.no_grad():
        expected = one_by_one(lambda: through(modules, x))
        pw.reset_fallbacks()
        found = through(modules, x)
    assert torch.equal(found, expected)
    assert any("eps was changed" in reason for reason in pw.fallbacks())


def test_a_thawed_block(chain: Any, one_by_one: Any) -> None:
    modules, x = chain
    pw.inference.thaw_(modules[1])
    with torch.no_grad():
        assert torch.equal(through(modules, x), one_by_one(lambda: through(modules, x)))


def test_a_copied_and_a_pickled_model(stacks: list[int]) -> None:
    model = fused()
    expected = decode(model, DynamicCache())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        stacks.clear()
        assert same(decode(other, DynamicCache()), expected)
        assert 2 in stacks


def test_other_arguments_in_the_middle(one_by_one: Any) -> None:
    """A model may call its blocks with arguments that are not the same, as those with local and global attention."""
    model = fused("bert")
    layers = list(model.encoder.layer)
    masks = [torch.zeros(1, 1, 6, 6), torch.zeros(1, 1, 6, 6)]
    masks[1][..., 3:] = -100.0

    def run() -> Tensor:
        with torch.no_grad():
            h = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(0))
            for layer, mask in zip(layers, masks, strict=True):
                h = layer(h, mask)
            return h.clone()

    expected = one_by_one(run)
    for _ in range(3):
        assert torch.equal(run(), expected)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_keys_and_values_of_outputs_that_nobody_reads(one_by_one: Any) -> None:
    model = fused()
    decode(model, DynamicCache())

    def run() -> Any:
        cache = DynamicCache()
        with torch.no_grad():
            x = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0))
            rotation = model.model.rotary_emb(x, torch.arange(3)[None])
            model.model.layers[0](x, position_embeddings=rotation, past_key_values=cache)
            gc.collect()
        return cache.layers[0].keys

    assert torch.equal(run(), one_by_one(run))


def test_native_code_that_refuses(chain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fused()
    expected = decode(model, DynamicCache())

    def refuse(status: int, what: str) -> None:
        raise ArgumentError(f"{what}: refused")

    for module in blocks(model):
        monkeypatch.setattr(type(module).bound.whole.runner, "_call", lambda lists, count: 2)
    monkeypatch.setattr(native_block, "check_status", refuse)
    pw.reset_fallbacks()
    found = decode(model, DynamicCache(), steps=6)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert any("refused" in reason for reason in pw.fallbacks())


def test_no_memory_is_an_error_each_time_it_is_read(chain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    modules, x = chain

    def no_memory(*args: Any) -> Any:
        raise MemoryError("none")

    with torch.no_grad():
        h = modules[0](x)
        monkeypatch.setattr(NativeStack, "run", no_memory)
        for _ in range(2):
            with pytest.raises(MemoryError):
                h.sum()


def test_a_parameter_that_was_converted(one_by_one: Any) -> None:
    model = fused()
    decode(model, DynamicCache())
    model.model.layers[1].input_layernorm.weight.data = model.model.layers[1].input_layernorm.weight.data.double()
    expected = one_by_one(lambda: decode(model, DynamicCache())[:7])
    found = decode(model, DynamicCache())[:7]
    torch.testing.assert_close(found, expected)

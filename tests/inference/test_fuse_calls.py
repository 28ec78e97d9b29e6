"""Unusual calls and changed blocks: a fused block gives what the block's own forward gives, or raises where it does."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.support.errors import ArgumentError
from tests.inference.function_mode import SeenFunctions
from tests.inference.fuse_models import blocks_of, inputs, model_of

transformers = pytest.importorskip("transformers")
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache  # noqa: E402

from pennyweight.inference.kv_cache import QuantizedCache  # noqa: E402

TOKENS = 5
LIMIT = 2e-5
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(2, TOKENS, 64, generator=GENERATOR)
ALLOWED = torch.rand(2, 1, TOKENS, TOKENS, generator=GENERATOR) < 0.7
ALLOWED |= torch.eye(TOKENS, dtype=torch.bool)
ADDED = torch.randn(2, 4, TOKENS, TOKENS, generator=GENERATOR)


def result(call: Callable[[], Any]) -> list[Tensor] | Exception:
    try:
        y = call()
    except Exception as error:
        return error
    return [t for t in (y if isinstance(y, (list, tuple)) else [y]) if isinstance(t, Tensor)]


def same(call: Callable[[nn.Module], Any], family: str = "llama", dtype: torch.dtype = torch.float32) -> list[str]:
    """Call the quantized model and the fused one, and compare the tensors. Returns why the call was not fused."""
    model = model_of(family, "int8", dtype)
    other = copy.deepcopy(model)
    pw.fuse_(other)
    torch.manual_seed(0)
    expected = result(lambda: call(model))
    pw.reset_fallbacks()
    torch.manual_seed(0)
    found = result(lambda: call(other))
    if isinstance(expected, Exception) or isinstance(found, Exception):
        assert type(found) is type(expected), (found, expected)
    else:
        assert len(found) == len(expected)
        for y, want in zip(found, expected, strict=True):
            assert (y.shape, y.dtype) == (want.shape, want.dtype)
            kept = ~want.isnan()  # torch gives NaN for a row without an allowed key, a fused block 0
            error = (y.float() - want.float())[kept].abs().mean() / want.float()[kept].abs().mean().clamp_min(1e-9)
            assert not kept.any() or error < (LIMIT if dtype is torch.float32 else 2e-2)
    return [name for name in pw.fallbacks() if "fused" in name]


def block(m: nn.Module) -> Any:
    return m.model.layers[0]


def angles(m: Any, past: int = 0) -> tuple[Tensor, Tensor]:
    return m.model.rotary_emb(X, torch.arange(past, past + TOKENS)[None])


CACHES: dict[str, Callable[[Any], Any]] = {
    "no cache": lambda m: None,
    "dynamic": lambda m: DynamicCache(config=m.config),
    "static": lambda m: StaticCache(config=m.config, max_cache_len=TOKENS),
    "quantized": lambda m: QuantizedCache(m.config, bits=8, group=4, residual=4),
    "rotated": lambda m: QuantizedCache(m.config, bits=4, group=4, residual=0, sinks=1),
}
MASKS: dict[str, Tensor] = {
    "bool": ALLOWED,
    "one for all sequences": ALLOWED[:1],
    "of each head": ADDED > -1,
    "of two heads of four": ADDED[:, :2],
    "one for all keys": ALLOWED[..., :1],
    "one for all tokens": ALLOWED[:, :, :1],
    "of three dimensions": ALLOWED[0],
    "of two dimensions": ALLOWED[0, 0],
    "expanded": ALLOWED[:1].expand(2, 4, TOKENS, TOKENS),
    "transposed": ALLOWED.transpose(-1, -2),
    "float64": ADDED.double(),
    "float16": ADDED.half(),
    "int64": ALLOWED.long(),
    "nothing allowed": torch.zeros_like(ALLOWED),
    "-inf": torch.full_like(ADDED, -torch.inf),
    "least": torch.full_like(ADDED, torch.finfo(torch.float32).min),
    "negated view": torch._neg_view(ADDED),
    "parameter": nn.Parameter(ADDED),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str, cache: str) -> None:
    def call(m: nn.Module) -> Any:
        past = CACHES[cache](m)
        with torch.no_grad():
            y = block(m)(X, MASKS[mask], position_embeddings=angles(m), past_key_values=past)
        layer = None if past is None else past.layers[0]
        return y, getattr(layer, "keys", None), getattr(layer, "values", None)

    same(call)


ROTATIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "list": lambda c, s: [c, s],
    "float64": lambda c, s: (c.double(), s.double()),
    "float16": lambda c, s: (c.half(), s.half()),
    "of each sequence": lambda c, s: (c.expand(2, -1, -1), s.expand(2, -1, -1)),
    "transposed": lambda c, s: (c.transpose(1, 2).contiguous().transpose(1, 2), s),
    "strided": lambda c, s: (c.repeat_interleave(2, -1)[..., ::2], s.repeat_interleave(2, -1)[..., ::2]),
    "of one token": lambda c, s: (c[:, :1], s[:, :1]),
    "of one channel": lambda c, s: (c[..., :1], s[..., :1]),
    "of fewer channels": lambda c, s: (c[..., :8], s[..., :8]),
    "of two dimensions": lambda c, s: (c[0], s[0]),
    "negated view": lambda c, s: (torch._neg_view(c), s),
    "missing": lambda c, s: None,
}


@pytest.mark.parametrize("kind", ROTATIONS)
def test_cos_and_sin(kind: str) -> None:
    with torch.no_grad():
        same(lambda m: block(m)(X, position_embeddings=ROTATIONS[kind](*angles(m))))


INPUTS: dict[str, Tensor] = {
    "transposed": X.transpose(0, 1).contiguous().transpose(0, 1),
    "strided": X.repeat_interleave(2, -1)[..., ::2],
    "expanded": X[:1].expand(2, -1, -1),
    "parameter": nn.Parameter(X),
    "negated view": torch._neg_view(X),
    "bfloat16": X.bfloat16(),
    "float64": X.double(),
    "int64": X.long(),
    "of two dimensions": X[0],
    "of four dimensions": X[None],
    "too narrow": X[..., :63],
    "no sequences": X[:0],
    "no tokens": X[:, :0],
}


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs(kind: str) -> None:
    with torch.no_grad():
        same(lambda m: block(m)(INPUTS[kind], position_embeddings=angles(m)))


ARGUMENTS: dict[str, Callable[[Any, Any], Any]] = {
    "unknown, None": lambda b, c: b(X, position_embeddings=c, nonsense=None),
    "unknown": lambda b, c: b(X, position_embeddings=c, nonsense=3),
    "given twice": lambda b, c: b(X, hidden_states=X, position_embeddings=c),
    "without the input": lambda b, c: b(position_embeddings=c),
    "too many": lambda b, c: b(X, None, None, None, False, c, 3, 4, 5),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments(kind: str) -> None:
    with torch.no_grad():
        same(lambda m: ARGUMENTS[kind](block(m), angles(m)))


def test_a_flag_that_the_recognized_call_did_not_have() -> None:
    """None and False mean that an option is off only if it was off when the block was recognized."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, 64)

        def forward(self, x: Tensor, pre: bool = True, act: Any = "gelu") -> Tensor:
            h = self.norm(x) if pre else x
            h = self.up(h)
            return x + self.down(h if act is None else torch.nn.functional.gelu(h))

    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer()).eval()
    pw.quantize_(model, "int8")
    other = copy.deepcopy(model)
    assert set(blocks_of(pw.fuse_(other, X)).values()) == {""}
    other = copy.deepcopy(other)
    with torch.no_grad():
        for given in ({}, {"pre": False}, {"pre": True}, {"act": None}, {"pre": None}, {"act": "gelu"}):
            torch.testing.assert_close(other[0](X, **given), model[0](X, **given), rtol=1e-4, atol=1e-5)


# -- gradients ---------------------------------------------------------------------------------------------------------


def frozen(m: nn.Module) -> nn.Module:
    return m.requires_grad_(False)


def test_gradients_of_a_mask_and_of_rotations() -> None:
    def mask(m: nn.Module) -> Any:
        bias = ADDED.clone().requires_grad_()
        block(frozen(m))(X, bias, position_embeddings=angles(m)).sum().backward()
        return bias.grad

    def rotation(m: nn.Module) -> Any:
        cos, sin = (t.clone().requires_grad_() for t in angles(m))
        block(frozen(m))(X, position_embeddings=(cos, sin)).sum().backward()
        return cos.grad, sin.grad

    assert "gradient" in same(mask)[0]
    assert same(rotation)


class OwnCache(DynamicCache):
    def update(self, *args: Any, **kwargs: Any) -> Any:
        return super().update(*args, **kwargs)


@pytest.mark.parametrize("cache", [DynamicCache, OwnCache])
def test_gradients_of_a_prefix(cache: Any) -> None:
    def call(m: nn.Module) -> Any:
        past = cache(config=frozen(m).config)
        prefix = [torch.randn(2, 2, 3, 16).requires_grad_() for _ in range(2)]
        past.update(*prefix, 0)
        mask = torch.ones(2, 1, TOKENS, 3 + TOKENS, dtype=torch.bool)
        y = block(m)(X, mask, position_embeddings=angles(m, 3), past_key_values=past)
        y.sum().backward()
        return y.detach(), prefix[0].grad, prefix[1].grad

    same(call)


# -- blocks that are changed after fuse_ -------------------------------------------------------------------------------


def ids(rows: int = 2, columns: int = 6) -> dict[str, Tensor]:
    return {"input_ids": torch.arange(rows * columns).view(rows, columns) + 4}


def change_of(name: str, value: Any) -> Callable[[Any], None]:
    def change(b: Any) -> None:
        path, _, own = name.rpartition(".")
        setattr(b.get_submodule(path), own, value)

    return change


def inner_forward(b: Any) -> None:
    layer = b.mlp.up_proj
    own = layer.forward
    layer.forward = lambda x: own(x) * 0


def outer_forward(b: Any) -> None:
    own = b.forward
    b.forward = lambda *args, **kwargs: own(*args, **kwargs) * 2


def data_of_norms(change: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    def apply(b: Any) -> None:
        for p in b.parameters():
            if p.ndim == 1:
                p.data = change(p.data)

    return apply


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * 2


CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "forward of a layer": ("forward of its own", inner_forward),
    "forward of the block": ("", outer_forward),
    "eps of a norm": (
        "input_layernorm.variance_epsilon was changed",
        change_of("input_layernorm.variance_epsilon", 10.0),
    ),
    "scale of attention": ("self_attn.scaling was changed", change_of("self_attn.scaling", 0.9)),
    "an activation": ("replaced", change_of("mlp.act_fn", nn.GELU().eval())),
    "a bias that was None": ("a parameter was added", change_of("self_attn.q_proj.bias", nn.Parameter(torch.ones(64)))),
    "norms in float64": ("float64", data_of_norms(Tensor.double)),
    "norms in float16": ("", data_of_norms(Tensor.half)),
    "norms of one weight": ("replaced", data_of_norms(lambda t: t[:1].clone())),
    "norms that are strided": ("contiguous", data_of_norms(lambda t: t.repeat_interleave(2)[::2])),
    "norms that are expanded": ("contiguous", data_of_norms(lambda t: t[:1].expand(64))),
    "a parametrization": (
        "replaced",
        lambda b: nn.utils.parametrize.register_parametrization(b.input_layernorm, "weight", Doubled()).eval(),
    ),
    "an inner module in training mode": ("training", lambda b: b.self_attn.train()),
    "a hook that changes an input": ("hook", lambda b: b.mlp.register_forward_pre_hook(lambda m, x: (x[0] * 2,))),
}


@pytest.mark.parametrize("cached", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("name", CHANGES)
def test_changes(name: str, cached: bool) -> None:
    reason, change = CHANGES[name]

    def call(m: Any) -> Any:
        past = DynamicCache(config=m.config) if cached else None
        with torch.no_grad():
            first = m(**ids(), past_key_values=past).logits
            change(block(m))
            try:
                return first, *(m(**ids(), past_key_values=past).logits for _ in range(2))
            except RuntimeError:  # transformers' own forward cannot take some of these
                return (first,)

    found = same(call)
    assert not reason or any(reason in f for f in found), found


def test_a_layer_is_dropped_and_fused_again() -> None:
    def drop(m: Any) -> None:
        m.model.layers = m.model.layers[1:]
        m.config.num_hidden_layers = 1
        m.model.layers[0].self_attn.layer_idx = 0

    def call(m: Any) -> Tensor:
        drop(m)
        return m.generate(**ids(), max_new_tokens=6, do_sample=False)

    assert "layer_idx was changed" in same(call)[0]
    model = model_of("llama")
    pw.fuse_(model)
    drop(model)
    assert blocks_of(pw.fuse_(model)) == {"model.layers.0": ""}
    pw.reset_fallbacks()
    own = model_of("llama")
    drop(own)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(**ids(), **options), own.generate(**ids(), **options))
    assert not pw.fallbacks()


def test_the_activation_function_is_replaced() -> None:
    def call(m: Any) -> Tensor:
        m.layers[0].activation = torch.tanh
        with torch.no_grad():
            return m.layers[0](X)

    assert "activation was changed" in same(call, "encoder")[0]


def test_a_function_mode_sees_the_operations() -> None:
    model = model_of("llama")
    pw.fuse_(model)
    with torch.no_grad(), SeenFunctions() as seen:
        model(**ids())
    assert "scaled_dot_product_attention" in seen.names
    pw.reset_fallbacks()
    with torch.no_grad(), torch.device("cpu"):
        model(**ids())
    assert not pw.fallbacks()


def test_vmap_over_a_mask() -> None:
    masks = torch.stack([ALLOWED, ALLOWED.transpose(-1, -2), ALLOWED.flip(0)])

    def call(m: Any) -> Tensor:
        with torch.no_grad():
            return torch.func.vmap(lambda mask: block(m)(X, mask, position_embeddings=angles(m)))(masks)

    same(call)


# -- caches ------------------------------------------------------------------------------------------------------------

Step = int | Callable[[Any], Any]
SEQUENCES: dict[str, tuple[Callable[[Any], Any], list[Step]]] = {
    "dynamic": (CACHES["dynamic"], [5, 1, 3, 1]),
    "dynamic, beyond the window": (CACHES["dynamic"], [12, 1, 9, 1]),
    "dynamic without a config": (lambda m: DynamicCache(), [5, 1, 3]),
    "dynamic, reset": (CACHES["dynamic"], [5, 1, lambda c: c.reset(), 4, 1]),
    "dynamic, cropped": (CACHES["dynamic"], [5, 1, lambda c: c.crop(-2), 1, 2]),
    "dynamic, reordered": (CACHES["dynamic"], [5, 1, lambda c: c.reorder_cache(torch.tensor([1, 0])), 1, 2]),
    "dynamic, copied": (CACHES["dynamic"], [5, 1, copy.deepcopy, 1, 2]),
    "dynamic, float64": (CACHES["dynamic"], [5, lambda c: convert(c, Tensor.double)]),
    "dynamic, transposed": (CACHES["dynamic"], [5, lambda c: convert(c, transposed), 1, 2]),
    "static": (lambda m: StaticCache(config=m.config, max_cache_len=20), [5, 1, 3, 1]),
    "static, filled": (lambda m: StaticCache(config=m.config, max_cache_len=9), [5, 1, 3]),
    "static, too small": (lambda m: StaticCache(config=m.config, max_cache_len=8), [5, 1, 3]),
    "static, reset": (lambda m: StaticCache(config=m.config, max_cache_len=12), [5, 1, lambda c: c.reset(), 4, 1]),
    "quantized": (CACHES["quantized"], [5, 1, 3, 1]),
}


def convert(cache: Any, change: Callable[[Tensor], Tensor]) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = change(layer.keys), change(layer.values)


def transposed(t: Tensor) -> Tensor:
    return t.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2"])
def test_sequences_of_calls(family: str, name: str) -> None:
    make, steps = SEQUENCES[name]

    def call(m: Any) -> list[Tensor]:
        past, found = make(m), []
        with torch.no_grad():
            for step in steps:
                if callable(step):
                    past = step(past) or past
                else:
                    found.append(m(**ids(columns=step), past_key_values=past).logits)
        for layer in past.layers:
            found += [t for t in (getattr(layer, n, None) for n in ("keys", "values")) if t is not None]
        return [*found, torch.tensor(int(past.get_seq_length()))]

    assert not same(call, family)


@pytest.mark.parametrize("side", ["left", "right", "inside"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_padding(family: str, side: str) -> None:
    mask = torch.ones(3, 9, dtype=torch.int64)
    where = {"left": [(0, slice(4)), (1, slice(8))], "right": [(0, slice(5, 9)), (1, slice(1, 9))]}
    for row, columns in where.get(side, [(0, slice(2, 5)), (1, slice(9))]):
        mask[row, columns] = 0

    def call(m: Any) -> Any:
        past = DynamicCache(config=m.config)
        with torch.no_grad():
            y = m(input_ids=ids(3, 9)["input_ids"] * mask, attention_mask=mask, past_key_values=past).logits
            longer = torch.cat([mask, torch.ones(3, 1, dtype=torch.int64)], 1)
            z = m(input_ids=ids(3, 1)["input_ids"], attention_mask=longer, past_key_values=past).logits
        return y[mask.bool()], z[[0, 2]]

    assert not same(call, family)


CAUSAL = torch.ones(9, 9, dtype=torch.bool).triu(1)
PADDED = torch.zeros(3, 9, dtype=torch.bool).index_fill(1, torch.tensor([7, 8]), True)
ENCODER_MASKS: dict[str, dict[str, Any]] = {
    "bool": {"src_mask": CAUSAL},
    "float": {"src_mask": torch.zeros(9, 9).masked_fill(CAUSAL, -torch.inf)},
    "of each head": {"src_mask": CAUSAL.expand(12, 9, 9)},
    "causal": {"src_mask": torch.zeros(9, 9).masked_fill(CAUSAL, -torch.inf), "is_causal": True},
    "padded": {"src_key_padding_mask": PADDED},
    "both": {"src_mask": CAUSAL, "src_key_padding_mask": PADDED},
    "float64": {"src_mask": torch.zeros(9, 9).double()},
    "int64": {"src_mask": torch.zeros(9, 9).long()},
    "a hint without a mask": {"is_causal": True},
    "of another shape": {"src_key_padding_mask": PADDED.T},
}


@pytest.mark.parametrize("kind", ENCODER_MASKS)
def test_masks_of_an_encoder_layer(kind: str) -> None:
    x = inputs("encoder")["src"]
    with torch.no_grad():
        same(lambda m: m.layers[0](x, **ENCODER_MASKS[kind]), "encoder")


# -- cross-attention ---------------------------------------------------------------------------------------------------

STATES = torch.randn(2, 7, 64, generator=GENERATOR)
SEEN = torch.rand(2, 1, TOKENS, 7, generator=GENERATOR) < 0.7
SEEN[..., 0] = True
ACROSS: dict[str, dict[str, Any]] = {
    "states": {"encoder_hidden_states": STATES},
    "a mask": {"encoder_hidden_states": STATES, "encoder_attention_mask": SEEN},
    "a mask for all tokens": {"encoder_hidden_states": STATES, "encoder_attention_mask": SEEN[:, :, :1]},
    "a float mask": {"encoder_hidden_states": STATES, "encoder_attention_mask": torch.randn(2, 4, TOKENS, 7)},
    "a mask of another shape": {"encoder_hidden_states": STATES, "encoder_attention_mask": SEEN[..., :3]},
    "no states": {},
    "another batch": {"encoder_hidden_states": STATES[:1]},
    "too narrow": {"encoder_hidden_states": STATES[..., :63]},
    "float64": {"encoder_hidden_states": STATES.double()},
    "empty": {"encoder_hidden_states": STATES[:, :0]},
    "strided": {"encoder_hidden_states": STATES.repeat_interleave(2, -1)[..., ::2]},
}


@pytest.mark.parametrize("kind", ACROSS)
@pytest.mark.parametrize("family", ["whisper", "bart"])
def test_states_of_an_encoder(family: str, kind: str) -> None:
    def call(m: Any) -> Any:
        layer = m.model.decoder.layers[1]
        past = EncoderDecoderCache(DynamicCache(), DynamicCache())
        with torch.no_grad():
            found = [layer(X, **ACROSS[kind])]
            for _ in range(2):
                found.append(layer(X, past_key_values=past, **ACROSS[kind]))
        held = [getattr(c.layers[1], "keys", None) for c in (past.self_attention_cache, past.cross_attention_cache)
                if len(c.layers) > 1]  # fmt: skip
        return [*found, *(t for t in held if t is not None)]

    same(call, family)


def test_gradients_of_states() -> None:
    def call(m: Any) -> Any:
        states = STATES.clone().requires_grad_()
        frozen(m).model.decoder.layers[0](X, encoder_hidden_states=states).sum().backward()
        return states.grad

    assert "gradient" in same(call, "whisper")[0]


def test_cross_attention_is_computed_once() -> None:
    model = model_of("whisper")
    pw.fuse_(model)
    layer = model.model.decoder.layers[0].encoder_attn.k_proj
    counts = []
    own = type(layer).forward

    class Counted(type(layer)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            counts.append(x.shape[1])
            return own(self, x)

    given = inputs("whisper")
    with torch.no_grad():
        layer.__class__ = Counted
        model.generate(given["input_features"], max_new_tokens=8, do_sample=False)
    assert len(counts) == 1


@pytest.mark.parametrize("cache", ["other kind", "updated for another batch"])
def test_caches_that_cross_attention_cannot_read(cache: str) -> None:
    def call(m: Any) -> Any:
        layer = m.model.decoder.layers[0]
        past = DynamicCache() if cache == "other kind" else EncoderDecoderCache(DynamicCache(), DynamicCache())
        with torch.no_grad():
            y = layer(X, encoder_hidden_states=STATES, past_key_values=past)
            return y, layer(X[:1], encoder_hidden_states=STATES[:1], past_key_values=past)

    same(call, "bart")


# -- arguments of native code ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [lambda t: t[:1].expand(64), lambda t: t.double(), lambda t: t[:32].clone()])
def test_native_code_does_not_read_a_parameter_that_changed(change: Callable[[Tensor], Tensor]) -> None:
    model = model_of("llama")
    pw.fuse_(model)
    run = type(block(model)).bound.whole.runner
    norm = block(model).input_layernorm.weight
    norm.data = change(norm.data)
    with torch.no_grad(), pytest.raises(ArgumentError, match="a parameter was resized"):
        run.run(X, pw.kernels.block.Call())

"""pw.compare: compares a float model with its quantized version on the same batches, in total and per layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sized
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.model_arguments import check_arguments
from ..core.tensor import AffineQuantizedTensor
from ..planning.run_batch import run_batch
from ..support.arguments import check_number, did_you_mean
from ..support.progress import Progress, step
from .comparison import Comparison, Layer
from .layers import Pair, doubts, first_tensor, model_bytes, pairs, same_shape, stored_bytes, unwrapped, weight_sqnr
from .metrics import POOLINGS, TEMPERATURE, decibels, energies, ratio
from .outputs import KINDS, Sums, batches_of, counting, evaluating, kind_of_output, labels_rule

# Limit in bytes of the float model's layer outputs kept while the quantized one runs the same batch. If a batch has
# more, both models run it again for the rest.
HELD = 1 << 30

Hook = Callable[..., None]


@check_arguments()
def compare(
    float_model: nn.Module,
    quantized: nn.Module,
    batches: Any,
    *,
    kind: str | None = None,
    labels: str | None = None,
    pooling: str = "mean",
    temperature: float = TEMPERATURE,
    layers: bool = True,
    seed: int = 0,
    otherwise: str = "tensor",
    progress: Progress = None,
) -> Comparison:
    """Measure how quantization changed a model's outputs, in total and per layer.

    batches      tensors, tuples of arguments, or mappings of keyword arguments; "attention_mask" selects the tokens
                 that count, in the model's and in the layers' outputs
    kind         of the outputs: "logits" [.., classes], "embeddings" ([B, D], or hidden states to pool) or "tensor".
                 Default: logits if the output has ``.logits``, else the value of ``otherwise``
    labels       "next" token, "same" (the batch's "labels") or "none"; default: see outputs.labels_rule
    pooling      of hidden states: "mean" over the tokens, "first" or "last" one
    temperature  of the retrieval KL
    layers       False: outputs only, in one run of each model
    seed         of the bootstrap
    progress     a bar after two seconds by default; False: none; or a function, called with (done, total, name)

    Both models run each batch in eval mode, one after the other (a compiled model runs uncompiled). Neither is changed,
    and each module's training mode is restored. Layers are matched by the names of their weights. Memory: the float
    model's layer outputs of one batch, at most 1 GiB at a time. Raises ValueError if the outputs cannot be compared, or
    if there are no batches. The result says first if these are two different models, or exchanged ones (``wrong``).

    >>> import copy, torch, pennyweight as pw
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    >>> small = copy.deepcopy(model)
    >>> report = pw.quantize_(small, "int8")
    >>> found = pw.compare(model, small, [torch.randn(16, 64)])
    >>> [layer.name for layer in found.layers]
    ['0.weight', '2.weight']
    """
    if kind is not None and kind not in KINDS:
        guess = did_you_mean(kind, KINDS, 1)
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, or None to detect it, got {kind!r}{guess}")
    if pooling not in POOLINGS:
        raise ValueError(
            f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}{did_you_mean(pooling, POOLINGS)}"
        )
    check_number("temperature", temperature, positive=True)
    exact, found = unwrapped(float_model), unwrapped(quantized)
    both, unmatched = pairs(exact, found)
    probe = _Probe(both if layers else [])
    sums: Sums | None = None
    rule = labels_rule(exact, labels)
    total = len(batches) if isinstance(batches, Sized) else 0  # 0: an iterator, whose end is not known
    with step("compare", progress) as advance, evaluating(exact, found):
        for done, batch in enumerate(batches_of(batches), 1):
            y, y_q = probe.run(exact, found, batch)
            if sums is None:
                sums = Sums(kind or kind_of_output(y, otherwise), rule, pooling)
            sums.add(batch, y, y_q)
            advance(done, total, "")
    if sums is None or not sums.rows:
        raise ValueError("there is nothing to compare: no batch was given, or the masks exclude all tokens")
    kl, interval, top1, perplexity = sums.distributions(seed, temperature)
    cosines = torch.cat(sums.cosines)
    return Comparison(
        sums.kind, sums.sequences, sums.rows, kl, interval, top1, perplexity,
        (float(cosines.mean()), float(cosines.min())), ratio(sums.signal, sums.noise),
        decibels(sums.signal, sums.noise), model_bytes(exact), model_bytes(found), probe.layers(both),
        unmatched, *doubts(exact, found, both),
    )  # fmt: skip


def compare_weights(float_model: nn.Module, quantized: nn.Module) -> tuple[tuple[Layer, ...], tuple[str, ...]]:
    """(layers by the error of their weights, worst first; weights that are not in both). Needs no inputs."""
    both, unmatched = pairs(unwrapped(float_model), unwrapped(quantized))
    return _Probe([]).layers(both), unmatched


@check_arguments()
def assert_kl(float_model: nn.Module, quantized: nn.Module, batches: Any, max_kl: float, **how: Any) -> None:
    """Raise AssertionError with the worst layers if the mean KL (nats) exceeds ``max_kl``. For tests.

    how: arguments of :func:`compare`. A tensor output counts as logits unless ``kind`` is given.
    """
    __tracebackhide__ = True  # pytest then shows the caller's line
    check_number("max_kl", max_kl, 0)
    result = compare(float_model, quantized, batches, **{"otherwise": "logits", **how})
    bad = result.beyond(max_kl, None, None)
    if bad:
        raise AssertionError(f"{'; '.join(bad)}; {result.blame()}")


class _Probe:
    """Hooks that sum signal and noise of each layer's output."""

    def __init__(self, both: list[Pair]) -> None:
        self.pairs = both
        self.alone: dict[str, list[float]] = {}  # name -> [signal, noise], both layers with the float model's input
        self.stream: dict[str, list[float]] = {}  # each in its own model
        self.calls: Counter[str] = Counter()
        self.busy = False
        self.batch: Any = None

    def run(self, exact: nn.Module, found: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Outputs of both models on a batch."""
        self.batch = batch
        outputs: tuple[Any, Any] | None = None
        done: set[str] = set()
        while True:
            kept: dict[str, list[Tensor | None]] = {}
            room = [HELD]
            before = Counter(self.calls)
            y = self._hooked(
                exact, [partial(self._keep, p, kept, room, done, outputs is None) for p in self.pairs], batch, 0
            )
            y_q = self._hooked(found, [partial(self._meet, p, kept, Counter()) for p in self.pairs], batch, 1)
            if outputs is None:
                outputs, called = (y, y_q), {name for name in self.calls if self.calls[name] > before[name]}
            done |= kept.keys()
            if not kept or called <= done:
                return outputs

    def _hooked(self, model: nn.Module, hooks: list[Hook], batch: Any, side: int) -> Any:
        handles = []
        try:
            for pair, hook in zip(self.pairs, hooks, strict=True):
                module = (pair.exact, pair.found)[side].module
                handles.append(module.register_forward_hook(hook, with_kwargs=True))
            return run_batch(model, batch)
        finally:
            for handle in handles:
                handle.remove()

    def _keep(
        self, pair: Pair, kept: Any, room: list[int], done: set[str], first: bool, module: nn.Module, args: Any,
        kwargs: Any, output: Any,
    ) -> None:  # fmt: skip
        y = first_tensor(output)
        if y is None or self.busy:  # busy: this hook is calling the layer; it may be a module of both models
            return
        if first:
            self.calls[pair.name] += 1
            weight = pair.found.get()
            if pair.exact.get().dtype != weight.dtype or pair.exact.get().device != weight.device:
                args, kwargs = same_shape(weight, args), same_shape(weight, kwargs)
            self.busy = True
            try:
                alone = first_tensor(pair.found.module(*args, **kwargs))
            finally:
                self.busy = False
            self._add(self.alone, pair.name, y, alone)
        if pair.name in kept or (pair.name not in done and (room[0] > 0 or not kept)):
            # a copy: the next module may write into the output, as nn.ReLU(inplace=True) does
            kept.setdefault(pair.name, []).append(y.detach().clone())
            room[0] -= y.nbytes

    def _meet(
        self, pair: Pair, kept: Any, seen: Counter[str], module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        outputs = kept.get(pair.name, [])
        turn = seen[pair.name]
        seen[pair.name] += 1
        if turn < len(outputs):
            self._add(self.stream, pair.name, outputs[turn], first_tensor(output))
            outputs[turn] = None

    def _add(self, sums: dict[str, list[float]], name: str, exact: Tensor, found: Tensor | None) -> None:
        here = sums.setdefault(name, [0.0, 0.0])
        if found is None or found.shape != exact.shape:
            here[1] = math.inf
            return
        signal, noise = energies(counting(self.batch, exact), counting(self.batch, found))
        here[0] += signal
        here[1] += noise

    def layers(self, both: list[Pair]) -> tuple[Layer, ...]:
        """The results per layer: quantized ones first, the worst first."""
        return tuple(sorted(map(self._layer, both), key=lambda w: (not w.quantized, w.worst)))

    def _layer(self, pair: Pair) -> Layer:
        exact, found = pair.exact.get(), pair.found.get()
        return Layer(
            pair.name, type(pair.found.module).__name__, tuple(found.shape), pair.scheme, found.numel(),
            stored_bytes(exact), stored_bytes(found), _weight(exact, found), _of(self.alone, pair.name),
            _of(self.stream, pair.name), self.calls[pair.name], pair.tied, pair.short,
        )  # fmt: skip


def _weight(exact: Tensor, found: Tensor) -> float:
    if exact is found and not isinstance(exact, AffineQuantizedTensor):
        return decibels(1.0, 0.0)
    with torch.no_grad():
        return weight_sqnr(exact, found)


def _of(sums: dict[str, list[float]], name: str) -> float | None:
    return decibels(*sums[name]) if name in sums else None

"""Ours: a name, a config, and an algorithm where there is one. Bits are counted, not computed by a formula.

Scales of groups are float16, as peers store them; configs by name would take the dtype of the weight, float32 here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.accuracy.accounting import bits_of
from benchmarks.accuracy.rivals.base import ALL, CONVOLUTIONS, SMOLLM2, TEXT, Row
from benchmarks.accuracy.subjects import Subject

Make = Callable[[], Any]


STEPS = {"causal": 400, "encoder": 200, "net": 120, "pitch": 120}  # of "distill"
TWICE = 120  # of each block, and of "distill" after that
WRITTEN = 256  # sequences that a language model writes for it
Data = Callable[[Subject, nn.Module], Any]


def _quantized(config: Make, algorithm: Any = None, data: Data | None = None) -> Callable[[Subject, nn.Module], Any]:
    """A row's run. Where all inputs stay float, weights become their values in float32, to be run as a peer's are.

    algorithm   a recipe, or a function of the subject that gives one
    data        what it is calibrated on, by subject and float model; default: the subject's calibration data
    """

    def run(subject: Subject, model: nn.Module) -> tuple[nn.Module, float]:
        import pennyweight as pw

        more: dict[str, Any] = {}
        if algorithm is not None:
            recipe = algorithm(subject) if callable(algorithm) else algorithm
            batches = subject.calibration() if data is None else data(subject, model)
            more = {"algorithm": recipe, "calibration": batches}
        pw.quantize_(model, config(), _layers_of(subject), **more)
        return _as_run(model, subject)

    return run


def _layers_of(subject: Subject) -> Callable[[nn.Module, str], bool]:
    """The filter of the layers that everyone quantizes."""
    return lambda module, name: name in subject.layers


def _as_run(model: nn.Module, subject: Subject) -> tuple[nn.Module, float]:
    """(the model as peers are run, its bits a weight)."""
    import pennyweight as pw

    bits = bits_of(model, subject)
    weights = [t for t in model.state_dict().values() if isinstance(t, pw.AffineQuantizedTensor)]
    if all(w.act is None for w in weights):
        pw.dequantize_(model)
    return model, bits


@lru_cache(maxsize=1)
def _table(folder: str) -> Any:
    """The search of a subject, whose measurements serve every budget."""
    from pathlib import Path

    import pennyweight as pw

    subject = Subject.open(Path(folder))
    candidates = MIXED64 if subject.name in SMOLLM2 else MIXED
    return pw.search(
        subject.model(), _batches(subject), "4.25 bpw", candidates=candidates, metric=_metric(subject),
        filter_fn=_layers_of(subject),
    )  # fmt: skip


def _batches(subject: Subject) -> list[Any]:
    """The calibration data, 8 to 64 sequences a batch so that there are some 32; padded at their end with zeros."""
    rows = [{k: v[i] for k, v in b.items()} for b in subject.calibration() for i in range(len(next(iter(b.values()))))]
    size = min(64, max(8, len(rows) // 32))
    return [
        {k: torch.nn.utils.rnn.pad_sequence([row[k] for row in rows[i : i + size]], batch_first=True) for k in rows[0]}
        for i in range(0, len(rows), size)
    ]


def _metric(subject: Subject) -> Any:
    """What search and tuning lower: the KL divergence of logits, or how far an embedder's outputs are apart."""
    if subject.kind == "pitch":
        from pennyweight.algorithms.tuners.losses import squared_error

        return squared_error
    return apart if subject.kind == "encoder" else "kl"


def apart(reference: Tensor, output: Tensor, batch: Any) -> Tensor:
    """Mean of 1 - cos between mean-pooled hidden states, and the relative error of the tokens' own: there are more of
    them, so that less is learned by heart."""
    from pennyweight.algorithms.tuners.losses import squared_error

    mask = batch["attention_mask"].unsqueeze(-1).float()
    x, y = ((t * mask).sum(1) / mask.sum(1) for t in (reference, output))
    angle = (1 - torch.nn.functional.cosine_similarity(x, y)).mean()
    return angle + squared_error(reference, output, batch)


def _mixed(budget: str, *more: Callable[[Subject], Any]) -> Callable[[Subject, nn.Module], Any]:
    """The mixture that a search finds within a budget, solved by "auto", and by more steps of the subject."""

    def run(subject: Subject, model: nn.Module) -> tuple[nn.Module, float]:
        import pennyweight as pw

        found = _table(str(subject.folder)).within(budget)
        steps = ["auto", *(step(subject) for step in more)]
        pw.quantize_(model, found.config, calibration=_batches(subject), algorithm=steps)
        return _as_run(model, subject)

    return run


def _distill(subject: Subject) -> Any:
    return {"distill": {"steps": STEPS[subject.kind], "metric": _metric(subject)}}


def _reconstruct(subject: Subject) -> Any:
    return {"reconstruct": {"steps": TWICE}}


def _distill_after(subject: Subject) -> Any:
    return {"distill": {"steps": TWICE, "metric": _metric(subject)}}


def _tune(subject: Subject) -> Any:
    from pennyweight.algorithms import Tune

    return Tune(rate=5e-4, metric=_metric(subject))


def _tuned(config: Make, *steps: str) -> Callable[[Subject, nn.Module], Any]:
    return _quantized(config, lambda subject: [*steps, _tune(subject)])


def _codes_learned(config: Make, *more: Callable[[Subject], Any]) -> Callable[[Subject, nn.Module], Any]:
    """By steps after "auto"; a language model also learns from sequences that it writes itself."""

    def data(subject: Subject, model: nn.Module) -> list[Any]:
        import pennyweight as pw

        written = pw.algorithms.sample(model, WRITTEN, 256) if subject.kind == "causal" else []
        return [*_batches(subject), *written]

    return _quantized(config, lambda subject: ["auto", *(step(subject) for step in more)], data)


def _static(method: str) -> Callable[[Subject, nn.Module], Any]:
    """Inputs in int8 under one scale a layer, fixed from the calibration data; weights in int8."""

    def run(subject: Subject, model: nn.Module) -> tuple[nn.Module, float]:
        import pennyweight as pw

        config = pw.calibrate(
            model, subject.calibration(), pw.Int8StaticActivationInt8WeightConfig, method,
            filter_fn=_layers_of(subject),
        )  # fmt: skip
        pw.quantize_(model, config)
        return _as_run(model, subject)

    return run


def _improved(config: Make, algorithm: str) -> Callable[[Subject, nn.Module], Any]:
    """What an algorithm made, improved as a file from elsewhere would be."""

    def run(subject: Subject, model: nn.Module) -> tuple[nn.Module, float]:
        import pennyweight as pw

        batches = subject.calibration()
        pw.quantize_(model, config(), _layers_of(subject), calibration=batches, algorithm=algorithm)
        pw.algorithms.improve(model, subject.model(), batches)
        return _as_run(model, subject)

    return run


def _sparse(method: str) -> Callable[[Subject, nn.Module], Any]:
    """Two of every four weights zero, then int8."""

    def run(subject: Subject, model: nn.Module) -> tuple[nn.Module, float]:
        import pennyweight as pw

        pw.sparsify_(model, method, "2:4", subject.calibration(), filter_fn=_layers_of(subject))
        pw.quantize_(model, pw.Int8WeightOnlyConfig(), _layers_of(subject))
        return _as_run(model, subject)

    return run


def _own_text(subject: Subject, model: nn.Module) -> Any:
    """What the model itself writes."""
    import pennyweight as pw

    return pw.algorithms.sample(model, 64, 256)


def _spec(text: str, *group: int, rule: str | None = None, **fields: Any) -> Make:
    """Codes of a format in groups (-1: the row; of a convolution, three times), zero points of as many bits."""

    def make() -> Any:
        import pennyweight as pw

        zero = {"zero_point": pw.get_format(text)} if fields.get("zero_point") else {}
        return pw.SpecConfig(
            pw.QuantSpec(pw.get_format(text), group, **{"scale": torch.float16} | fields | zero), rule=rule
        )

    return make


def _named(name: str, rule: str | None = None, **changes: Any) -> Make:
    """A spec of `pennyweight.core.spec.SPECS`, with changes."""

    def make() -> Any:
        import pennyweight as pw
        from pennyweight.core.spec import SPECS

        return pw.SpecConfig(SPECS[name].with_(**changes), rule=rule)

    return make


def _config(name: str, **fields: Any) -> Make:
    def make() -> Any:
        import pennyweight as pw

        return getattr(pw, name)(**fields)

    return make


def _int8_int4(group: int) -> Make:
    def make() -> Any:
        import pennyweight as pw

        return pw.Int8DynamicActivationIntxWeightConfig(torch.int4, pw.PerGroup(group))

    return make


def _learned(bits: int, dim: int, group: int | None = None) -> Make:
    """Codes into a table that each weight has of its own, one for ``dim`` neighbours."""

    def make() -> Any:
        import pennyweight as pw
        from pennyweight.core.formats import learned

        return pw.SpecConfig(pw.QuantSpec(learned(bits * dim, dim), (group or -1,), torch.float16))

    return make


def _int4_int4() -> Any:
    import pennyweight as pw

    inputs = pw.QuantSpec(pw.get_format("int4"), (-1,), torch.float32)
    return pw.SpecConfig(pw.QuantSpec(pw.get_format("int4"), (128,), torch.float16), pw.ActivationSpec(inputs))


_ZERO = {"zero_point": True}
SYM4, ASYM4 = _spec("int4", 128, rule="symmetric"), _spec("uint4", 128, **_ZERO)
ASYM3, ASYM2 = _spec("uint3", 128, **_ZERO), _spec("uint2", 64, **_ZERO)
SYM4_64, ASYM4_64, ASYM3_64 = (
    _spec("int4", 64, rule="symmetric"), _spec("uint4", 64, **_ZERO), _spec("uint3", 64, **_ZERO),
)  # fmt: skip

# Also the inputs that nothing before can take over, turned at run time
ONLINE = {"rotate": {"online": True}}


def _mixture(*groups: tuple[str, int]) -> tuple[Any, ...]:
    return tuple(_spec(text, group, **_ZERO)() for text, group in groups)


# What search mixes: 2.19 to 6.19 bits; where 128 does not divide the columns, 2.28 to 6.34
MIXED = _mixture(("uint2", 128), ("uint2", 64), ("uint3", 128), ("uint4", 128), ("uint5", 128), ("uint6", 128))
MIXED64 = _mixture(*((f"uint{bits}", 64) for bits in (2, 3, 4, 5, 6)))

# Rows of a convolution hold few numbers: a scale each, as int8 has
ROWWISE = tuple((f"int{bits} a row", _spec(f"uint{bits}", -1, -1, -1, **_ZERO)) for bits in (4, 3))

EVERY = ALL + CONVOLUTIONS + SMOLLM2
# SmolLM2: groups of 64, which divide its rows of 576 and 1536
GROUPS_64 = (
    Row("int4 g64", _quantized(SYM4_64), None, subjects=SMOLLM2),
    Row("int4 g64 zero point", _quantized(ASYM4_64), None, subjects=SMOLLM2),
    Row("int4 g64 zero point mse", _quantized(_spec("uint4", 64, rule="mse", **_ZERO)), None, subjects=SMOLLM2),
    Row("int4 g64 tinygemm", _quantized(_named("tinygemm", block=(64,))), None, subjects=SMOLLM2),
    Row("int4 g64 tinygemm hqq", _quantized(_named("tinygemm", block=(64,)), "hqq"), None, subjects=SMOLLM2),
    Row("int3 g64 zero point", _quantized(ASYM3_64), None, subjects=SMOLLM2),
    *(
        Row(f"int4 g64 {steps}", _quantized(SYM4_64, steps), None, subjects=SMOLLM2) for steps in ("gptq", "auto")
    ),
    *(
        Row(f"int4 g64 zero point {name}", _quantized(ASYM4_64, steps), None, subjects=SMOLLM2)
        for name, steps in (
            ("hqq", "hqq"), ("imatrix", "imatrix"), ("gptq", "gptq"), ("gptaq", "gptaq"), ("auto", "auto"),
            ("awq auto", ["awq", "auto"]),
        )
    ),
    *(
        Row(f"int3 g64 zero point {steps}", _quantized(ASYM3_64, steps), None, subjects=SMOLLM2)
        for steps in ("gptq", "auto")
    ),
    Row("int4 g64 zero point auto tune", _tuned(ASYM4_64, "auto"), None, subjects=SMOLLM2, slow=True),
)  # fmt: skip

# a row: name, (config, algorithm, its options), what inputs become
ROWS = (
    *GROUPS_64,
    Row("int8", _quantized(_config("Int8WeightOnlyConfig")), None, subjects=EVERY),
    Row("int8 mse", _quantized(_spec("int8", -1, rule="mse", scale=torch.float32)), None),
    Row("int4 g128", _quantized(SYM4), None),
    Row("int4 g128 mse", _quantized(_spec("int4", 128, rule="mse")), None),
    Row("int4 g128 zero point", _quantized(ASYM4), None),
    Row("int4 g128 zero point mse", _quantized(_spec("uint4", 128, rule="mse", **_ZERO)), None),
    Row("int4 g128 tinygemm", _quantized(_named("tinygemm")), None),
    Row("int4 g32 zero point", _quantized(_spec("uint4", 32, **_ZERO)), None),
    Row("int3 g128", _quantized(_spec("int3", 128, rule="symmetric")), None),
    Row("int3 g128 zero point", _quantized(ASYM3), None),
    Row("int3 g128 zero point mse", _quantized(_spec("uint3", 128, rule="mse", **_ZERO)), None),
    Row("int2 g128", _quantized(_spec("int2", 128, rule="symmetric")), None),
    Row("int2 g64 zero point", _quantized(ASYM2), None, subjects=ALL + SMOLLM2),
    Row("int2 g64 zero point mse", _quantized(_spec("uint2", 64, rule="mse", **_ZERO)), None),
    Row("nf4", _quantized(_named("nf4_block")), None, subjects=ALL + SMOLLM2),
    Row("nf4 nested", _quantized(_named("nf4_double")), None),
    Row("mxfp4", _quantized(_config("MXWeightOnlyConfig", weight_dtype="e2m1")), None, subjects=ALL + SMOLLM2),
    Row("nvfp4", _quantized(_config("NVFP4WeightOnlyConfig")), None, subjects=ALL + SMOLLM2),
    Row("nvfp4 mse", _quantized(_named("nvfp4", "mse")), None),
    Row("float8", _quantized(_config("Float8WeightOnlyConfig")), None),
    Row("int8-dynamic", _quantized(_config("Int8DynamicActivationInt8WeightConfig")), None, "int8", EVERY),
    Row("int8-dynamic-int4 g32", _quantized(_int8_int4(32)), None, "int8"),
    Row("int8-dynamic-int4 g128", _quantized(_int8_int4(128)), None, "int8"),
    Row("int4-dynamic-int4 g128", _quantized(_int4_int4), None, "int4", subjects=("causal",)),
    Row("int4 g128 gptq", _quantized(SYM4, "gptq"), None),
    Row("int4 g128 zero point gptq", _quantized(ASYM4, "gptq"), None),
    Row("int3 g128 zero point gptq", _quantized(ASYM3, "gptq"), None),
    Row("int2 g64 zero point gptq", _quantized(ASYM2, "gptq"), None, subjects=ALL + SMOLLM2),
    *(
        Row(f"{name} {steps}", _quantized(config, recipe), None, subjects=("lm",))
        for name, config in (
            ("int4 g128 zero point", ASYM4),
            ("int3 g128 zero point", ASYM3),
            ("int2 g64 zero point", ASYM2),
        )
        for steps, recipe in (
            ("hqq", "hqq"),
            ("imatrix", "imatrix"),
            ("gptaq", "gptaq"),
            ("awq auto", ["awq", "auto"]),
            ("gptq bias", ["gptq", "bias"]),
        )
    ),
    Row("int4 g128 auto", _quantized(SYM4, "auto"), None),
    Row("int4 g128 zero point auto", _quantized(ASYM4, "auto"), None),
    Row("int4 g128 zero point auto, own text", _quantized(ASYM4, "auto", _own_text), None, subjects=("causal",)),
    Row("int4 g128 zero point auto tune", _tuned(ASYM4, "auto"), None, slow=True),
    Row("int4 g128 zero point auto distill", _codes_learned(ASYM4, _distill), None, slow=True),
    Row("int4 g128 zero point auto reconstruct", _codes_learned(ASYM4, _reconstruct), None, subjects=TEXT, slow=True),
    Row(
        "int4 g128 zero point auto reconstruct distill",
        _codes_learned(ASYM4, _reconstruct, _distill_after),
        None,
        subjects=TEXT,
        slow=True,
    ),
    Row("int4 g128 zero point rotate auto", _quantized(ASYM4, ["rotate", "auto"]), None, subjects=("lm",)),
    Row("int8 auto", _quantized(_config("Int8WeightOnlyConfig"), "auto"), None, subjects=ALL + CONVOLUTIONS),
    *(
        Row(
            f"{name} {steps}",
            _quantized(config, recipe),
            None,
            name[:4],
            ("causal", *SMOLLM2) if name == "int8-dynamic" else ("causal",),
        )
        for name, config in (
            ("int4-dynamic-int4 g128", _int4_int4),
            ("int8-dynamic", _config("Int8DynamicActivationInt8WeightConfig")),
            ("int8-dynamic-int4 g128", _int8_int4(128)),
        )
        for steps, recipe in (
            ("smooth", ["smooth"]),
            ("smooth rotate", ["smooth", ONLINE]),
            ("smooth rotate auto", ["smooth", ONLINE, "auto"]),
        )
    ),
    *(
        Row(f"int8-static {m}", _static(m), None, "int8", (*ALL, "pitch"))
        for m in ("minmax", "percentile", "mse", "histogram")
    ),
    *(Row(f"int4 g128 zero point {a} improve", _improved(ASYM4, a), None) for a in ("nearest", "gptq")),
    *(Row(f"int8 2:4 {m}", _sparse(m), None) for m in ("magnitude", "wanda", "sparsegpt")),
    Row("int3 g128 zero point auto", _quantized(ASYM3, "auto"), None),
    Row("int2 g64 zero point auto", _quantized(ASYM2, "auto"), None, subjects=ALL + SMOLLM2),
    Row("learned 4 bits x2 kmeans", _quantized(_learned(4, 2), "kmeans"), None, subjects=("lm",)),
    Row("learned 4 bits g64 kmeans", _quantized(_learned(4, 1, 64), "kmeans"), None, subjects=("lm",)),
    Row("learned 3 bits kmeans", _quantized(_learned(3, 1), "kmeans"), None, subjects=("lm",)),
    Row("learned 3 bits x2 kmeans", _quantized(_learned(3, 2), "kmeans"), None, subjects=("lm",)),
    Row("learned 2 bits kmeans", _quantized(_learned(2, 1), "kmeans"), None, subjects=("lm",)),
    Row("learned 2 bits x4 kmeans", _quantized(_learned(2, 4), "kmeans"), None, subjects=("lm",)),
    Row("learned 2 bits x4 kmeans tune", _tuned(_learned(2, 4), "kmeans"), None, subjects=("lm",), slow=True),
    Row("learned 2 bits x4 nearest", _quantized(_learned(2, 4), "nearest"), None, subjects=("lm",)),
    *(Row(name, _quantized(config), None, subjects=CONVOLUTIONS) for name, config in ROWWISE),
    *(
        Row(f"{name} {steps}", _quantized(config, steps), None, subjects=CONVOLUTIONS)
        for name, config in ROWWISE
        for steps in ("gptq", "auto")
    ),
    *(Row(f"{name} auto tune", _tuned(config, "auto"), None, subjects=CONVOLUTIONS) for name, config in ROWWISE),
    Row(
        "mxfp4 auto",
        _quantized(_config("MXWeightOnlyConfig", weight_dtype="e2m1"), "auto"),
        None,
        subjects=ALL + SMOLLM2,
    ),
    Row("nvfp4 auto", _quantized(_config("NVFP4WeightOnlyConfig"), "auto"), None, subjects=ALL + SMOLLM2),
    Row("mixed 4.25 auto", _mixed("4.25 bpw"), None, subjects=ALL + SMOLLM2, slow=True),
    Row("mixed 3.15 auto", _mixed("3.15 bpw"), None, subjects=SMOLLM2, slow=True),
    Row("mixed 4.25 auto tune", _mixed("4.25 bpw", _tune), None, slow=True),
    Row("mixed 3.15 auto tune", _mixed("3.15 bpw", _tune), None, slow=True),
    Row("mixed 2.75 auto tune", _mixed("2.75 bpw", _tune), None, slow=True),
    Row("mixed 2.3 auto tune", _mixed("2.3 bpw", _tune), None, slow=True),
    *(
        Row(f"mixed {bits} auto distill", _mixed(f"{bits} bpw", _distill), None, subjects=("encoder",), slow=True)
        for bits in ("4.25", "3.15", "2.75", "2.3")
    ),
)

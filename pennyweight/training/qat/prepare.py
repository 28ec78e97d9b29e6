"""The two steps of QAT in ``quantize_``: prepares a model for training, and converts it afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...algorithms.solve import Solved
from ...algorithms.tuners.trainable_qparams import clamp_to_interval
from ...core.model_arguments import check_arguments
from ...core.numerics import Parts, dequantize, sqnr
from ...core.qparams import default_rule
from ...core.spec import QuantSpec
from ...core.tensor import SLOTS, AffineQuantizedTensor
from ...kernels.table import case_of, select
from ...planning.config_resolution import PlanError
from ...planning.configs import AOBaseConfig
from ...planning.plan import Plan, PlanRow
from ...planning.quantize_report import Report, Row
from ...planning.scheme import Scheme
from ...quantize.pipeline import Options, Pipeline
from .fake_quantize import FakeQuantizer, Tensors, flatten_parts, format_range, held_parts, quantized_weight
from .module_patches import begin_, end_
from .modules import FakeQuantized, fake_, fake_modules, fake_quantized_class, unfake_

# Trained parts by value of ``learn`` of a QATConfig.
LEARN = {
    "none": (),
    "scale": ("scale", "act_scale"),
    "all": ("scale", "offset", "zero_point", "table", "act_scale"),
}


class TargetError(PlanError):
    """The target config differs from the one the model was trained for."""


# -- prepare ---------------------------------------------------------------------------------------------------------


class Prepare(Pipeline):
    """The step "prepare": each selected parameter stays float, and its module quantizes it in each forward pass."""

    replaces = False

    def __init__(self, model: nn.Module, config: Any, options: Options) -> None:
        super().__init__(model, config.target, options)
        self.qat: Any = config  # the QATConfig; self.config is the target
        self.already: list[PlanRow] = []

    def _plan(self) -> Plan:
        todo = super()._plan()
        self.already = [row for row in todo.rows if row.already]
        for row in (*todo.active, *self.already):
            _check(row)
            if self.options.has_recipe or row.already or self.qat.learn != "none":
                _check_names(row)
        return todo

    def run(self) -> Report:
        report = super().run()
        report.config, report.verb = str(self.qat), "prepared"
        if self.options.dry_run:
            return report
        rows = {out.name: out for out in report.rows}
        for row in self.already:
            w: Any = row.tensor
            with torch.inference_mode(False), torch.no_grad():
                value = nn.Parameter(w.dequantize().contiguous())
                for place in row.places:
                    place.set(value)
                self._fake_quantize(row, rows[row.name], Solved(w, w.error(value)), solved=True)
        begin_(self.model, self.qat.start)
        return report

    def place(self, row: PlanRow, out: Row, solved: Solved) -> None:
        self._fake_quantize(row, out, solved, self.options.has_recipe)

    def _fake_quantize(self, row: PlanRow, out: Row, start: Solved, solved: bool) -> None:
        """Make a row's modules quantize its parameter in each forward pass. solved: start from the solver's codes."""
        assert row.site is not None
        assert row.scheme is not None
        for place in row.places if self.options.device is not None else ():
            place.module.to(self.options.device)
        latent = row.places[0].get()
        stored: Any = start.weight.transpose(-2, -1) if row.site.transposed else start.weight
        parts = stored.to_layout("plain").plain_parts()
        tensors, learned, notes = _held(row, parts, self.qat.learn, solved)
        fake = FakeQuantizer(
            self.config, row.site, row.scheme, row.layout, tuple(tensors), tuple(learned),
            format_range(row.scheme.weight),
        )  # fmt: skip
        if solved:
            latent.data.copy_(_into_intervals(fake, latent.detach(), stored, tensors))
            lost = int((~_same(fake, latent.detach(), tensors, parts)).sum())
            if lost:
                notes.append(f"{lost} of {parts.codes.numel()} codes cannot be represented in {latent.dtype}")
        copies = {n: nn.Parameter(t.clone()) if n in learned else t.clone() for n, t in tensors.items()}
        for module, param in {(id(p.module), p.param): (p.module, p.param) for p in row.places}.values():
            fake_(module, param, fake, copies)
        out.sqnr, out.error = start.sqnr, start.error
        out.bytes_after = int(latent.nbytes) + sum(t.nbytes for t in copies.values())
        out.note = "; ".join(filter(None, (out.note, start.note, *notes)))


def _check(row: PlanRow) -> None:
    """Raise PlanError for a row that cannot be prepared."""
    if row.scheme is not None and row.scheme.sparsity:
        raise PlanError(
            f"{row.name}: training does not keep {row.scheme.sparsity} sparsity; train with "
            "pennyweight.optim.PruneOptimizer first, or prepare with a config that does not prune"
        )
    if row.call is not None:
        raise PlanError(f"{row.name}: {row.note} transforms modules permanently, so it cannot be prepared for QAT")
    if isinstance(row.tensor, AffineQuantizedTensor) and not row.already:
        raise PlanError(
            f"{row.name} is already quantized, as {row.tensor.spec.with_(layout='plain')}; prepare with that spec, or "
            "call dequantize_(model) first"
        )
    if isinstance(row.tensor, AffineQuantizedTensor) and row.tensor.pre_scale is not None:
        raise PlanError(
            f"{row.name} scales its input (pre_scale, of AWQ or SmoothQuant), which training does not keep; call "
            "dequantize_(model) first"
        )
    for place in row.places:
        module, kind = place.module, type(place.module).__name__
        if "forward" in module.__dict__:
            raise PlanError(
                f"{place.name}: forward of this {kind} was replaced on the instance and would stay in float; remove "
                "that wrapper, or exclude the layer with filter_fn"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise PlanError(f"{place.name}: the forward of a scripted module is fixed; prepare before scripting")


def _check_names(row: PlanRow) -> None:
    """Raise PlanError if the name of a held part is already in use."""
    for place in row.places:
        for slot in SLOTS[1:]:
            if hasattr(place.module, f"{place.param}_{slot}"):
                raise PlanError(
                    f"{place.name}: its module already has a {place.param}_{slot}; exclude the layer with filter_fn"
                )


def _held(row: PlanRow, parts: Parts, learn: str, solved: bool) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """(held parts of a weight, names of the trained ones, notes)."""
    assert row.scheme is not None
    spec, asked = row.scheme.weight, LEARN[learn]
    hold = solved or spec.format.kind == "learned" or any(_learnable(spec, name) for name in asked)
    tensors = dict(flatten_parts(parts._replace(act_scale=None, act_zero_point=None))) if hold else {}
    learned, notes = [name for name in asked if name in tensors], []
    if "act_scale" in asked and parts.act_scale is not None:
        act = row.scheme.act
        fixed = act is not None and act.has_fixed_range
        if fixed and all(_plainly_called(place.module) for place in row.places):
            tensors["act_scale"], learned = parts.act_scale, [*learned, "act_scale"]
        else:
            notes.append("its activation range is not trained")
    if asked and not learned:
        notes.append("its scales are quantized themselves and are not trained" if spec.scale else "it has no scales")
    return {n: t.float() if n in learned else t for n, t in tensors.items()}, learned, notes


def _learnable(spec: QuantSpec, name: str) -> bool:
    """Whether a part is stored as a plain tensor."""
    if name in ("scale", "offset"):
        return isinstance(getattr(spec, name), torch.dtype)
    return bool(spec.zero_point) if name == "zero_point" else name == "table" and spec.table_shape is not None


def _plainly_called(module: nn.Module) -> bool:
    """Whether the prepared forward has access to the input of the weight."""
    kind = type(module)
    return hasattr(kind if issubclass(kind, FakeQuantized) else fake_quantized_class(kind), "input_is_seen")


def _same(fake: FakeQuantizer, x: Tensor, tensors: Tensors, parts: Parts) -> Tensor:
    """Elementwise: whether codes of a latent weight equal those of ``parts`` in value (floats have two zeros)."""
    codes, f = held_parts(fake, x, tensors).codes, fake.spec.format
    if f.kind == "learned":
        return codes == parts.codes
    return f.decode(codes, torch.float32) == f.decode(parts.codes, torch.float32)


def _into_intervals(fake: FakeQuantizer, x: Tensor, w: AffineQuantizedTensor, tensors: Tensors) -> Tensor:
    """The float weight, clamped so that each element rounds to its code in w and lies within the range."""
    spec, frame = fake.spec, fake.frame(x, tensors)
    parts = w.to_layout("plain").plain_parts()
    exact = frame.flip(dequantize(parts, spec, frame.shape))
    scale = None if parts.scale is None else w.scale
    scale = scale.dequantize() if isinstance(scale, AffineQuantizedTensor) else scale
    size = torch.ones_like(exact) if scale is None else frame.expand(scale.float()).abs()
    f = spec.format
    if f.kind == "learned":
        assert parts.table is not None
        numbers = parts.table.float().flatten()
    else:
        numbers = f.decode(torch.unique(parts.codes), torch.float32)
    step = float((numbers.max() - numbers.min()) / max(1, len(numbers) - 1)) or 1.0

    def same(y: Tensor) -> Tensor:
        codes = _same(fake, y.to(x.dtype), tensors, parts)
        codes = codes.repeat_interleave(f.dim, -1) if f.dim > 1 else codes
        return frame.back_flat(codes)

    # Elements beyond the range would get no gradient, so none is left there.
    near = torch.minimum(torch.maximum(x.float(), exact - 0.45 * step * size), exact + 0.45 * step * size)
    start = torch.where(same(x.float()), near, x.float())
    return clamp_to_interval(start, exact, step * size, same).to(x.dtype)


# -- convert ---------------------------------------------------------------------------------------------------------


def _groups(model: nn.Module) -> Iterator[list[tuple[str, FakeQuantized, str]]]:
    """(name, module, parameter) of all prepared parameters; tied ones in one group."""
    found: dict[int, list[tuple[str, FakeQuantized, str]]] = {}
    for prefix, module in fake_modules(model):
        for param in module.fake_quantized:
            name = f"{prefix}.{param}" if prefix else param
            found.setdefault(id(getattr(module, param)), []).append((name, module, param))
    yield from found.values()


class Convert(Pipeline):
    """The step "convert": each prepared parameter becomes its quantized weight; its module gets its class back."""

    def run(self) -> Report:
        config: Any = self.config
        o = self.options
        given = {"calibration": o.calibration is not None, "algorithm": o.algorithm is not None, "measure": o.measure}
        if any(given.values()):
            raise PlanError(
                f"{', '.join(name for name, is_given in given.items() if is_given)}: not valid with step='convert', "
                "which keeps the trained values; use it with step='prepare'"
            )
        if o.skip:
            raise PlanError("skip: not valid with step='convert'; filter_fn selects the modules to convert")
        groups = [
            group
            for group in _groups(self.model)
            if o.filter_fn is None or any(o.filter_fn(module, name.rpartition(".")[0]) for name, module, _ in group)
        ]
        if not groups:
            raise PlanError(
                "the model has no prepared module; call quantize_(model, QATConfig(config, step='prepare')) first"
            )
        with torch.inference_mode(False), torch.no_grad():
            made = [self._converted(group, config) for group in groups]  # check everything before changing anything
            if not o.dry_run:
                for group, (w, _) in zip(groups, made, strict=True):
                    value = nn.Parameter(w, requires_grad=False)
                    for _, module, param in group:
                        _replace(module, param, value)
                        if o.device is not None:
                            module.to(o.device)
                end_(self.model)
        return Report(str(config), [row for _, row in made], verb="converted")

    def _converted(self, group: list[tuple[str, FakeQuantized, str]], config: Any) -> tuple[Tensor, Row]:
        name, module, param = group[0]
        fake, latent = module.fake_quantized[param], getattr(module, param)
        _same_target(name, fake, config.base_config, self.options.on_indivisible)
        for part, tensor in module.held(param).items():
            if tensor.is_floating_point() and not bool(tensor.float().isfinite().all()):
                raise PlanError(f"{name}: its {part} is not finite; the training diverged")
        try:
            w = quantized_weight(fake, latent, module.held(param))
        except ValueError as error:
            raise PlanError(str(error)) from error
        w = w if self.options.device is None else w.to(self.options.device)
        upright: Any = w.transpose(-2, -1) if fake.site.transposed else w
        kernel = select(fake.site.op, case_of(upright)).name
        note = f"tied: {', '.join(other for other, _, _ in group[1:])}" if len(group) > 1 else ""
        size, noise, kind = int(latent.nbytes), sqnr(latent, w.dequantize()), module.plain.__name__
        row = Row(name, kind, tuple(w.shape), str(fake.scheme), kernel, size, int(w.nbytes), noise, note)
        rank = len(row.shape)
        row.scheme_text, row.scheme_short = fake.scheme.describe(rank), fake.scheme.shorten(rank)
        return w, row


def _replace(module: Any, param: str, value: Tensor) -> None:
    unfake_(module, param)
    if param in module._parameters:
        module._parameters[param] = value
    else:
        setattr(module, param, value.data)


def _same_target(name: str, fake: FakeQuantizer, config: AOBaseConfig | None, policy: str) -> None:
    """Raise TargetError if the target config differs from the one of "prepare"."""
    if config is None or config == fake.config:
        return
    try:
        scheme = config.scheme(config.site(fake.site), policy)
    except ValueError as error:
        raise TargetError(f"{name} was prepared with {fake.config}, not {config}: {error}") from error
    if _numbers(scheme) != _numbers(fake.scheme):
        raise TargetError(
            f"{name} was trained for {fake.scheme} but would become {scheme}; omit base_config, or prepare with "
            f"{config}"
        )


def _numbers(scheme: Scheme) -> tuple[Any, ...]:
    """The part of a scheme that determines the values; eps is excluded, because it only matters for zero blocks."""
    act = None if scheme.act is None else replace(scheme.act, rule=None, eps=None)
    return replace(scheme, act=act, rule=None, eps=None), scheme.rule or default_rule(scheme.weight)


@check_arguments()
def remove_fake_quant(model: nn.Module) -> None:
    """Undo "prepare": restore the modules' classes; float parameters keep their current values.

    Held parts, including trained scales, are discarded. Raises ValueError if nothing is prepared.
    """
    groups = list(_groups(model))
    if not groups:
        raise ValueError("the model has no prepared module")
    for group in groups:
        for _, module, param in group:
            unfake_(module, param)
    end_(model)

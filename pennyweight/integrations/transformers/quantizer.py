"""The HfQuantizer "pennyweight": quantizes weight by weight during loading; reads and writes our files.

Quantizing on load plans the model on the meta device, then quantizes each weight as it is read, so that one float
weight is in memory at a time. Files of ours are assembled from their parts, found by name in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ...algorithms.solve import solve
from ...core.spec import DTYPES
from ...io.checkpoint import open_files
from ...io.config_files import METHOD, NO_SUCH_FILE, WEIGHTS_KEY
from ...io.file import CheckpointError, KeyedError, checkpoint_errors
from ...io.manifest import Meta, stored_parts
from ...io.output_formats import convert_exactly
from ...io.saving import algorithm_of
from ...io.state_dict import build, flatten, slots_of
from ...io.validate import check_data
from ...io.weight_conversions import Merge, Source, converted_name
from ...kernels.repack import choose_layout, prepare
from ...kernels.table import Case
from ...kernels.target import target_of
from ...planning.config_resolution import Choice, PlanError, skips
from ...planning.configs import AOBaseConfig
from ...planning.parameters import Place, places
from ...planning.plan import Plan, PlanRow, plan
from ...planning.quantize_report import Report, Row
from ...quantize.dequantize import dequantize_


class PennyweightQuantizer(HfQuantizer):
    """Created by transformers. ``model.hf_quantizer.report`` lists what was quantized on load; None for our files."""

    report: Report | None = None

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.rows: dict[str, PlanRow] = {}  # quantizing on load: by every name of a parameter
        self.report_rows: dict[str, Row] = {}  # report rows, by first name
        self.held: dict[str, Meta] = {}  # files of ours: the quantized tensors
        self.owner: dict[str, str] = {}  # stored part -> its tensor
        self.converters: dict[str, tuple[Any, str]] = {}  # of tensors that the model merges: converter and its pattern
        self.merged: dict[str, list[str]] = {}  # what it merges them into -> the tensors
        self.dtypes: dict[str, torch.dtype] = {}  # of all stored tensors
        self.path = ""
        self._model: Any = None  # during loading; transformers before 5.21 does not pass it to all methods

    # -- before loading ----------------------------------------------------------------------------------------------

    def validate_environment(self, device_map: Any = None, **kwargs: Any) -> None:
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError("quantized weights cannot be offloaded to disk; place all modules on a device or the CPU")
        if not self.pre_quantized and self.quantization_config.config is None:
            raise ValueError('specify how to quantize: PennyweightConfig("int8"), or one of the config objects')

    def update_tp_plan(self, config: Any) -> Any:
        """Called by transformers before 5.21 between reading config.json and looking for the weights."""
        return _without_mark(config)

    def update_attn_implementation(self, config: Any) -> Any:
        """Like update_tp_plan, called by transformers from 5.18 on."""
        return _without_mark(config)

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> None:
        self._model = model
        self._read(checkpoint_files)
        if self.pre_quantized and not self.held:
            raise ValueError(
                f"config.json of {self.path} declares the Pennyweight format, but the files have no quantized tensors; "
                'remove "quantization_config" from it to load it as a float model'
            )
        if not self.pre_quantized:
            if self.held:
                raise ValueError(f"{self.path} is already quantized ({min(self.held)}); omit quantization_config")
            with _tied(model):
                self._plan(model)

    def _read(self, paths: Any) -> None:
        paths = [str(p) for p in paths or ()]
        self.path = paths[0] if paths else ""
        if paths and all(p.endswith(".safetensors") for p in paths):
            with open_files(paths) as checkpoint:
                self.path, self.held = checkpoint.path, checkpoint.manifest.tensors
                self.dtypes = {name: checkpoint.entry(name).dtype for name in checkpoint.where}
            self.owner = {stored: name for name, meta in self.held.items() for stored in stored_parts(name, meta)}

    def _plan(self, model: Any) -> None:
        asked = self.quantization_config
        left = self.get_modules_to_not_convert(model, asked.modules_to_not_convert, model._keep_in_fp32_modules)
        todo = plan_for_load(model, asked.config, left, asked.skip, asked.on_indivisible)
        self.report = todo.report()
        for row, out in zip(todo.rows, self.report.rows, strict=True):
            if row.active:
                row.tensor = None
                self.rows |= dict.fromkeys((p.name for p in row.places), row)
                self.report_rows[row.name] = out
        for name in self.rows:  # transformers would cast them to float without scales
            if self.dtypes.get(name, torch.float32) not in DTYPES.values():
                raise ValueError(
                    f"{self.path}: {name} is {self.dtypes[name]}, so another library may have quantized it; load it "
                    "with pennyweight.integrations.transformers.load_pretrained, or start from the float checkpoint"
                )

    # -- quantizing on load ------------------------------------------------------------------------------------------

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return param_name in self.rows

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        if param_name in self.rows:
            return self.rows[param_name].bytes_after / max(1, param.numel())
        names = self.merged.get(param_name) or [name for name in (param_name,) if name in self.held]
        if not names:
            return param.element_size()
        stored = [part for name in names for part in stored_parts(name, self.held[name]).values()]
        return sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in stored) / max(1, param.numel())

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def quantize(self, name: str, x: Tensor) -> nn.Parameter:
        """Quantize a float weight, read under its final name, as planned."""
        row = self.rows[name]
        if tuple(x.shape) != row.shape:
            raise ValueError(f"{name}: the model has shape {list(row.shape)}, the checkpoint {list(x.shape)}")
        assert row.site is not None
        assert row.scheme is not None
        x = x.to(row.site.dtype)
        if x.device.type != "cpu":  # was planned on the meta device, for the CPU
            case = Case(row.scheme.weight, row.scheme.act, row.site.shape, x.dtype, target_of(x.device))
            row.layout = choose_layout(case, row.ops)[1]
        row.tensor = x
        try:
            solved = solve(row)
        finally:
            row.tensor = None
        solved.weight.readers = row.ops
        out = self.report_rows[row.name]
        out.sqnr, out.bytes_after = solved.sqnr, solved.weight.nbytes
        return nn.Parameter(solved.weight, requires_grad=False)

    # -- files of ours -----------------------------------------------------------------------------------------------

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        model = self._model if model is None else model
        if not self.pre_quantized:  # the model's own converters come first, see _Quantize
            prefix = f"{model.base_model_prefix}."
            names = {n: n for n in self.rows} | {n.removeprefix(prefix): n for n in self.rows}
            names |= {prefix + n: n for n in self.rows if prefix + n not in names}
            return [*weight_conversions, _Float(self, names, {})]
        found = {name: converted_name(name, weight_conversions) for name in self.held}
        self.converters = {name: (c, pattern) for name, (_, c, pattern) in found.items() if pattern is not None}
        renamings = [c for c in weight_conversions if isinstance(c, WeightRenaming)]
        self.merged = {}
        for name in self.converters:
            target = found[name][0]
            of_shape = all(getattr(op, "check_dims", False) for op in self.converters[name][0].operations)
            if target == _renamed(name, renamings) and not of_shape:  # was it quantized before or after that?
                raise ValueError(
                    f"{self.path}: {name} was quantized as it is stored, but {type(model).__name__} changes it while "
                    "loading; quantize the float checkpoint while loading it, and save the result"
                )
            self.merged.setdefault(target, []).append(name)
        renamed = {_renamed(stored, renamings): found[name][0] for stored, name in self.owner.items()}
        return [_Parts(self, renamed, _ops_by_name(model)), *weight_conversions]

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        return None if isinstance(converter, _Parts) else super().get_new_dtype(converter, param, dtype)

    def merge(self, target: str, parts: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
        """The parameters, by name, that a conversion of transformers makes of several weights with these stored parts.
        Raises CheckpointError."""
        names = dict.fromkeys(self.owner[stored] for stored in parts)
        merge = Merge(self.converters[next(iter(names))][0], target)
        for name in names:
            own = {stored: parts[stored] for stored in stored_parts(name, self.held[name]) if stored in parts}
            read = partial(self.assemble, name, own)
            merge.add(self.converters[name][1], Source(name, self.held[name], read))
        with checkpoint_errors(self.path):
            return merge.run(model)

    def place(self, w: Any, target: Tensor, ops: tuple[str, ...]) -> nn.Parameter:
        """A weight as a parameter in place of ``target``, packed for its kernel."""
        w = w if w.dtype == target.dtype else w.to(target.dtype)
        return nn.Parameter(prepare(w, ops) if w.ndim > 1 else w, requires_grad=False)

    def assemble(self, name: str, parts: dict[str, Tensor]) -> Any:
        """A quantized tensor from its stored parts. Raises CheckpointError."""
        meta = self.held[name]
        try:
            lost = stored_parts(name, meta).keys() - parts.keys()
            if lost:
                raise KeyedError(name, f"part {min(lost)} is missing")
            check_data(name, meta, lambda stored: parts[stored].cpu())
            return build(name, meta, parts.__getitem__)
        except KeyedError as e:
            raise CheckpointError(self.path, e.name, str(e)) from e

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        if getattr(model, "_hf_peft_config_loaded", False):
            return None, {}  # only the adapters are saved
        left_out = model._keys_to_ignore_on_save or ()
        state = {name: t for name, t in model.state_dict().items() if name not in left_out}
        asked = self.quantization_config
        if asked.save_as == METHOD:
            asked.written = None
            tensors, metadata = flatten(state)
            return tensors, metadata | algorithm_of(model)
        linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        tensors, asked.written = convert_exactly(state, asked.save_as, linear)
        return tensors, algorithm_of(model)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        # Conversions of names and tensors on load are not undone on saving: they do not support stored parts
        model._weight_conversions = []
        self.rows, self.report_rows, self.owner, self.converters, self.merged, self._model = {}, {}, {}, {}, {}, None
        return model

    def is_serializable(self) -> bool:
        return True

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        dtype = DTYPES[dtype] if isinstance(dtype, str) else dtype  # saving stores its name in the model's config
        for row in dequantize_(model).rows:
            w = model.get_parameter(row.name)
            w.data = w.data if dtype is None else w.data.to(dtype)
            w.requires_grad_(True)
        return model

    # -- capabilities ----------------------------------------------------------------------------------------------

    @property
    def is_trainable(self) -> bool:
        return True  # all quantized weights pass gradients to their inputs, so adapters can train

    @property
    def is_compileable(self) -> bool:
        return True


def _without_mark(config: Any) -> Any:
    """The model's config without the key that stops processes without this quantizer."""
    if getattr(config, WEIGHTS_KEY, None) == NO_SUCH_FILE:
        delattr(config, WEIGHTS_KEY)
    return config


def _renamed(name: str, renamings: list[Any]) -> str:
    """A stored name after the model's renamings."""
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def plan_for_load(
    model: Any, config: AOBaseConfig, left: list[str], skip: Sequence[str] = (), on_indivisible: str = "pad"
) -> Plan:
    """The plan of a model on the meta device, without the parameters in ``skip``, and without the modules ``left`` that
    no key of a FqnToConfig names."""
    skipped = skips(skip, [place for where in places(model) for place in where])

    def excluded(where: list[Place], choice: Choice) -> str:
        """As plan(skip=) expects it."""
        if why := skipped(where, choice):
            return why
        spelled = choice.key in {n for p in where for n in (p.name, p.module_name)}
        if spelled or all(_wanted(p, left) for p in where) or (choice.config is None and choice.left != "filtered"):
            return ""
        return "excluded by transformers' defaults; modules_to_not_convert=[] quantizes it"

    todo = plan(model, config, skip=excluded, on_indivisible=on_indivisible)
    for row in todo.rows:
        if row.call is not None:
            raise PlanError(f"{row.name}: {row.note}; a handler needs the weights: load the model and quantize_ it")
    return todo


def _wanted(place: Place, left: list[str]) -> bool:
    return should_convert_module(place.name, left) and should_convert_module(place.module_name, left)


@contextmanager
def _tied(model: Any) -> Iterator[None]:
    """Ties tied weights of a meta model inside the context. transformers ties them only after loading, but the packing
    of a weight depends on all its names."""
    apart = []
    for target, source in model.all_tied_weights_keys.items():
        module, _, attr = target.rpartition(".")
        parameters = model.get_submodule(module)._parameters
        if attr in parameters:
            apart.append((parameters, attr, parameters[attr]))
            parameters[attr] = model.get_parameter(source)
    try:
        yield
    finally:
        for parameters, attr, own in apart:
            parameters[attr] = own


def _ops_by_name(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For every parameter: the ops that use it under any of its names."""
    with _tied(model):
        slots = slots_of(model)
    ops: dict[int, list[str]] = {}
    for slot in slots.values():
        ops.setdefault(id(slot.tensor), []).append(slot.op)
    return {name: tuple(dict.fromkeys(ops[id(slot.tensor)])) for name, slot in slots.items()}


class _Quantize(ConversionOps):
    """Runs after the model's own conversions of checkpoint tensors: merged experts, split weights."""

    def __init__(self, quantizer: PennyweightQuantizer) -> None:
        self.quantizer = quantizer

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        out = {}
        for name, value in input_dict.items():
            x = value[0] if isinstance(value, list) else value
            out[name] = self.quantizer.quantize(name, x) if name in self.quantizer.rows else x
        return out


class _Nothing(ConversionOps):
    """A converter needs an operation; ours do the work themselves, so that their errors are raised unchanged."""

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return input_dict


class _ByName(WeightConverter):
    """Converts the tensors of one weight, found by name in a table instead of by a pattern.

    names  stored name after the model's renamings -> the weight's name, also renamed
    """

    pattern = ""  # the key transformers uses to find this converter

    def __init__(self, quantizer: PennyweightQuantizer, names: dict[str, str], ops: dict[str, tuple[str, ...]]) -> None:
        super().__init__([self.pattern], ["weight"], [_Nothing()])
        self.quantizer, self.names, self.ops = quantizer, names, ops

    def __deepcopy__(self, memo: Any) -> Any:  # transformers copies a converter for every stored tensor
        return type(self)(self.quantizer, self.names, self.ops)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        found = self.names.get(source_key)
        return (source_key, None) if found is None else (found, self.pattern)

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        self.collected_tensors[source_key].append(future)


class _Float(_ByName):
    """A float weight that is quantized when it is read."""

    pattern = "pennyweight-float"

    def convert(self, layer_name: str, model: Any = None, **kwargs: Any) -> dict[str, Any]:
        ((x, *_),) = self.materialize_tensors().values()
        return {layer_name: self.quantizer.quantize(layer_name, x)}


class _Parts(_ByName):
    """A weight of our files, assembled from its stored parts; or merged from several of them."""

    pattern = "pennyweight-part"

    def convert(self, layer_name: str, model: Any = None, **kwargs: Any) -> dict[str, Any]:
        parts = {stored: tensors[0] for stored, tensors in self.materialize_tensors().items()}
        name = self.quantizer.owner[next(iter(parts))]
        if name in self.quantizer.converters:
            found = self.quantizer.merge(layer_name, parts, model)
        else:
            found = {layer_name: self.quantizer.assemble(name, parts)}
        return {
            name: self.quantizer.place(w, model.get_parameter_or_buffer(name), self.ops.get(name, ("linear",)))
            for name, w in found.items()
        }

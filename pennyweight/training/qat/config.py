"""QATConfig: config of ``quantize_`` before and after quantization-aware training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...core.spec import ActivationSpec, QuantSpec
from ...planning.config_resolution import not_a_config
from ...planning.configs import AOBaseConfig, SpecConfig
from ...planning.configs.by_name import named
from ...planning.parameters import Site
from ...planning.scheme import Scheme
from ...quantize.pipeline import Pipeline
from ...support.arguments import did_you_mean
from ...support.errors import ArgumentTypeError
from .modules import CONFIG
from .prepare import LEARN, Convert, Prepare

STEPS = ("prepare", "convert")


@dataclass(frozen=True)
class QATConfig(AOBaseConfig):
    """Quantization-aware training: ``quantize_(model, QATConfig(config, step="prepare"))``, train, then
    ``quantize_(model, QATConfig(config, step="convert"))``.

    base_config   the target config, any, or its short name. Optional for "convert"; if given, it must match
    weight_config, activation_config   a QuantSpec and an ActivationSpec instead of base_config
    step          "prepare": each selected parameter is quantized in each forward pass exactly as by ``quantize_``, and
                  run by the kernel used in deployment; the float parameters are trained under their own names.
                  "convert": each parameter becomes the quantized weight of its last value
    learn         "none": scales are recomputed from the weights, or fixed by a solver. "scale": trains scales, and the
                  range of a static activation (LSQ). "all": also offsets, zero points and codebooks. Held parts are in
                  the state dict next to the weight: ``weight_scale``
    start         number of forward passes of the model in training mode before quantization begins; counted in the
                  model's buffer ``fake_quant_step``

    ``calibration`` and ``algorithm`` of ``quantize_`` apply to "prepare": training then starts at the solver's codes.
    Scales that are quantized themselves (NF4, MX) are not trained.

    >>> import torch, pennyweight as pw
    >>> model, int4 = torch.nn.Sequential(torch.nn.Linear(64, 8)), pw.Int4WeightOnlyConfig(group_size=32)
    >>> report = pw.quantize_(model, pw.QATConfig(int4, step="prepare"))
    >>> model(torch.randn(4, 64)).square().mean().backward()  # gradients of the latent float weight
    >>> model[0].weight.grad is not None
    True
    >>> report = pw.quantize_(model, pw.QATConfig(int4, step="convert"))
    >>> type(model[0].weight).__name__
    'AffineQuantizedTensor'
    """

    base_config: AOBaseConfig | None = None
    activation_config: Any = None
    weight_config: Any = None
    step: str = "prepare"
    learn: str = "none"
    start: int = 0

    def __init__(
        self, base_config: AOBaseConfig | str | None = None, activation_config: Any = None, weight_config: Any = None,
        *, step: str = "prepare", learn: str = "none", start: int = 0,
    ) -> None:  # fmt: skip
        step, base_config = getattr(step, "value", step), named(base_config)
        given = {
            "base_config": base_config, "activation_config": activation_config, "weight_config": weight_config,
            "step": step, "learn": learn, "start": start,
        }  # fmt: skip
        for name, value in given.items():
            object.__setattr__(self, name, value)
        if step not in STEPS:
            raise ValueError(f"`step` must be one of {list(STEPS)}, got {step!r}{did_you_mean(step, STEPS, 1)}")
        if learn not in LEARN:
            raise ValueError(f"learn must be one of {', '.join(LEARN)}, got {learn!r}")
        if type(start) is not int or start < 0:
            raise ValueError(f"start must be a number of forward passes, got {start!r}")
        if base_config is not None and not isinstance(base_config, AOBaseConfig):
            raise ArgumentTypeError(not_a_config("base_config", base_config))
        if isinstance(base_config, QATConfig):
            raise ValueError("base_config of a QATConfig must not be a QATConfig")
        specs = (activation_config, weight_config)
        if base_config is not None and any(spec is not None for spec in specs):
            raise ValueError("Cannot specify both `base_config` and `activation_config` or `weight_config`")
        if step == "convert" and any(spec is not None for spec in specs):
            raise ValueError("Cannot specify `weight_config` or `activation_config` in the convert step")
        if step == "convert" and (learn != "none" or start):
            raise ValueError("learn and start are only valid with step='prepare'")
        if step == "prepare" and base_config is None and weight_config is None:
            if activation_config is None:
                raise ValueError(
                    "Must specify `base_config`, `activation_config`, or `weight_config` to prepare, for example "
                    "QATConfig(Int4WeightOnlyConfig(group_size=32))"
                )
            raise ValueError("activation_config needs a weight_config")
        if weight_config is not None:
            self._of_specs()

    def _of_specs(self) -> SpecConfig:
        weight, act = self.weight_config, self.activation_config
        weight = weight if isinstance(weight, QuantSpec) else getattr(weight, "weight_spec", weight)
        act = act if act is None or isinstance(act, ActivationSpec) else getattr(act, "activation_spec", act)
        if not (act is None or isinstance(act, ActivationSpec)):
            raise ValueError(f"activation_config must be an ActivationSpec, got {act!r}")
        rule, eps = getattr(self.weight_config, "rule", None), getattr(self.weight_config, "eps", None)
        return SpecConfig(weight, act, rule, eps)

    @property
    def target(self) -> AOBaseConfig | None:
        """The target config."""
        return self._of_specs() if self.weight_config is not None else self.base_config

    @property
    def pipeline(self) -> type[Pipeline]:  # type: ignore[override]
        return Prepare if self.step == "prepare" else Convert

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        raise ValueError("QATConfig must be passed to quantize_ itself; wrap it around FqnToConfig, not inside")


CONFIG.append(QATConfig)

"""Static quantization: watch the inputs of each layer on calibration data, then fix the scale of each in a config.

python examples/static_quantization.py
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import pennyweight as pw


@dataclass
class Range:
    """The greatest magnitude seen, and how many values were."""

    absmax: float = 0.0
    values: int = 0

    def see(self, x: Tensor) -> None:
        self.absmax = max(self.absmax, x.detach().abs().max().item())
        self.values += x.numel()


def observe(model: nn.Module, batches: list[Tensor]) -> dict[str, Range]:
    """The range of the input of each linear layer over the batches. The model is left as it was."""
    seen: dict[str, Range] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            seen[name] = Range()
            hooks.append(module.register_forward_pre_hook(lambda _, inputs, r=seen[name]: r.see(inputs[0])))
    try:
        with torch.no_grad():
            for x in batches:
                model(x)
    finally:
        for hook in hooks:
            hook.remove()
    never = [name for name, r in seen.items() if r.values == 0]
    if never:
        raise ValueError(f"no input reached {', '.join(never)}; calibrate with data that does, or leave them out")
    return seen


def static_config(seen: dict[str, Range]) -> pw.FqnToConfig:
    """A config a layer: int8 weights, int8 inputs under the scale that just holds what was seen."""
    return pw.FqnToConfig(
        {name: pw.Int8StaticActivationInt8WeightConfig(act_quant_scale=r.absmax / 127) for name, r in seen.items()}
    )


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 16)).eval()


def error(model: nn.Module, reference: nn.Module, x: Tensor) -> float:
    return float((model(x) - reference(x)).norm() / reference(x).norm())


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    reference = network()
    calibration = [torch.randn(32, 64) for _ in range(8)]
    fresh = torch.randn(200, 64)

    seen = observe(reference, calibration)
    for name, r in seen.items():
        print(f"input of layer {name}: {r.values} values, at most {r.absmax:.3f}")

    static, dynamic, weight_only = (copy.deepcopy(reference) for _ in range(3))
    report = pw.quantize_(static, static_config(seen))
    print(report)
    pw.quantize_(dynamic, pw.Int8DynamicActivationInt8WeightConfig())
    pw.quantize_(weight_only, pw.Int8WeightOnlyConfig())
    for name, r in seen.items():
        weight = static.get_submodule(name).weight
        assert weight.act.mode == "static"
        torch.testing.assert_close(weight.act_scale.item(), r.absmax / 127, rtol=1e-6, atol=0)

    errors = {
        "weights only": error(weight_only, reference, fresh),
        "dynamic": error(dynamic, reference, fresh),
        "static": error(static, reference, fresh),
    }
    for name, value in errors.items():
        print(f"{name:>12}: relative error of the outputs {value:.4f}")
    assert errors["weights only"] < errors["dynamic"] < errors["static"] < 0.03

    # A static scale is one number for all inputs, so it fails where a dynamic one adapts: on inputs unlike those that
    # were seen. Values beyond the calibrated range are clipped.
    loud = 4 * fresh
    clipped, adapted = error(static, reference, loud), error(dynamic, reference, loud)
    print(f"inputs four times as large: static {clipped:.2f}, dynamic {adapted:.4f}")
    assert clipped > 0.2 > 10 * adapted

    # A layer that calibration never reached is an error that names it, before anything is quantized.
    try:
        observe(nn.ModuleDict({"used": nn.Linear(4, 4), "idle": nn.Linear(4, 4)}), [])
    except ValueError as problem:
        print(problem)
    else:
        raise AssertionError("layers without calibration data were accepted")


if __name__ == "__main__":
    main()

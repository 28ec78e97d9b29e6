"""Static quantization: fix the scale of each layer's input in advance, from calibration data.

python examples/tutorials/static_quantization.py
"""

import copy

import torch
from torch import Tensor, nn

import pennyweight as pw


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

    static, dynamic, weight_only = (copy.deepcopy(reference) for _ in range(3))
    config = pw.calibrate(static, calibration, pw.Int8StaticActivationInt8WeightConfig, method="mse")
    report = pw.quantize_(static, config)
    print(report)
    for name, layer in config.fqn_to_config.items():
        print(f"input of layer {name}: scale {layer.act_quant_scale:.5f}")
        weight = static.get_submodule(name).weight
        assert weight.act.mode == "static"
        torch.testing.assert_close(weight.act_scale.item(), layer.act_quant_scale, rtol=1e-6, atol=0)

    pw.quantize_(dynamic, pw.Int8DynamicActivationInt8WeightConfig())
    pw.quantize_(weight_only, pw.Int8WeightOnlyConfig())
    errors = {
        "weights only": error(weight_only, reference, fresh),
        "dynamic": error(dynamic, reference, fresh),
        "static": error(static, reference, fresh),
    }
    for name, value in errors.items():
        print(f"{name:>12}: relative error of the outputs {value:.4f}")
    assert errors["weights only"] < errors["dynamic"] < errors["static"] < 0.03

    # One outlier in the calibration data: use the full range, or the range of most values
    calibration[3][5, 7] = 60.0
    for method in ("minmax", "percentile"):
        model = copy.deepcopy(reference)
        config = pw.calibrate(model, calibration, pw.Int8StaticActivationInt8WeightConfig, method, percentile=99.8)
        pw.quantize_(model, config)
        errors[method] = error(model, reference, fresh)
        print(f"one outlier, {method}: {errors[method]:.4f}")
    assert errors["minmax"] > 3 * errors["percentile"]

    # A static scale is one number for all inputs. Unlike a dynamic scale it does not adapt to inputs that differ from
    # the calibration data: values beyond the calibrated range are clipped.
    loud = 4 * fresh
    clipped, adapted = error(static, reference, loud), error(dynamic, reference, loud)
    print(f"inputs four times as large: static {clipped:.2f}, dynamic {adapted:.4f}")
    assert clipped > 0.2 > 10 * adapted

    # A layer without calibration inputs raises an error with its name, before anything is quantized.
    try:
        pw.calibrate(reference, [], pw.Int8StaticActivationInt8WeightConfig)
    except pw.PlanError as problem:
        print(problem)
    else:
        raise AssertionError("layers without calibration data were accepted")


if __name__ == "__main__":
    main()

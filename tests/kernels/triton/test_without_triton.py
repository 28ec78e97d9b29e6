"""Triton is an extra: importing the package does not import it, and what needs it says how to install it."""

from tests import forked

PROBE = """
import sys
import pennyweight, torch
import pennyweight.kernels.triton.weight_only, pennyweight.kernels.triton.self_test
assert "triton" not in sys.modules
sys.modules["triton"] = None  # importing it raises ImportError
model = torch.nn.Sequential(torch.nn.Linear(128, 64)).bfloat16()
pennyweight.quantize_(model, pennyweight.Int4WeightOnlyConfig(group_size=64))
weight, x = model[0].weight, torch.ones(2, 128, dtype=torch.bfloat16)
model(x)
print(weight.to_layout("gpu").to_layout("plain").dequantize().equal(weight.dequantize()))
spec = weight.spec.with_(layout="gpu")
case = pennyweight.kernels.Case(spec, None, (64, 128), torch.bfloat16, "cuda:sm_90")
print(pennyweight.kernels.select("linear", case).name)
"""


def test_importing_and_planning_need_no_triton() -> None:
    run = forked.run(["-c", PROBE])
    assert run.stdout.split() == ["True", "triton_weight_only"], run.stderr[-3000:]

"""Write torchao_0.18_parq.safetensors: torchao's quantizers and proximal training.

python make_torchao_parq.py     # in an environment with torchao 0.18.0; CPU
"""

from importlib.metadata import version
from pathlib import Path

from parq_runs import quantized, trained
from safetensors.torch import save_file
from torchao.prototype.parq import optim, quant

assert version("torchao") == "0.18.0"
out = Path(__file__).parent / "torchao_0.18_parq.safetensors"
save_file(
    {**quantized(quant), **trained(optim, quant)}, out, {"torchao": version("torchao"), "torch": version("torch")}
)

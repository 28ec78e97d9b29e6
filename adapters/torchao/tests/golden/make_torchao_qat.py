"""Write torchao_0.18_qat.safetensors: what torchao's fake quantizers and QAT quantizers compute; see qat_cases.py.

python make_torchao_qat.py     # in an environment with torchao 0.18.0; CPU
"""

from importlib.metadata import version
from pathlib import Path

import torchao
import torchao.quantization.qat
from qat_cases import run
from safetensors.torch import save_file

assert version("torchao") == "0.18.0"
out = Path(__file__).parent / "torchao_0.18_qat.safetensors"
save_file(run(torchao), out, {"torchao": version("torchao")})

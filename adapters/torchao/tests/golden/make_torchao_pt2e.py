"""Write torchao_0.18_pt2e.json and .safetensors: graphs and outputs of torchao's quantization of exported graphs.

python make_torchao_pt2e.py     # in an environment with torchao 0.18.0; CPU
"""

import json
from importlib.metadata import version
from pathlib import Path

import torch
from pt2e_cases import results
from safetensors.torch import save_file

assert version("torchao").startswith("0.18.0")
out = Path(__file__).parent / "torchao_0.18_pt2e.json"
graphs, outputs = {}, {}
for name, text, output in results():
    graphs[name], outputs[name] = text, output.contiguous()
out.write_text(json.dumps({"torchao": version("torchao"), "torch": torch.__version__, "graphs": graphs}, indent=1))
save_file(outputs, out.with_suffix(".safetensors"))

"""Write torchao_0.18_training.safetensors: a user's own trainable tensor, trained over torchao's base class.

python make_torchao_training.py     # in an environment with torchao 0.18.0; CPU
"""

from importlib.metadata import version
from pathlib import Path

from own_trainable import train
from safetensors.torch import save_file
from torchao.quantization import quant_primitives
from torchao.utils import TorchAOBaseTensor

assert version("torchao") == "0.18.0"
out = Path(__file__).parent / "torchao_0.18_training.safetensors"
save_file(train(TorchAOBaseTensor, quant_primitives), out, {"torchao": version("torchao"), "torch": version("torch")})

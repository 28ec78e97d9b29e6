"""Write golden vectors from torchao: torchao_<version>.safetensors and torchao_<version>.json.

Run it with a python that has the oracle installed (a throw-away virtual environment is best; pennyweight itself is
neither needed nor imported):

    python -m venv oracle && oracle/bin/pip install torch==2.13.0 torchao==0.18.0 numpy safetensors==0.8.0
    oracle/bin/python tests/golden/make_torchao.py            # writes next to this file
    oracle/bin/python tests/golden/make_torchao.py --out DIR  # writes to DIR

Everything runs on the CPU, with one thread and fixed seeds. README.md in this folder describes the two files.
"""

import argparse
from pathlib import Path

import _configs
import _formats
import _primitives
import torch
import torchao
from _record import Golden, make_inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)

    golden = Golden()
    inputs = make_inputs(golden)
    for module in (_configs, _primitives, _formats):
        for fill in module.ALL:
            fill(golden, inputs)
    version = torchao.__version__.split("+")[0]
    golden.write(out, f"torchao_{'.'.join(version.split('.')[:2])}", {"torchao": version})


if __name__ == "__main__":
    main()

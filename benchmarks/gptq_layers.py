"""GPTQ of single layers: processor seconds for 1e9 weights, ours and GPTQModel's, on one thread.

    python benchmarks/gptq_layers.py [--peer PYTHON] [--tokens 8192] [--shapes 2048x2048,5632x2048,2048x5632]

Both get the same float32 weights and inputs (correlated, with channels of different sizes), in batches of 2048 tokens,
and quantize to int4 in groups of 128 with columns in the order of their inputs' sizes. "statistics" is the sum of the
inputs' products, "solve" the rest. The error is E|(Wq - W) x|^2 by E|W x|^2 on the same inputs. PYTHON is an
interpreter that has gptqmodel; without it only our rows are shown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]

DATA = """
import json, sys, time
import torch
rows, columns, tokens = map(int, sys.argv[1:])
torch.set_num_threads(1)
g = torch.Generator().manual_seed(0)
weight = torch.randn(rows, columns, generator=g) / columns**0.5
mix = torch.randn(64, columns, generator=g)
size = torch.rand(columns, generator=g).mul(3).exp()
batches = []
for _ in range(tokens // 2048):
    x = torch.randn(2048, 64, generator=g) @ mix / 8 + torch.randn(2048, columns, generator=g)
    batches.append(x * size)
def finish(values, statistics, solve):
    errors = [((values - weight).double() @ x.double().t()).square().sum() for x in batches[:1]]
    whole = [(weight.double() @ x.double().t()).square().sum() for x in batches[:1]]
    print(json.dumps([statistics, solve, float(errors[0] / whole[0])]))
"""

OURS = """
import pennyweight as pw
from pennyweight.algorithms.calibration.statistics import STATISTICS
from pennyweight.algorithms.solvers.gptq import GPTQ
from pennyweight.algorithms.base import Task
from pennyweight.core.numerics import dequantize
from torch import nn
layer = nn.Sequential(nn.Linear(columns, rows, bias=False))
layer[0].weight.data = weight
(row,) = [r for r in pw.plan(layer, pw.Int4WeightOnlyConfig(group_size=128)).rows]
statistic, solver = STATISTICS["hessian"], GPTQ()
start = time.process_time()
state = statistic.init(1, columns)
for x in batches:
    state = statistic.update(state, x.unsqueeze(0))
hessian = statistic.finish(state)
middle = time.process_time()
spec = row.scheme.weight.with_(layout="plain")
task = Task("", weight, spec, row.scheme.rule, row.scheme.eps, {"hessian": hessian}, tokens)
parts = solver.solve(task).parts
end = time.process_time()
finish(dequantize(parts, spec, weight.shape), middle - start, end - middle)
"""

PEER = """
import warnings
warnings.simplefilter("ignore")
from gptqmodel.quantization import QuantizeConfig
from gptqmodel.quantization.gptq import GPTQ
from torch import nn
layer = nn.Linear(columns, rows, bias=False)
layer.weight.data = weight.clone()
config = QuantizeConfig(bits=4, group_size=128, desc_act=True, sym=False)
task = GPTQ(layer, config)
task.quantizer.configure(perchannel=True)
start = time.process_time()
with torch.inference_mode():
    for x in batches:
        task.add_batch(x.unsqueeze(0), None)
    task.materialize_global_hessian()
    middle = time.process_time()
    values = task.quantize()[0]
end = time.process_time()
finish(values.float(), middle - start, end - middle)
"""


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--peer", help="an interpreter that has gptqmodel")
    p.add_argument("--tokens", type=int, default=8192)
    p.add_argument("--shapes", default="2048x2048,5632x2048,2048x5632", help="outputs x inputs")
    o = p.parse_args()
    table = Table(title=f"GPTQ, int4 g128, {o.tokens} tokens: processor seconds for 1e9 weights, one thread")
    for column in ("outputs x inputs", "library", "statistics", "solve", "error"):
        table.add_column(column, justify="right")
    ways = {"pennyweight": (sys.executable, OURS)} | ({"GPTQModel": (o.peer, PEER)} if o.peer else {})
    for shape in o.shapes.split(","):
        rows, columns = map(int, shape.split("x"))
        for name, (python, code) in ways.items():
            command = [python, "-c", DATA + code, str(rows), str(columns), str(o.tokens)]
            run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
            if run.returncode:
                sys.exit(run.stderr)
            statistics, solve, error = json.loads(run.stdout.splitlines()[-1])
            per = 1e9 / (rows * columns)
            table.add_row(shape, name, f"{statistics * per:.0f}", f"{solve * per:.0f}", f"{error:.2e}")
    Console().print(table)


if __name__ == "__main__":
    main()

"""torchao.prototype.dora and torchao.prototype.galore of 0.9: low-rank updates and gradients."""

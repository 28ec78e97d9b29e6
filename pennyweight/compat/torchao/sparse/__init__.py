"""torchao.sparsity and torchao.prototype.sparsity: masks, pruning, block-sparse weights."""

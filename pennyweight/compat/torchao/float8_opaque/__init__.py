"""torchao.prototype.float8_opaque_tensor: float8 weights and inputs on a CPU, over our float8 weights."""

"""torchao.prototype.paretoq: training of weights with 1 to 4 bits and learned step sizes."""

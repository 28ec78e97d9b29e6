"""torchao.optim: quantizers of optimizer states, the classes of states, and the update of one parameter."""

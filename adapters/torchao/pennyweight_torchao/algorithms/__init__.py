"""torchao's calibration-based algorithms over our solvers: AWQ, SmoothQuant, GPTQ, AutoRound, SpinQuant, autoquant."""

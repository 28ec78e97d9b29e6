"""Solvers: each chooses the codes and quantization parameters of one weight."""

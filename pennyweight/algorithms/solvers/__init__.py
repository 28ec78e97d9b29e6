"""Solvers: each computes the codes and quantization parameters of one weight."""

"""Rewrites: each changes the weights of a model without changing the function that the float model computes."""

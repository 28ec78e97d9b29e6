"""GPU kernels in Triton. Each family is one source for all GPUs, and proves itself on the device before it is used.

Importing this package does not import triton: a kernel is built at the first call on a GPU.
"""

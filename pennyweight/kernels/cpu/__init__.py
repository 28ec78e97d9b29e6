"""Native kernels for CPUs: plain C++ in ``src``, built with the package, called through ctypes."""

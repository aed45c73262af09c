"""Triton kernels, imported as ``fp4adam.kernels``; nothing in here imports the rest of fp4adam."""

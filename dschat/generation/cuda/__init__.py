"""Triton kernels and CUDA graphs of the decoder."""

"""CUDA backend of the decoder: Triton kernels and CUDA graphs."""

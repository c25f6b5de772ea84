"""C++ kernels and recorded steps of the decoder on CPUs."""

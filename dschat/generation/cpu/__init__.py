"""CPU backend of the decoder: C++ kernels, fused modules and step recording."""

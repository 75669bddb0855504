"""The Triton kernels; their sources are in the repository's folder `kernels/flash`."""

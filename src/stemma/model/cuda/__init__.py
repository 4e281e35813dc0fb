"""How a model runs on CUDA: Triton kernels and CUDA graphs. Written, not yet run on a GPU."""

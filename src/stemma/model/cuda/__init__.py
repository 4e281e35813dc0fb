"""How a model runs on CUDA: Triton kernels and CUDA graphs. Run once, on an H100."""

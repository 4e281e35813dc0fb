"""How a model runs on CUDA: Triton kernels and CUDA graphs. Run twice, on an H100."""

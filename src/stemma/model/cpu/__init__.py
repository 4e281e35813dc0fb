"""How a model runs on CPU: packed weights, fused layers, our kernels."""

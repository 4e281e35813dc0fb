"""Models on CPU: packed weights, fused layers, our kernels."""

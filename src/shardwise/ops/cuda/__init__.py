"""Forms that pay on CUDA devices alone: compositions of torch's own fused kernels."""

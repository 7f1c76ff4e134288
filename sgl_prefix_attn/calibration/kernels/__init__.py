"""Kernels to measure, each with the host work before it, and their timer. CUDA only; used by benchmarks too."""

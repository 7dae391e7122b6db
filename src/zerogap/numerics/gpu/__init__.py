"""Canonical numerics on a GPU: Triton kernels and the library's own where a certificate allows. Loaded on first use."""

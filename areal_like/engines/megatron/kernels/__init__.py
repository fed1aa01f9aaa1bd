"""Triton kernels for passes that memory bandwidth bounds; imported where tensors are on a GPU."""

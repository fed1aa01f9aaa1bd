"""The Megatron-Core training engine: a composition that reads as a life cycle; start with `engine.py`."""

import sys

import torch

if not torch.cuda.is_available():
    # Megatron-Core uses TransformerEngine's optimizer and kernels wherever it can be imported, and they need CUDA. In a
    # process that sees no GPU (device: cpu on a GPU machine) it must not be found.
    sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]

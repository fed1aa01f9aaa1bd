"""Recovery checkpoints: everything that a training run needs to go on, under any layout.

model_state      parameters and buffers as shards of whole tensors
optimizer_state  main parameters and moments, each put together on one rank, keyed by the parameter's name
random_state     generators of this rank
counters         steps of Adam and of the schedule, the loss scale
writer           Megatron-Core's `torch_dist` files, written at once or beside the training
checkpointer     the order of saving and loading
"""

from areal_like.engines.megatron.checkpoint.checkpointer import Checkpointer

__all__ = ["Checkpointer"]

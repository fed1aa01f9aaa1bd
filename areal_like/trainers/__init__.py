"""The loops: reinforcement learning, and trying a layout."""

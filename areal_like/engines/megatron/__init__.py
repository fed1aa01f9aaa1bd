"""The Megatron-Core training engine: a composition that reads as a life cycle; start with `engine.py`."""

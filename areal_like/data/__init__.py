"""Datasets, prompts, rewards, and collation into packed tensors."""

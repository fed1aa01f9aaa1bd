"""Environments: what is asked of a model, and what its answers are worth."""

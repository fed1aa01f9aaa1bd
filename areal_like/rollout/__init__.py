"""Producing rollouts: who generates, how far ahead of training, and what they are worth."""

"""areal_like: one string per model turns into a running reinforcement-learning job."""

"""Order, admission, lag and consumption: from environments that pose problems to batches that are trained on."""

from areal_like.rollout.pipeline.pipeline import Batch, RolloutPipeline, Share
from areal_like.rollout.pipeline.screening import EpisodesFailedError, Screening

__all__ = ["Batch", "EpisodesFailedError", "RolloutPipeline", "Screening", "Share"]

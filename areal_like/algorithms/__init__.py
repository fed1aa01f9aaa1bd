"""Pure tensor functions and small frozen losses: rewards to advantages, KL estimators, policy and supervised losses."""

from areal_like.algorithms.advantages import AdvantageSettings, Normalization, compute_advantages
from areal_like.algorithms.kl import KL_ESTIMATORS, approximate_kl
from areal_like.algorithms.ppo import GRPOLoss
from areal_like.algorithms.rejection import RejectionSampling
from areal_like.algorithms.settings import advantage_settings, policy_loss
from areal_like.algorithms.sft import SFTLoss

__all__ = [
    "KL_ESTIMATORS",
    "AdvantageSettings",
    "GRPOLoss",
    "Normalization",
    "RejectionSampling",
    "SFTLoss",
    "advantage_settings",
    "approximate_kl",
    "compute_advantages",
    "policy_loss",
]

"""Memory of every rank in every phase, in bytes. Each module holds formulas and says where they come from."""

from areal_like.spec.memory.job import GIB, PARTS, LoRA, MemoryJob
from areal_like.spec.memory.plan import MemoryPlan, Phase, RankMemory, predict

__all__ = ["GIB", "PARTS", "LoRA", "MemoryJob", "MemoryPlan", "Phase", "RankMemory", "predict"]

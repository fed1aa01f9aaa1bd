"""The model as numbers, and how it is cut. Pure Python: read by the engines and by the check alike."""

from areal_like.spec.attention import AttentionBackend, choose_attention, flex_length
from areal_like.spec.bundled import bundled_names
from areal_like.spec.families.parts import LatentAttention, LayerParameters, LinearAttention
from areal_like.spec.fp8 import fp8_alignment
from areal_like.spec.model import ROPE_SCALING, SUPPORTED_ARCHITECTURES, ModelSpec, ModelSpecError
from areal_like.spec.packing import (
    SequenceTooLong,
    balanced_partition,
    count_micro_batches,
    pack_micro_batches,
    padded_length,
    padding_multiples,
)
from areal_like.spec.pipeline import split_layers
from areal_like.spec.stages import PipelineLayoutError, stage_sizes

__all__ = [
    "ROPE_SCALING",
    "SUPPORTED_ARCHITECTURES",
    "AttentionBackend",
    "LatentAttention",
    "LayerParameters",
    "LinearAttention",
    "ModelSpec",
    "ModelSpecError",
    "PipelineLayoutError",
    "SequenceTooLong",
    "balanced_partition",
    "bundled_names",
    "choose_attention",
    "count_micro_batches",
    "flex_length",
    "fp8_alignment",
    "pack_micro_batches",
    "padded_length",
    "padding_multiples",
    "split_layers",
    "stage_sizes",
]

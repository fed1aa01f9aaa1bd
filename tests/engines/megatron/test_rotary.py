"""The one pass from the fused projection to rotated queries and keys: beside float64, Megatron-Core, Transformers.

Its kernels are tested in `test_pointwise_kernels` too, in Triton's interpreter.
"""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace

import engine_views
import pytest
import rotary_reference
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from areal_like.algorithms.sft import SFTLoss
from areal_like.engines.megatron.context_parallel import local_tokens
from areal_like.engines.megatron.rotary import (
    PositionedSeqParams,
    RotatedSelfAttention,
    Rotation,
    split_with_rotation,
    use_rotated_attention,
    why_not_rotated,
)
from areal_like.runtime.dispatch import scatter
from areal_like.runtime.local import WorkerGroup


def ours(mixed, positions, angles, groups, share):
    return split_with_rotation(mixed, Rotation.of(PositionedSeqParams(positions=positions), angles), groups, share)


SIZES = [
    {"lengths": [5, 1, 9, 2], "groups": 2, "share": 6, "width": 16, "rotated": 16},
    {"lengths": [7], "groups": 3, "share": 1, "width": 8, "rotated": 8},
    {"lengths": [4, 3], "groups": 1, "share": 8, "width": 20, "rotated": 12},
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)], ids=str)
def test_plain_torch(sizes, dtype, tolerance):
    assert max(rotary_reference.differences(ours, dtype, "cpu", **sizes)) < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("groups", "share", "width"), [(2, 6, 128), (8, 4, 64)])
def test_kernels(groups, share, width, dtype):
    sizes = {"lengths": [700, 1, 299], "groups": groups, "share": share, "width": width, "rotated": width}
    found = rotary_reference.differences(ours, dtype, "cuda", **sizes)
    assert max(found) < (5e-3 if dtype is torch.bfloat16 else 1e-5), found


@pytest.mark.parametrize(("cp", "rank"), [(1, 0), (2, 0), (2, 1), (3, 1)])
def test_beside_megatron_core(cp, rank):
    """Its unfused rotation of packed sequences, which knows the parts of context-parallel ranks itself."""
    lengths = [2 * cp * n for n in (3, 1, 4)]
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    mine = local_tokens(lengths, cp, rank)
    positions = torch.cat([torch.arange(n) for n in lengths])[mine]
    angles = rotary_reference.angles(max(lengths), 16)
    mixed = torch.randn(len(mine), 1, 2 * (3 + 2) * 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k, v = ours(mixed, positions, angles, 2, 3)
    config = TransformerConfig(num_layers=1, hidden_size=96, num_attention_heads=6, num_query_groups=2)
    assert not config.apply_rope_fusion
    group = SimpleNamespace(size=lambda: cp, rank=lambda: rank)
    parts = mixed.view(len(mine), 2, 5, 16).split([3, 1, 1], dim=2)
    for x, part in ((q, parts[0]), (k, parts[1])):
        theirs = apply_rotary_pos_emb(part.flatten(1, 2), angles, config, bounds, cp_group=group)
        # Theirs multiplies with float64 cosines of float32 angles, rounded to float32: so does ours.
        assert torch.allclose(x.squeeze(1), theirs, atol=1e-6)
    assert torch.equal(v.squeeze(1), parts[2].flatten(1, 2))


def test_the_table_is_made_once_a_micro_batch():
    packed, angles = PositionedSeqParams(positions=torch.arange(5)), rotary_reference.angles(5, 8)
    first = Rotation.of(packed, angles)
    assert Rotation.of(packed, angles.detach()) is first, "recomputation hands over the same memory"
    assert Rotation.of(packed, 2 * angles) is not first, "another chunk's angles"
    with pytest.raises(TypeError, match="positions of the packed sequences"):
        Rotation.of(None, angles)


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    ("kind", "text", "options"),
    [
        ("qwen2", "megatron:t2", {}),
        ("llama-tied", "megatron:c2", {}),
        (
            "llama3-scaled",
            "megatron:d1",
            {"gradient_checkpointing": True, "megatron": {"bridge_type": "megatron-bridge"} | FULL},
        ),
    ],
)
def test_in_an_engine(request, helpers, models, kind, text, options):
    """Logits beside Transformers; gradients beside Megatron-Core's rotation, in the same engine."""
    ranks = request.getfixturevalue("pair" if text[-1] == "2" else "solo")
    batch = helpers.random_batch([17, 5, 40, 1, 23])
    ranks.build(text, models(kind), **options)

    def gradients():
        return ranks.group.call_each(
            "ask", [(engine_views.gradients, shard, SFTLoss()) for shard in scatter(batch, ranks.mesh).shards]
        )

    before = gradients()
    assert ranks.group.call("ask", engine_views.use_rotated_attention) == [3] * ranks.count
    assert (ranks.logits(batch) - helpers.hugging_face_logits(models(kind), batch)).abs().max() < 1e-4
    for theirs, own in zip(before, gradients(), strict=True):
        assert theirs.keys() == own.keys() and len(own) > 15
        assert all(g.abs().max() > 0 for name, g in own.items() if "linear_qkv" in name)
        far = [n for n, g in theirs.items() if (own[n] - g).abs().max() > 1e-5 * g.abs().max().clamp(min=1e-3)]
        assert far == []


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_beside_transformer_engine(helpers, models):
    """bfloat16, one micro-batch of three layers: two launches a layer, and what TransformerEngine's rotation gives."""
    batch = helpers.random_batch([17, 5, 40, 1, 23])
    config = helpers.engine_config("megatron:d1", models("qwen2"), dtype="bfloat16")
    with WorkerGroup.start("engine", "megatron_hosts:EngineHost", {}, 1, "cuda") as gpu:

        def found():
            (logits,) = gpu.call("do", "logits", batch)
            (gradients,) = gpu.call("ask", engine_views.gradients, batch, SFTLoss())
            return {"logits": logits} | gradients

        gpu.call("build", "megatron:d1", config, device="cuda")
        ours, (launches,) = found(), gpu.call("ask", engine_views.rotary_kernels, batch, SFTLoss())
        assert gpu.call("ask", engine_views.use_megatrons_attention) == [3]
        theirs, (others,) = found(), gpu.call("ask", engine_views.rotary_kernels, batch, SFTLoss())
    assert launches == (6, 0) and others[0] == 0 and others[1] > 0
    assert ours.keys() == theirs.keys() and len(ours) > 15
    far = {n: float((ours[n] - x).float().norm() / x.float().norm()) for n, x in theirs.items()}
    assert max(far.values()) < 3e-2, far  # a wrong angle makes it about 1


def block(**options):
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2}
    config = TransformerConfig(**sizes | options)
    return config, get_gpt_decoder_block_spec(config, use_transformer_engine=False, pp_rank=0)


def test_layers_that_get_it():
    config, spec = block()
    use_rotated_attention(spec, config)
    assert [layer.submodules.self_attention.module for layer in spec.layer_specs] == [RotatedSelfAttention] * 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"qk_layernorm": True}, "norms"),
        ({"rotary_interleaved": True}, "another kind"),
        ({"no_rope_freq": 2}, "not of every layer"),
        ({"attention_output_gate": True}, "gate"),
        ({"tensor_model_parallel_size": 4}, "share a KV head"),
    ],
)
def test_layers_that_do_not(options, why):
    config, spec = block(**options)
    use_rotated_attention(spec, config)
    parts = [layer.submodules.self_attention for layer in spec.layer_specs]
    assert all(part.module is SelfAttention for part in parts)
    assert why in why_not_rotated(config, parts[0])


def test_other_attention_stays():
    config, _ = block()
    assert "plain" in why_not_rotated(config, SimpleNamespace(module=object, submodules=None))

"""The mask of documents beside torch's own, and the attention beside scaled-dot-product attention, one document a time.

torch computes FlexAttention without compiling it on a CPU; the compiled kernel is tested on a GPU in `test_gpu_*`.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention.flex_attention import create_block_mask

from areal_like.engines.megatron.document_attention import DocumentAttention, DocumentMask

LENGTHS = [[5, 300, 1, 90], [128, 128, 128], [700], [64] * 9, [1000, 3, 2000], [1]]


def bounds(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_mask_is_the_one_that_torch_makes_from_the_rule(lengths):
    tokens = sum(lengths)
    mask = DocumentMask.from_bounds(bounds(lengths), tokens)
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    documents = torch.cat([documents, torch.arange(1000, 1000 + mask.padded - tokens)])
    theirs = create_block_mask(
        lambda b, h, q, k: (q >= k) & (documents[q] == documents[k]), 1, 1, mask.padded, mask.padded, device="cpu"
    )
    assert torch.equal(mask.blocks.to_dense(), theirs.to_dense())
    assert torch.equal(mask.blocks.full_kv_num_blocks, theirs.full_kv_num_blocks)
    assert torch.equal(mask.blocks.full_q_num_blocks, theirs.full_q_num_blocks)
    assert torch.equal(mask.blocks.kv_num_blocks, theirs.kv_num_blocks)


def attention(**changes):
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, num_query_groups=2, attention_dropout=0.0, **changes
    )
    return DocumentAttention(config, 1, None, "self")


def packed(lengths):
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds(lengths), cu_seqlens_kv=bounds(lengths))


def each_alone(lengths, q, k, v):
    """float64 `[tokens, width]`."""
    rows = [
        F.scaled_dot_product_attention(
            *(x.transpose(0, 1).double() for x in parts), is_causal=True, enable_gqa=True
        ).transpose(0, 1)
        for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    ]
    return torch.cat(rows).flatten(1)


@pytest.mark.parametrize("lengths", [[5, 300, 1, 90], [128, 130], [64] * 5])
def test_values_are_those_of_each_document_alone(lengths):
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), heads, 16) for heads in (4, 2, 2))
    out = attention()(q, k, v, None, packed_seq_params=packed(lengths))
    assert (out - each_alone(lengths, q, k, v)).abs().max() < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[5, 300, 1, 90], [1000, 2000, 3]])
def test_the_compiled_kernel_and_its_gradients(lengths):
    """In float32: FlexAttention has no backward pass on a CPU."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), heads, 16, device="cuda", requires_grad=True) for heads in (4, 2, 2))
    weights = torch.randn(sum(lengths), 64, device="cuda")
    description = packed(lengths)
    description.cu_seqlens_q = description.cu_seqlens_q.cuda()
    results = []
    for _ in range(2):
        out = attention()(q, k, v, None, packed_seq_params=description)
        results.append([out, *torch.autograd.grad((out * weights).sum(), (q, k, v))])
    whole = each_alone(lengths, q, k, v)
    theirs = [whole, *torch.autograd.grad((whole * weights).sum(), (q, k, v))]
    assert max(float((a - b).abs().max()) for a, b in zip(results[0], theirs, strict=True)) < 1e-4
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
def test_nothing_is_copied_where_no_padding_is_needed():
    """512 tokens, bfloat16: kept are the output and the log-sum-exp alone; gradients have the layout of the inputs."""
    q, k, v = (torch.randn(512, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (4, 2, 2))
    description = packed([200, 312])
    description.cu_seqlens_q = description.cu_seqlens_q.cuda()
    module = attention()
    for _ in range(2):  # the first call makes the mask and compiles
        before = torch.cuda.memory_allocated()
        out = module(q, k, v, None, packed_seq_params=description)
        kept = torch.cuda.memory_allocated() - before
        gradient = torch.ones_like(out)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            grads = torch.autograd.grad(out, (q, k, v), gradient)
            torch.cuda.synchronize()
        layouts = [g.is_contiguous() for g in grads]
        del out, grads, gradient
    output, log_sum_exp = 512 * 256 * 2, 512 * 4 * 4
    assert output + log_sum_exp <= kept <= output + 2 * log_sum_exp + 2048, kept
    assert layouts == [True] * 3
    kernels = [e.name.lower() for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert kernels and not [name for name in kernels if any(word in name for word in ("clone", "copy", "memcpy"))]


def test_the_mask_is_made_once_a_micro_batch():
    description = packed([5, 7])
    assert DocumentMask.of(description, 12) is DocumentMask.of(description, 12)


def test_what_it_does_not_have_is_refused():
    with pytest.raises(ValueError, match=r"no dropout, and this model has 0\.1; set disable_dropout: true"):
        DocumentAttention(
            TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, attention_dropout=0.1), 1, None, "s"
        )
    with pytest.raises(ValueError, match="no context parallelism"):
        attention(context_parallel_size=2)
    with pytest.raises(ValueError, match="no sliding windows"):
        attention(window_size=(128, 0))
    with pytest.raises(TypeError, match="bounds of the packed sequences"):
        attention()(torch.zeros(4, 4, 16), torch.zeros(4, 2, 16), torch.zeros(4, 2, 16), None)

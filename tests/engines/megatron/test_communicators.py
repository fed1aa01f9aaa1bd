"""Communicators: made once, each used once before the first step; a broken one is named."""

from __future__ import annotations

import engine_views
import pytest


def ask(ranks, function, *args):
    return ranks.group.call("ask", function, *args)


def two_steps_make_none(ranks, helpers, text, folder, **changes):
    ranks.build(text, folder, **changes)
    assert ask(ranks, engine_views.count_new_groups) == [0] * ranks.count
    for seed in range(2):
        batch = helpers.random_batch([90, 5, 17, 31, 44], seed)
        ranks.forward(batch)
        ranks.train(batch)
        ranks.weights()
    assert ask(ranks, engine_views.new_groups_counted) == [0] * ranks.count
    assert all(count > 0 for count in ask(ranks, engine_views.new_groups_of_a_layout, text)), "the counter counts"


@pytest.mark.parametrize(
    ("text", "kind", "changes"),
    [
        ("megatron:d2", "qwen3", {"ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True}}),
        ("megatron:p2", "llama-tied", {}),
    ],
)
def test_no_communicator_is_made_after_the_start(pair, models, helpers, text, kind, changes):
    two_steps_make_none(pair, helpers, text, models(kind), **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "kind"), [("megatron:d1t2p2", "llama-tied"), ("megatron:(attn:d1p2t2|ffn:e2)", "qwen3-moe")]
)
def test_nor_in_larger_layouts(quad, models, helpers, text, kind):
    two_steps_make_none(quad, helpers, text, models(kind))


@pytest.mark.parametrize(("text", "neighbours"), [("megatron:t2", 0), ("megatron:p2", 2)])
def test_every_group_and_neighbour_is_used(pair, models, text, neighbours):
    """What is called while an engine starts, recorded, against the collection it then has."""
    folder, kind = models("llama-tied"), "llama-tied"
    pair.build(text, folder)
    for used, held, exchanges in ask(pair, engine_views.used_at_start):
        assert used == held and len(held) > 10, (kind, used ^ held)
        assert exchanges == neighbours


def test_what_is_broken_is_named(pair, models):
    pair.build("megatron:t2", models("llama-tied"))
    for text in ask(pair, engine_views.wrong_sum):
        assert "(ranks 0, 1) sums 2 ones to 1.0 on cpu" in text and "the group tp" in text
    # One rank does not come: the other says whom it waited for.
    found = pair.group.call_each("ask", [(engine_views.lonely_warm_up, rank == 0) for rank in range(2)])
    assert found[1] is None and "the group tp" in found[0]
    assert "does not communicate on cpu (ranks 0, 1)" in found[0]


def test_a_neighbour_that_answers_wrongly(pair, models):
    pair.build("megatron:p2", models("llama-tied"))
    first, second = ask(pair, engine_views.wrong_neighbour)
    assert first == "stage 0 received 7.0 from stage 1 (rank 1)"
    assert second == "stage 1 received 7.0 from stage 0 (rank 0)"

"""What the check says of stages: v said twice, a written split, and lengths that c and t round up."""

from __future__ import annotations

from areal_like.preflight.examples import findings
from areal_like.preflight.registry import example


def said(code: str, *changes: str) -> list[tuple[str, str | None, str | None]]:
    return [(d.message, d.help, d.key) for d in findings(example(*changes)) if d.code == code]


def test_v_said_twice() -> None:
    key = "actor.megatron.virtual_pipeline_parallel_size"
    assert said("AL215", "actor.backend=megatron:d2p2v2", f"{key}=2") == []
    assert said("AL215", "actor.backend=megatron:d2p2", f"{key}=1") == []
    assert said("AL215", "actor.backend=megatron:d2p2v2") == []
    message = "virtual_pipeline_parallel_size is 2, actor.backend has v1"
    hint = "write actor.backend: megatron:d2p2v2, or remove the key"
    assert said("AL215", "actor.backend=megatron:d2p2", f"{key}=2") == [(message, hint, key)]
    (other,) = said("AL215", "actor.backend=megatron:d2p2v3", f"{key}=1")
    assert other[:2] == (
        "virtual_pipeline_parallel_size is 1, actor.backend has v3",
        "write actor.backend: megatron:d2p2, or remove the key",
    )
    (alone,) = said("AL215", "actor.backend=megatron:d4", f"{key}=2")
    assert alone[1] == "remove the key: without p there are no stages to divide"


def test_everything_that_is_wrong_with_a_written_split() -> None:
    """Qwen3-0.6B has 28 layers."""
    key = "actor.megatron.pipeline_layout"
    found = said("AL316", "actor.backend=megatron:d2p2", f"{key}=[20,0,9]")
    assert [message for message, _, _ in found] == [
        "pipeline_layout [20, 0, 9]: it has 3 stages, p2 has 2",
        "pipeline_layout [20, 0, 9]: stage 1 has no layer",
        "pipeline_layout [20, 0, 9]: it has 29 layers, the model 28",
    ]
    assert {(hint, where) for _, hint, where in found} == {("for example [18, 10], or null, which balances", key)}
    (shown,) = said("AL312", "actor.backend=megatron:d2p2", f"{key}=[20,8]")
    assert shown[:2] == ("28 layers over 2 stages: 20, 8 layers", "as pipeline_layout says")
    assert said("AL312", "actor.backend=megatron:d2p2", f"{key}=[14,14]") == []
    (balanced,) = said("AL312", "actor.backend=megatron:d2p2v2")
    assert balanced[0] == "28 layers over 4 stages: 9, 9, 9, 1 layers"


def test_lengths_are_rounded_up() -> None:
    """2,045 tokens become 2,048 where c is 2 (a multiple of four) and where t is 4; d rounds nothing."""
    changes = ("gconfig.max_new_tokens=1021", "actor.mb_spec.max_tokens_per_mb=2047")
    assert said("AL513", *changes) == []
    for text in ("megatron:d2c2", "megatron:d1t4", "megatron:t2c2"):
        (found,) = said("AL513", f"actor.backend={text}", *changes)
        assert "a sequence of 2045 tokens" in found[0] and "use at least 2048" in (found[1] or ""), text
    assert said("AL513", "actor.backend=megatron:d2c2", "gconfig.max_new_tokens=1020", changes[1]) == []


def test_virtual_stages_take_turns_in_groups_of_p() -> None:
    """One micro-batch is rounded up to four for p4v2: the pipeline is idle for 3/(2 x 4 + 3) of the time."""
    changes = ("actor.mb_spec.max_tokens_per_mb=65536", "rollout.max_head_offpolicyness=0")
    (plain,) = said("AL701", "actor.backend=megatron:p4", *changes)
    assert plain[0] == "p4 with at most 8 micro-batches is idle for 27% of the time"
    assert said("AL701", "actor.backend=megatron:p4v2", *changes) == []
    (few,) = said("AL701", "actor.backend=megatron:p4v2", "train_dataset.batch_size=1", "gconfig.n_samples=1", *changes)
    assert few[0] == "p4 with at most 4 micro-batches is idle for 27% of the time"

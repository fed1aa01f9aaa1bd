"""Trajectories to a packed batch, by hand."""

from __future__ import annotations

import pytest
import torch

from areal_like.data.collate import Trajectory, collate


def test_by_hand():
    batch = collate(
        [
            Trajectory([5, 6], [7], [-0.5], [3], 1.0, 0, True),
            Trajectory([8], [9, 2], [-0.1, -0.2], [3, 4], 0.0, 1),
        ]
    )
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9, 2]
    assert batch.cu_seqlens.tolist() == [0, 3, 6]
    assert batch.tokens["loss_mask"].tolist() == [0, 0, 1, 0, 1, 1]
    assert batch.tokens["old_log_probs"].tolist() == pytest.approx([0, 0, -0.5, 0, -0.1, -0.2])
    assert batch.tokens["versions"].tolist() == [-1, -1, 3, -1, 3, 4]
    assert batch.sequences["rewards"].tolist() == [1, 0]
    assert batch.sequences["group"].tolist() == [0, 1]
    assert batch.sequences["truncated"].tolist() == [True, False]
    assert {k: v.dtype for k, v in batch.tokens.items()} == {
        "loss_mask": torch.float32,
        "old_log_probs": torch.float32,
        "versions": torch.int64,
    }


@pytest.mark.parametrize(
    "fields",
    [([], [1], [0.0], [0]), ([1], [], [], []), ([1], [2, 3], [0.0], [0, 0]), ([1], [2], [0.0], [])],
)
def test_halves_are_refused(fields):
    with pytest.raises(ValueError, match=r"trajectory has|tokens were drawn"):
        Trajectory(*fields, 0.0, 0)
    with pytest.raises(ValueError, match="no trajectory"):
        collate([])

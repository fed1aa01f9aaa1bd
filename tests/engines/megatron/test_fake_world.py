"""Ranks of worlds that do not exist: Megatron-Core's groups and the engine's model against Mesh and prediction.

The worlds are in a process of their own: a fake world takes the place of the process group of whoever starts one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

CODE = """
import json, sys
from unittest.mock import patch
from areal_like.alloc import Mesh, ModelAllocation
from areal_like.engines.megatron import proof
from areal_like.spec import ModelSpec

def prove(text, rank, model=None, broken=None):
    allocation = ModelAllocation.parse(text)
    spec = None if model is None else ModelSpec.bundled(model)
    return proof.prove(allocation, rank=rank, spec=spec)

def swapped(self, name, groups=Mesh.groups):
    found = list(groups(self, name))
    return iter(found[::-1] if name == "cp" else found)

def short(*arguments, predict=proof.rank_parameters):
    return predict(*arguments)[:-1]

for text, rank, model, broken in json.loads(sys.argv[1]):
    patches = {"groups": patch.object(Mesh, "groups", swapped), "model": patch.object(proof, "rank_parameters", short)}
    if broken:
        with patches[broken]:
            found = prove(text, rank, model)
    else:
        found = prove(text, rank, model)
    print("PROOF", found.to_json())
"""
MOE, DENSE = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-0.6B"


def prove(*worlds: tuple[str, int, str | None, str | None]) -> list[dict[str, Any]]:
    """One proof for each (allocation, rank, model, what is broken)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(worlds)], capture_output=True, text=True, timeout=280, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("PROOF ")]
    assert len(found) == len(worlds)
    return found


SMALL = {
    "megatron:d2": 2,
    "megatron:t2": 2,
    "megatron:d2t2p2": 8,
    "megatron:d1c2t2": 4,
    "megatron:d4t2e4": 8,
    "megatron:(attn:d2p2t2|ffn:t2e2)": 8,
    "megatron:(attn:d1p3t4c2|ffn:t4e2)": 24,
    "megatron:d6p2e3": 12,
    "megatron:d8e8": 8,
    "megatron:(attn:d3p2t5|ffn:t3e5)": 30,
}
"""Allocation: ranks."""


LARGE = [
    ("megatron:(attn:d16p4t4c4|ffn:t2e32)", 777, MOE, None),
    ("megatron:d1", 0, MOE, None),
    ("megatron:d2p2t2", 7, DENSE, None),
    ("megatron:d2t2c2", 3, None, "groups"),
    ("megatron:d2p2", 3, DENSE, "model"),
]
WORLDS = [(text, rank, None, None) for text, size in SMALL.items() for rank in (0, size // 2, size - 1)]


@pytest.fixture(scope="module")
def proofs() -> list[dict[str, Any]]:
    """Of all of these worlds in one process, because to import Megatron-Core takes longer than they do."""
    return prove(*LARGE, *WORLDS)


def test_a_rank_of_1024(proofs: list[dict[str, Any]]) -> None:
    whole, alone, tied, *_ = proofs
    assert whole["holds"] and whole["world_size"] == 1024 and whole["differences"] == []
    assert whole["groups"] > 4000 and whole["parameters"] == whole["predicted"] > 10**8
    # Transformers counts as many
    assert alone["holds"] and alone["parameters"] == 30_532_122_624
    assert tied["holds"] and tied["parameters"] == tied["predicted"]


def test_what_differs_is_said(proofs: list[dict[str, Any]]) -> None:
    groups, model = proofs[3:5]
    assert not groups["holds"] and len(groups["differences"]) == 1
    assert "CONTEXT_PARALLEL_GROUP: Megatron-Core" in groups["differences"][0]
    assert not model["holds"] and len(model["differences"]) == 1
    assert "output_layer.weight" in model["differences"][0] and "None predicted" in model["differences"][0]


def test_real_initialisation_of_small_worlds(proofs: list[dict[str, Any]]) -> None:
    """`initialize_model_parallel` itself, as first, middle and last rank."""
    for (text, rank, *_), found in zip(WORLDS, proofs[len(LARGE) :], strict=True):
        assert found["holds"] and (found["rank"], found["world_size"]) == (rank, SMALL[text]), found
        assert found["groups"] > SMALL[text]


@pytest.mark.slow
def test_ranks_of_4096() -> None:
    text = "megatron:(attn:d64p16t4|ffn:t1e128)"
    worlds = [(text, rank, MOE, None) for rank in (0, 1234, 4095)]
    for found in prove(*worlds, ("megatron:d512p4t2", 4000, "Qwen/Qwen2.5-1.5B", None)):
        assert found["holds"] and found["world_size"] == 4096, found
        assert found["parameters"] == found["predicted"]


@pytest.mark.slow
def test_the_command() -> None:
    command = [sys.executable, "-m", "areal_like.cli", "mesh", "megatron:(attn:d64p16t4|ffn:t1e128)", "--build"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--rank", "1234", "--model", MOE], capture_output=True, text=True, timeout=280, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank 1234 of 4096 ranks" in done.stdout and done.stdout.endswith("predicted\nequal\n")

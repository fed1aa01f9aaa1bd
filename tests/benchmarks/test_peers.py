"""The benchmark beside other frameworks says what it measured, and why a peer has no figures."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("peers")


def options(**changed):
    small = {"model": "dense", "layers": 1, "tokens": 64, "seq": 16, "micro": 2, "steps": 1, "entropy": False}
    return argparse.Namespace(**{**small, "device": "cpu", "timeout": 120, **changed})


def test_a_peer_that_is_not_there_is_reported_with_its_exception(peers, tmp_path):
    result = peers.run_peer(options(), "verl-fsdp", tmp_path, tmp_path)
    assert result["failed"] == "ModuleNotFoundError: No module named 'verl'"
    assert "_verl_fsdp" in result["traceback"]


def test_a_peer_that_takes_too_long_is_reported(peers, tmp_path):
    assert peers.run_peer(options(timeout=0.01), "verl-fsdp", tmp_path, tmp_path)["failed"] == "no result after 0.01 s"


def test_a_peers_folder_comes_before_all_others(peers, tmp_path):
    """What a peer brings is what it gets."""
    package = tmp_path / "verl"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('mine')")
    assert peers.run_peer(options(), "verl-fsdp", tmp_path, tmp_path)["failed"] == "ImportError: mine"


def test_ratios_are_ours_over_theirs(peers, capsys):
    ours = {"tok_s_gpu": 3000, "peak_gib": 10.0}
    peers.report({"ours": ours, "a": {"tok_s_gpu": 2000, "peak_gib": 40.0}, "b": {"failed": "TypeError: no"}})
    assert capsys.readouterr().out.splitlines() == [
        "tokens/s: 1.500 x a; peak memory: 0.250 x a",
        "b: does not run: TypeError: no",
    ]


def test_the_batch_is_ours_in_rows(peers):
    from train_step import make_batch

    batch, rows = make_batch(options()), peers._rows(options())
    assert rows["input_ids"].shape == (8, 16)
    assert torch.equal(rows["input_ids"].flatten(), batch.input_ids)
    assert set(rows) == {"input_ids", "loss_mask", "advantages", "old_log_probs", "prox_log_probs"}
    assert rows["loss_mask"][:, 0].sum() == 0 and rows["loss_mask"][:, 1:].all()


@pytest.mark.slow
def test_the_checkpoint_is_a_folder_of_hugging_face(peers, tmp_path):
    peers.write_checkpoint(options(), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (model.config.num_hidden_layers, model.config.hidden_size, model.dtype) == (1, 1536, torch.bfloat16)
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token_id == 0

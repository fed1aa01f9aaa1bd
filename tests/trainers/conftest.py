"""A tiny random model with a tokenizer of digits, and runs over it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from areal_like.alloc import get_backend  # noqa: E402
from areal_like.config import load_config  # noqa: E402
from areal_like.data.rows import Row  # noqa: E402

LETTERS = "abcdefghijklmnop"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A Qwen3 of 16 tokens, each a letter; token 1 is the letter b."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(LETTERS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="p"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="a", pad_token="a").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_moe(tiny_model, tmp_path_factory):
    """Eight experts in four layers, with the tokenizer of letters."""
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("moe")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        max_position_embeddings=128,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.fixture
def rows():
    return [Row(f"{LETTERS[2 + i % 6]} {LETTERS[3 + i % 5]}", "b", index=i, dataset="toy") for i in range(64)]


@pytest.fixture
def configure(tiny_model, tmp_path):
    """`configure("key=value", ...)`: a small run over the tiny model."""

    def make(*overrides: str):
        data = {
            "experiment_name": "toy",
            "trial_name": "t",
            "seed": 3,
            "device": "cpu",
            "total_train_epochs": 1,
            "cluster": {"fileroot": str(tmp_path / "runs")},
            "rollout": {"backend": "huggingface:d1"},
            "gconfig": {"n_samples": 4, "max_new_tokens": 8},
            "actor": {
                "backend": "megatron:d1",
                "path": str(tiny_model),
                "dtype": "float32",
                "optimizer": {"lr": 8.0, "warmup_steps_proportion": 0.0},
                "ppo_n_minibatches": 1,
                "use_decoupled_loss": True,
                "recompute_logprob": True,
                "reward_norm": {"mean_level": "group", "std_level": "group"},
            },
            "train_dataset": {"path": "reasoning_gym/chain_sum", "batch_size": 8},
        }
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(data))
        return load_config(path, overrides)

    return make


@pytest.fixture
def toy_backends(monkeypatch):
    """Put the test doubles behind the backend names; `toy_backends("DyingTrain")` takes another trainer."""
    from areal_like.trainers import roles, startup

    def install(train: str = "ToyTrain", inference: str = "ToyInference") -> None:
        engines = {"megatron": f"toy_engines:{train}", "huggingface": f"toy_engines:{inference}"}
        for module in (roles, startup):
            monkeypatch.setattr(module, "get_backend", lambda name: replace(get_backend(name), engine=engines[name]))

    install()
    return install

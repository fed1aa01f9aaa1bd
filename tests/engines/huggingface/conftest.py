from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

torch.set_num_threads(1)

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # large enough that no two tokens are nearly as likely
    "bos_token_id": None,
    "eos_token_id": 7,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama-tied": lambda: LlamaConfig(**SIZES | {"num_key_value_heads": 4}, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
}


def make_model(folder: Path, kind: str = "llama", seed: int = 0) -> Path:
    """A tiny random model, written as a Hugging Face folder."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory):
    """`models("qwen2", seed=1)`: the folder of a tiny model, made once."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def get(kind: str = "llama", seed: int = 0) -> Path:
        if (kind, seed) not in made:
            made[kind, seed] = make_model(root / f"{kind}-{seed}", kind, seed)
        return made[kind, seed]

    return get

"""What each family's file says is read, layer by layer; operations against PyTorch's own counter."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from areal_like.spec import LatentAttention, LayerParameters, LinearAttention, ModelSpec, ModelSpecError, bundled_names
from areal_like.spec.families import KNOWN_ARCHITECTURES

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_key_value_heads": 4}
DEEPSEEK = EXPERTS | MLA | {"n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1}
CONFIGS = {
    "llama": {},
    "llama-bias": {"attention_bias": True, "mlp_bias": True},
    "smollm3": {"pad_token_id": 0},
    "mistral": {"head_dim": 12, "sliding_window": 16},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen2_moe": EXPERTS | {"num_experts": 6, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    "qwen2_moe-no-bias": EXPERTS | {"num_experts": 6, "shared_expert_intermediate_size": 24, "qkv_bias": False},
    "qwen3": {"head_dim": 16, "attention_bias": True},
    "qwen3_moe": EXPERTS | {"num_experts": 6, "head_dim": 8, "mlp_only_layers": [0], "decoder_sparse_step": 2},
    "deepseek_v2": DEEPSEEK | {"topk_group": 1, "q_lora_rank": None},
    "deepseek_v2-bias": DEEPSEEK | {"topk_group": 1, "q_lora_rank": 20, "attention_bias": True},
    "deepseek_v3": DEEPSEEK | {"topk_group": 1, "q_lora_rank": 20},
    "glm4_moe": EXPERTS
    | {"head_dim": 8, "n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 2, "attention_bias": True},
    "glm4_moe-norm": EXPERTS | {"head_dim": 8, "n_routed_experts": 6, "n_shared_experts": 1, "use_qk_norm": True},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "phi3": {"pad_token_id": 0},
    "olmo2": {"pad_token_id": 0},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2},
    "minimax": {
        "head_dim": 8,
        "num_local_experts": 6,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    },
    "minimax_m2": {"head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3_5_text": {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "qwen3_5_moe_text": EXPERTS
    | {"head_dim": 16, "num_experts": 6, "shared_expert_intermediate_size": 24, "linear_num_key_heads": 2}
    | {"linear_num_value_heads": 4},
}
ONLY_OURS = {"kimi_k2", "minimax_text_01", "minimax_m1"}
"""Names of the publishers' own files for models that Transformers has under another name."""


def config_of(name: str):
    arguments = TINY | CONFIGS[name]
    if name.startswith("qwen3_5_moe"):
        arguments = {key: value for key, value in arguments.items() if key != "intermediate_size"}
    return AutoConfig.for_model(name.partition("-")[0], **arguments)


def test_every_family_is_here():
    assert {name.partition("-")[0] for name in CONFIGS} | ONLY_OURS == set(KNOWN_ARCHITECTURES)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_writes_is_counted_layer_by_layer(name, tmp_path):
    config = config_of(name)
    config.save_pretrained(tmp_path)
    spec = ModelSpec.from_path(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for layer, module in enumerate(model.model.layers):
        parts = {key: sum(p.numel() for p in part.parameters()) for key, part in module.named_children()}
        ours = spec.layer_breakdown(layer)
        assert ours.total == spec.layer_parameters(layer) == sum(parts.values())
        attention = parts.get("self_attn", 0) + parts.get("linear_attn", 0)
        assert ours.attention == attention
        mlp = parts.get("mlp", 0) + parts.get("block_sparse_moe", 0)
        assert ours.mlp + ours.experts + ours.shared_experts + ours.router == mlp
        routed = module.mlp.experts if hasattr(getattr(module, "mlp", None), "experts") else None
        assert ours.experts == (0 if routed is None else sum(p.numel() for p in routed.parameters()))
        assert (ours.experts == 0) == (not spec.is_moe or layer in spec.dense_layers)
    assert spec.parameters() == sum(p.numel() for p in model.parameters())
    corrections = [b.numel() for key, b in model.named_buffers() if key.endswith("e_score_correction_bias")]
    assert spec.buffers() == sum(corrections)


# Linear attention is computed in chunks there, and SmolLM3 is a Llama.
COUNTED = [name for name in CONFIGS if not name.startswith(("minimax", "qwen3_5", "smollm3")) or name == "minimax_m2"]


@pytest.mark.parametrize("name", COUNTED)
def test_operations_are_those_that_pytorch_counts(name):
    """One sequence of 24 tokens whose scores are computed whole before they are masked: each attends to all 24."""
    tokens = 24
    config = config_of(name)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(tokens)[None], use_cache=False)
    # A mask does not make scores cheaper, so no window here.
    spec = ModelSpec.from_config({k: v for k, v in config.to_dict().items() if k != "sliding_window"})
    layers = sum(spec.layer_flops(tokens, layer) for layer in range(spec.num_layers))
    # Transformers multiplies out the rotary angles too: two operations for each of half the rotary dimensions.
    angles = counter.get_total_flops() - tokens * (layers + spec.head_flops())
    assert 0 <= angles <= 2 * tokens * spec.head_dim


def test_the_parts_of_deepseek_v3_by_hand():
    spec = ModelSpec.bundled("deepseek-ai/DeepSeek-V3")
    assert spec.latent_attention == LatentAttention(1536, 512, 128, 64, 128)
    assert spec.head_dim == 192 and spec.dense_layers == (0, 1, 2) and spec.mtp_layers == 1
    assert spec.moe_layers == 58 and spec.buffers() == 58 * 256
    attention = 7168 * 1536 + 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 + 512 * 128 * 256 + 128 * 128 * 7168
    expert = 3 * 7168 * 2048
    assert spec.layer_breakdown(0) == LayerParameters(attention, 3 * 7168 * 18432, 0, 0, 0, 2 * 7168)
    assert spec.layer_breakdown(60) == LayerParameters(attention, 0, 256 * expert, expert, 256 * 7168, 2 * 7168)
    assert spec.typical_layer == 3 and spec.layer_parameters() == spec.layer_parameters(60)
    assert spec.layer_flops(1000, 5) - spec.layer_flops(0, 5) == 2 * 128 * (192 + 128) * 1000


def test_linear_layers_do_not_look_back():
    spec = ModelSpec.bundled("MiniMaxAI/MiniMax-Text-01")
    assert spec.linear_attention == LinearAttention("lightning", 64, 64, 128, 128)
    assert [layer for layer in range(80) if layer not in spec.linear_layers] == list(range(7, 80, 8))
    assert spec.layer_flops(100_000, 0) == spec.layer_flops(0, 0) == spec.layer_flops(100_000)
    assert spec.layer_flops(1000, 7) - spec.layer_flops(0, 7) == 4 * 64 * 128 * 1000
    qwen = ModelSpec.bundled("Qwen/Qwen3.5-27B")
    assert qwen.linear_attention == LinearAttention("gated_delta", 16, 48, 128, 128, 4)
    assert qwen.linear_layers[:4] == (0, 1, 2, 4) and len(qwen.linear_layers) == 48
    assert qwen.layer_flops(5000, 0) == qwen.layer_flops(0, 0)


def test_a_window_bounds_what_is_attended_to():
    spec = ModelSpec.bundled("google/gemma-2-2b")
    assert spec.sliding_window == 4096 and spec.sliding_layers == tuple(range(0, 26, 2))
    assert spec.layer_flops(50_000, 0) == spec.layer_flops(4096, 0) < spec.layer_flops(50_000, 1)
    assert ModelSpec.bundled("mistralai/Mistral-7B-v0.1").sliding_layers == tuple(range(32))
    assert ModelSpec.bundled("mistralai/Mistral-7B-v0.3").sliding_layers == ()
    gemma = ModelSpec.bundled("google/gemma-3-1b-pt")
    assert [layer for layer in range(26) if layer not in gemma.sliding_layers] == [5, 11, 17, 23]
    config = TINY | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    assert ModelSpec.from_config(config).sliding_layers == (3,)


def test_publishers_own_files_read_as_those_of_transformers():
    types = [0] * 7 + [1]
    old = TINY | {"model_type": "minimax_m1", "num_hidden_layers": 8, "num_local_experts": 4, "attn_type_list": types}
    new = old | {"model_type": "minimax", "attn_type_list": None}
    new["layer_types"] = ["full_attention" if kind else "linear_attention" for kind in types]
    specs = [ModelSpec.from_config(config) for config in (old, new)]
    assert specs[0].linear_layers == specs[1].linear_layers == tuple(range(7))
    assert specs[0].parameters() == specs[1].parameters()
    with pytest.raises(ModelSpecError, match="neither 'layer_types' nor 'attn_type_list'"):
        ModelSpec.from_config(new | {"layer_types": None})


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("gpt_oss", {"layer_types": ["full_attention"]}, "'layer_types' must have one entry for each of the 4 layers"),
        ("gpt_oss", {"layer_types": "sliding"}, "'layer_types' must have one entry"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "'mlp_only_layers' must be a list of layer numbers, not 3"),
        ("deepseek_v3", {"kv_lora_rank": None}, "has no 'kv_lora_rank'"),
        ("deepseek_v3", {"q_lora_rank": "1536"}, "'q_lora_rank' must be a whole number"),
        ("qwen3_5_text", {"linear_num_value_heads": None}, "has no 'linear_num_value_heads'"),
        ("mixtral", {"num_local_experts": True}, "'num_local_experts' must be a whole number"),
    ],
)
def test_a_wrong_key_of_a_family_is_named(kind, change, words):
    config = config_of(kind).to_dict() | change
    with pytest.raises(ModelSpecError, match=words):
        ModelSpec.from_config(config)


def test_positions_on_a_part_of_each_head_are_a_feature():
    config = TINY | {"model_type": "llama"}
    for change in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
        (feature,) = ModelSpec.from_config(config | change).unsupported
        assert "partial_rotary_factor: 0.5" in feature
    assert ModelSpec.from_config(config | {"partial_rotary_factor": 1.0}).unsupported == ()


def test_an_unknown_architecture_is_read_as_a_plain_decoder():
    llama, other = (ModelSpec.from_config(TINY | {"model_type": kind}) for kind in ("llama", "something_new"))
    assert other.architecture == "something_new" and other.parameters() == llama.parameters()


def test_specs_are_values():
    for name in bundled_names():
        spec = ModelSpec.bundled(name)
        assert spec.typical_layer < spec.num_layers
        assert pickle.loads(pickle.dumps(spec)) == spec and hash(spec) == hash(ModelSpec.find(name))


def test_reading_is_light():
    """Importing costs a few modules and no data; one name reads the index and one family.

    Not in seconds: they would measure the machine.
    """
    code = (
        "import sys, areal_like.spec;"
        "families = [m for m in sys.modules if m.startswith('areal_like.spec.families.')];"
        "from areal_like.spec import bundled; assert bundled._index.cache_info().misses == 0;"
        "assert not any(m.endswith(('.qwen', '.llama', '.deepseek')) for m in families), families;"
        "areal_like.spec.ModelSpec.find('zai-org/GLM-4.5');"
        "assert 'areal_like.spec.families.glm' in sys.modules and 'areal_like.spec.families.qwen' not in sys.modules;"
        "heavy = {'torch', 'numpy', 'pydantic', 'yaml', 'lark', 'transformers'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

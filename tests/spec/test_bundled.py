"""The bundled models: their parameters against Transformers and against what their publishers state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import areal_like.spec.bundled as bundled
from areal_like.spec import SUPPORTED_ARCHITECTURES, ModelSpec, ModelSpecError, bundled_names
from areal_like.spec.families import KNOWN_ARCHITECTURES

FILES = sorted(p for p in Path(bundled.__file__).parent.glob("*.json") if p.name != "index.json")
ENTRIES = {e["names"][0]: e for p in FILES for e in json.loads(p.read_text())["models"]}

PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Meta-Llama-3-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480_154_875_392,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "deepseek-ai/DeepSeek-V2": 235_741_434_880,
    "deepseek-ai/DeepSeek-V3": 684_531_386_000,
    "deepseek-ai/DeepSeek-R1": 684_531_386_000,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
    "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "mistralai/Mixtral-8x22B-Instruct-v0.1": 140_630_071_296,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-270m": 268_098_176,
    "google/gemma-3-1b-pt": 999_885_952,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/Phi-3-medium-4k-instruct": 13_960_238_080,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "MiniMaxAI/MiniMax-Text-01": 456_089_655_296,
    "MiniMaxAI/MiniMax-M2": 228_689_764_864,
    "zai-org/GLM-4.5-Air": 110_468_824_832,
    "zai-org/GLM-4.5": 358_337_791_296,
    "allenai/OLMo-2-0425-1B": 1_484_916_736,
    "allenai/OLMo-2-0325-32B": 32_234_279_936,
}
"""Totals of the checkpoints as the Hub shows them; for those with extra tensors see `EXTRAS`."""

WITH_TOWER = {
    # Totals with the vision tower, and what decides the size of that.
    "Qwen/Qwen3.5-0.8B": (852_985_920, {"depth": 12, "hidden_size": 768, "intermediate_size": 3072}),
    "Qwen/Qwen3.5-2B": (2_213_241_664, {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096}),
    "Qwen/Qwen3.5-4B": (4_539_265_536, {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096}),
    "Qwen/Qwen3.5-9B": (9_409_813_744, {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304}),
    "Qwen/Qwen3.5-27B": (27_356_728_560, {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304}),
    "Qwen/Qwen3.5-35B-A3B": (35_107_181_936, {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304}),
    "google/gemma-3-4b-pt": (4_300_079_472, {}),
    "google/gemma-3-12b-pt": (12_187_325_040, {}),
    "google/gemma-3-27b-pt": (27_432_406_640, {}),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": (24_011_361_280, {}),
}
SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16} | {
    "image_size": 896,
    "patch_size": 14,
    "vision_use_head": False,
}

ROUNDED = {
    # What the model cards state in billions, where no exact total of these tensors is published.
    "meta-llama/Llama-3.1-70B": (70.6, 0.1),
    "Qwen/Qwen2-57B-A14B": (57.4, 0.1),
    "Qwen/Qwen3.5-122B-A10B": (122, 0.5),
    "Qwen/Qwen3.5-397B-A17B": (397, 1),
    "moonshotai/Kimi-K2-Instruct": (1026.408, 0.001),
    "allenai/OLMo-2-1124-7B": (7.3, 0.01),
    "allenai/OLMo-2-1124-13B": (13.7, 0.05),
}


def on_meta(config: dict) -> torch.nn.Module:
    """The model of Transformers without storage. Positions have no parameters, and a reduced scaling is not valid."""
    arguments = {key: value for key, value in config.items() if key not in ("rope_scaling", "model_type")}
    # Transformers builds Kimi-K2 as DeepSeek-V3, which its files also name as their class.
    kind = {"kimi_k2": "deepseek_v3"}.get(config["model_type"], config["model_type"])
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **arguments))


@pytest.mark.parametrize("name", ENTRIES)
def test_parameters_are_those_of_transformers(name):
    spec, model = ModelSpec.bundled(name), on_meta(ENTRIES[name]["config"])
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    assert [spec.layer_parameters(layer) for layer in range(spec.num_layers)] == layers
    assert spec.parameters() == sum(p.numel() for p in model.parameters())
    corrections = [b.numel() for key, b in model.named_buffers() if key.endswith("e_score_correction_bias")]
    assert spec.buffers() == sum(corrections)


def prediction_module(spec: ModelSpec) -> int:
    """A layer for multi-token prediction (arXiv:2412.19437, 2.2) as stored: with three norms and a projection of two
    hidden states to one, its own correction bias, and copies of both embeddings."""
    own = 3 * spec.hidden_size + 2 * spec.hidden_size**2 + spec.num_experts
    return spec.layer_parameters() + own + 2 * spec.vocab_size * spec.hidden_size


def scales_of_v3(spec: ModelSpec) -> int:
    """One scale for each 128 x 128 block of an FP8 matrix; every matrix of a layer but the router's is in FP8."""

    def blocks(rows: int, columns: int) -> int:
        return -(-rows // 128) * -(-columns // 128)

    latent, hidden, heads = spec.latent_attention, spec.hidden_size, spec.num_attention_heads
    attention = blocks(latent.q_lora_rank, hidden) + blocks(heads * spec.head_dim, latent.q_lora_rank)
    attention += blocks(latent.kv_lora_rank + latent.qk_rope_head_dim, hidden) + blocks(hidden, heads * 128)
    attention += blocks(heads * 256, latent.kv_lora_rank)
    dense = 3 * blocks(spec.intermediate_size, hidden)
    experts = (spec.num_experts + 1) * 3 * blocks(spec.moe_intermediate_size, hidden)
    layers = spec.num_layers + spec.mtp_layers
    return layers * attention + len(spec.dense_layers) * dense + (layers - len(spec.dense_layers)) * experts


EXTRAS = {
    "deepseek-ai/DeepSeek-V3": lambda spec: prediction_module(spec) + scales_of_v3(spec),
    "deepseek-ai/DeepSeek-R1": lambda spec: prediction_module(spec) + scales_of_v3(spec),
    "zai-org/GLM-4.5-Air": prediction_module,
    "zai-org/GLM-4.5": prediction_module,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_are_the_published_ones(name):
    spec = ModelSpec.bundled(name)
    extras = EXTRAS[name](spec) if name in EXTRAS else 0
    assert spec.parameters() + spec.buffers() + extras == PUBLISHED[name]


@pytest.mark.parametrize("name", WITH_TOWER)
def test_the_text_part_of_a_multimodal_model(name):
    spec, (total, tower) = ModelSpec.bundled(name), WITH_TOWER[name]
    (config,) = [e["config"] for e in ENTRIES.values() if name in e["names"]]
    text = {key: value for key, value in config.items() if key != "rope_scaling"}
    kind = {"mistral": "mistral3", "gemma3_text": "gemma3"}.get(spec.architecture) or spec.architecture[:-5]
    if kind == "mistral3":
        config = AutoConfig.for_model(kind, text_config=text, tie_word_embeddings=False)
    elif kind == "gemma3":
        config = AutoConfig.for_model(kind, text_config=text, vision_config=SIGLIP)
    else:
        vision = tower | {"out_hidden_size": spec.hidden_size}
        tied = spec.tied_embeddings
        config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == total
    head = 0 if spec.tied_embeddings else model.lm_head.weight.numel()
    assert sum(p.numel() for p in model.model.language_model.parameters()) + head == spec.parameters()


@pytest.mark.parametrize("name", ROUNDED)
def test_totals_round_to_the_published_ones(name):
    billions, tolerance = ROUNDED[name]
    assert ModelSpec.bundled(name).parameters() / 1e9 == pytest.approx(billions, abs=tolerance)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        # Active parameters a token as the model cards state them.
        ("Qwen/Qwen3-30B-A3B", 3.3),
        ("Qwen/Qwen3-235B-A22B", 22),
        ("deepseek-ai/DeepSeek-V2-Lite", 2.4),
        ("deepseek-ai/DeepSeek-V2", 21),
        ("deepseek-ai/DeepSeek-V3", 37),
        ("moonshotai/Kimi-K2-Instruct", 32),
        ("zai-org/GLM-4.5-Air", 12),
        ("zai-org/GLM-4.5", 32),
        ("mistralai/Mixtral-8x7B-v0.1", 12.9),
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", 39),
        ("openai/gpt-oss-20b", 3.6),
        ("openai/gpt-oss-120b", 5.1),
        ("MiniMaxAI/MiniMax-Text-01", 45.9),
        ("MiniMaxAI/MiniMax-M2", 10),
        ("Qwen/Qwen3.5-35B-A3B", 3),
        ("Qwen/Qwen3.5-397B-A17B", 17),
    ],
)
def test_only_the_chosen_experts_compute(name, billions):
    """Two operations a weight; publishers differ in whether embeddings, read but not multiplied, are counted."""
    spec = ModelSpec.bundled(name)
    weights = (sum(spec.layer_flops(0, layer) for layer in range(spec.num_layers)) + spec.head_flops()) / 2
    embeddings = spec.vocab_size * spec.hidden_size
    assert (weights - embeddings) * 0.97 < billions * 1e9 < (weights + embeddings) * 1.03


def test_the_index_names_every_model_once():
    names = [name for entry in ENTRIES.values() for name in entry["names"]]
    assert sorted(names) == list(bundled_names()) == sorted(set(names))
    index = {name: p.name for p in FILES for e in json.loads(p.read_text())["models"] for name in e["names"]}
    assert all(bundled.file_of(name) == file for name, file in index.items())


def test_what_is_bundled():
    assert len(ENTRIES) >= 40
    assert {e["config"]["model_type"] for e in ENTRIES.values()} <= set(KNOWN_ARCHITECTURES)
    for name in bundled_names():
        spec = ModelSpec.bundled(name)
        assert spec.published_name == ("HuggingFaceTB/SmolLM2-135M" if name.startswith("demo:") else name)
        assert spec.max_position_embeddings > 0 and spec.vocab_size % 64 == 0
        if spec.architecture in SUPPORTED_ARCHITECTURES:
            assert spec.unsupported == (), name
    assert ModelSpec.bundled("Qwen/Qwen3.5-27B").unsupported[-1] == "a vision tower beside the text model"


def test_one_name_reads_its_family_alone():
    bundled._models.cache_clear()
    ModelSpec.find("openai/gpt-oss-20b")
    ModelSpec.find("OpenAI/GPT-OSS-120B")
    assert bundled._models.cache_info().misses <= 1


def test_a_model_is_found_by_name_folder_or_file(tmp_path):
    qwen = ModelSpec.bundled("Qwen/Qwen3-30B-A3B")
    assert ModelSpec.find("Qwen/Qwen3-30B-A3B") == qwen
    assert ModelSpec.find("Qwen3-30B-A3B") == ModelSpec.find("qwen3-30b-a3b") == qwen
    assert ModelSpec.find("qwen3-30b-a3b").published_name == "Qwen/Qwen3-30B-A3B"
    (tmp_path / "config.json").write_text(json.dumps(ENTRIES["Qwen/Qwen3-30B-A3B"]["config"]))
    assert ModelSpec.find(tmp_path) == ModelSpec.find(str(tmp_path / "config.json")) == qwen
    assert ModelSpec.find(tmp_path).published_name == ""


def test_a_folder_with_a_short_name_is_read_as_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen3-8B").mkdir()
    (tmp_path / "Qwen3-8B" / "config.json").write_text(json.dumps(ENTRIES["Qwen/Qwen3-0.6B"]["config"]))
    assert ModelSpec.find("Qwen3-8B").num_layers == 28


@pytest.mark.parametrize(
    ("name", "closest"),
    [("Qwen/Qwen3-30B-A3", "Qwen/Qwen3-30B-A3B"), ("llama-3.1-8b-instrct", "meta-llama/Llama-3.1-8B-Instruct")],
)
def test_an_unknown_model_comes_with_the_closest_names(name, closest):
    with pytest.raises(ModelSpecError, match=f"'{name}' is neither a bundled model nor") as error:
        ModelSpec.find(name)
    assert closest in str(error.value)


def test_a_model_unlike_any_comes_without_guesses():
    with pytest.raises(ModelSpecError, match=r"its config\.json$"):
        ModelSpec.find("/no/such/thing")

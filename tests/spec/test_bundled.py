"""The bundled models: their parameters against Transformers and against what their publishers state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import areal_like.spec.bundled as bundled
from areal_like.spec import SUPPORTED_ARCHITECTURES, ModelSpec, ModelSpecError, bundled_names
from areal_like.spec.families import KNOWN_ARCHITECTURES

FILES = sorted(p for p in Path(bundled.__file__).parent.glob("*.json") if p.name != "index.json")
ENTRIES = {e["names"][0]: e for p in FILES for e in json.loads(p.read_text())["models"]}

PUBLISHED = {
    # Totals of the checkpoints as the Hub shows them beside the model card.
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
    "Qwen/Qwen3.5-35B-A3B": 34_660_610_688,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "deepseek-ai/DeepSeek-V2": 235_741_434_880,
    "deepseek-ai/DeepSeek-V3": 671_026_419_200,
    "deepseek-ai/DeepSeek-R1": 671_026_419_200,
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
}
"""Numbers of the model's own tensors: with the routers' correction biases, without multi-token prediction."""

ROUNDED = {
    # What the model cards state in billions, where no exact total of these tensors is published.
    "meta-llama/Llama-3.1-70B": (70.6, 0.1),
    "Qwen/Qwen2-57B-A14B": (57.4, 0.1),
    "Qwen/Qwen3.5-27B": (27, 0.5),
    "Qwen/Qwen3.5-122B-A10B": (122, 0.5),
    "Qwen/Qwen3.5-397B-A17B": (397, 1),
    "google/gemma-3-4b-pt": (3.88, 0.01),
    "google/gemma-3-12b-pt": (11.77, 0.01),
    "google/gemma-3-27b-pt": (27.01, 0.01),
    "moonshotai/Kimi-K2-Instruct": (1026, 1),
    "zai-org/GLM-4.5-Air": (106, 1),
    "zai-org/GLM-4.5": (355, 3),
    "MiniMaxAI/MiniMax-M2": (229, 0.5),
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


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_are_the_published_ones(name):
    spec = ModelSpec.bundled(name)
    assert spec.parameters() + spec.buffers() == PUBLISHED[name]


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

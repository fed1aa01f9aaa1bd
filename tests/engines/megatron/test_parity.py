"""Every layout beside Transformers and torch's AdamW: logits, exported weights, and three optimizer steps.

`run_trial` makes unequal sequences, packs them under a token budget and compares within 1e-4 (float32).
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from areal_like.alloc import DiagnosticError
from areal_like.config import OptimizerConfig
from areal_like.runtime.local import WorkerGroup
from areal_like.trainers import trial
from areal_like.trainers.trial import run_trial

slow = pytest.mark.slow

LAYOUTS = [
    # those that issue 2 names
    ("megatron:d2", "tiny-dense"),
    ("megatron:t2", "tiny-dense"),
    ("megatron:p2", "tiny-dense"),
    pytest.param("megatron:d2t2", "tiny-dense", marks=slow),
    pytest.param("megatron:p2t2", "tiny-dense", marks=slow),
    pytest.param("megatron:d2e2", "tiny-moe", marks=slow),
    pytest.param("megatron:(attn:d1t2|ffn:e2)", "tiny-moe", marks=slow),  # through the other bridge in every run
    ("megatron:(attn:d1p2t2|ffn:e2)", "tiny-moe"),
    pytest.param("megatron:(attn:d1t2|ffn:t2)", "tiny-moe", marks=slow),
    # virtual stages, context parallelism
    ("megatron:p2v2", "tiny-dense"),
    ("megatron:c2", "tiny-dense"),
    pytest.param("megatron:(attn:c2t2|ffn:e2t2)", "tiny-moe", marks=slow),
    # and others
    pytest.param("megatron:p2c2v2", "tiny-dense", marks=slow),
    pytest.param("megatron:t2p2v2", "tiny-dense", marks=slow),
    pytest.param("megatron:p2v3", "tiny-moe", marks=slow),
    pytest.param("megatron:d2c2", "tiny-moe", marks=slow),
    pytest.param("megatron:d1c4", "tiny-dense", marks=slow),
    pytest.param("megatron:(attn:p2c2t2v2|ffn:p2e2t2)", "tiny-moe", marks=slow),
    pytest.param("megatron:d1", "tiny-dense", marks=slow),
    pytest.param("megatron:d1", "tiny-moe", marks=slow),
    pytest.param("megatron:(attn:d2|ffn:t2)", "tiny-moe", marks=slow),
    pytest.param("megatron:(attn:d2t2|ffn:e2t2)", "tiny-moe", marks=slow),
    pytest.param("megatron:d1p3", "tiny-dense", marks=slow),
    pytest.param("megatron:d1t3", "tiny-dense", marks=slow),
    pytest.param("megatron:d2p2", "tiny-moe", marks=slow),
]

FAST_TOO = [("megatron:(attn:d1t2|ffn:e2)", "tiny-moe")]
"""Of the layouts above, those that are tried with megatron-bridge every time."""


def assert_parity(report, world_size):
    assert report.passed, "\n" + report.render()
    assert report.world_size == world_size and report.device == "cpu" and len(report.steps) == 3
    assert report.exported_tensors > 20 and report.export_differs == []
    assert all(s.micro_batches > 1 for s in report.steps), "packing was exercised"
    assert report.tolerance.logits == report.tolerance.loss == report.tolerance.weights == 1e-4
    assert len({s.loss for s in report.steps}) == 3 and all(s.grad_norm > 1 for s in report.steps), "it clipped"


@pytest.mark.parametrize(("text", "model"), LAYOUTS)
def test_layout(text, model):
    assert_parity(run_trial(text, model=model, device="cpu"), trial._allocation(text).world_size)


@pytest.mark.parametrize(
    ("text", "model"),
    [
        pytest.param(*values, marks=[] if values in FAST_TOO else slow)
        for values in (tuple(getattr(layout, "values", layout)) for layout in LAYOUTS)
    ],
)
def test_layout_through_megatron_bridge(text, model):
    report = run_trial(text, model=model, bridge="megatron-bridge", device="cpu")
    assert_parity(report, trial._allocation(text).world_size)
    assert "through megatron-bridge" in report.render()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        pytest.param("llama3-scaled", "megatron:t2", marks=slow),
        pytest.param("llama-linear", "megatron:p2", marks=slow),
        pytest.param("llama-tied", "megatron:p2", marks=slow),
        pytest.param("qwen2", "megatron:t2", marks=slow),
    ],
)
def test_a_folder_of_another_architecture_through_megatron_bridge(models, kind, text):
    assert_parity(run_trial(text, model=str(models(kind)), bridge="megatron-bridge", device="cpu"), 2)


@pytest.mark.parametrize(
    ("kind", "text", "world_size"),
    [
        ("llama-tied", "megatron:p2", 2),
        pytest.param("qwen2", "megatron:t2", 2, marks=slow),
        pytest.param("qwen2", "megatron:p2t2", 4, marks=slow),
        pytest.param("llama-tied", "megatron:t2", 2, marks=slow),
        pytest.param("qwen3-moe", "megatron:d2e2", 2, marks=slow),
    ],
)
def test_a_folder_of_another_architecture(models, kind, text, world_size):
    """Llama with tied embeddings on the first and last stage; Qwen2 with its biases."""
    assert_parity(run_trial(text, model=str(models(kind)), device="cpu"), world_size)


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=slow), pytest.param("float16", marks=slow)])
def test_16_bits_on_the_cpu(dtype):
    report = run_trial("megatron:d2", dtype=dtype, device="cpu")
    assert report.passed, "\n" + report.render()
    assert report.dtype == dtype and report.tolerance.loss < 0.02


# A trial has to be able to fail


def test_other_weights_fail_the_trial(models, monkeypatch):
    """The reference reads one weight a little differently: the export is not bit-equal, the logits differ."""
    name = "model.layers.1.mlp.down_proj.weight"

    class Other(trial.ReferenceModel):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            parameter = dict(self.model.named_parameters())[name]
            with torch.no_grad():
                parameter.mul_(1.01)
                self.master[name].copy_(parameter)

    monkeypatch.setattr(trial, "ReferenceModel", Other)
    report = run_trial("megatron:d1", model=str(models("qwen3")), steps=1, device="cpu")
    assert not report.passed
    assert report.export_differs == [name]
    assert report.failures[0] == f"exported weights are not bit-equal: {name}"
    assert "step 1: logits differ by" in report.failures[1]
    assert "FAIL" in report.render() and "PASS" not in report.render() and "1 differ" in report.render()


def test_another_optimizer_fails_the_trial(models, monkeypatch):
    """The reference has another learning rate: the first loss agrees, the weights after it do not."""

    class Other(trial.ReferenceModel):
        def __init__(self, path, optimizer: OptimizerConfig, **kwargs):
            super().__init__(path, optimizer.model_copy(update={"lr": 2 * optimizer.lr}), **kwargs)

    monkeypatch.setattr(trial, "ReferenceModel", Other)
    report = run_trial("megatron:d1", model=str(models("qwen3")), steps=2, device="cpu")
    assert not report.passed and report.export_differs == []
    assert [f.split(" differ")[0] for f in report.failures if f.startswith("step 1")] == ["step 1: weights"]
    assert any(f.startswith("step 2: loss differ by") for f in report.failures)


@pytest.mark.parametrize(
    ("text", "model", "words"),
    [
        ("megatron:d1t2", "demo:smollm2-135m-instruct", ["AL303", "9 attention heads do not divide by t2"]),
        ("huggingface:d1", "tiny-dense", ["AL207", "trains"]),
        ("megatorn:d1", "tiny-dense", ["AL201", "megatron"]),
        ("fsdp:d2", "tiny-dense", ["AL205"]),
        ("megatron:d2e2", "tiny-dense", ["AL307", "no experts"]),
        ("megatron:v2", "tiny-dense", ["AL105"]),
        ("megatron:d1", "/nowhere/model", ["AL391", "/nowhere/model"]),
        ("megatron:d1", "llama3-scaled", ["AL302", "bridge_type mbridge", "use megatron-bridge"]),
    ],
)
def test_what_cannot_be_tried_is_said_before_a_process_starts(models, monkeypatch, text, model, words):
    monkeypatch.setattr(WorkerGroup, "start", lambda *a, **k: pytest.fail("processes were started"))
    if model.startswith("demo:"):  # the numbers are enough: the conversion is not needed here
        monkeypatch.setattr(trial, "resolve_model", lambda path: _demo_numbers(models))
    if model == "llama3-scaled":
        model = str(models(model))
    with pytest.raises(DiagnosticError) as raised:
        run_trial(text, model=model, device="cpu")
    for word in words:
        assert word in str(raised.value)


def _demo_numbers(models):
    from transformers import LlamaConfig

    folder = models("qwen3").parent / "demo-numbers"
    LlamaConfig(
        hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536, num_hidden_layers=30
    ).save_pretrained(folder)
    return folder


def test_more_ranks_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DiagnosticError, match="the layout has 2 ranks but this machine has 1 GPUs"):
        run_trial("megatron:d2", device="cuda")
    assert trial._device("auto", 2) == "cpu" and trial._device("auto", 1) == "cuda"


def test_the_fixture_models_have_no_trivial_norms(models):
    """Mixed-up norms would not show if all of them were 1."""
    for kind in ("llama-tied", "qwen2", "qwen3", "qwen3-moe"):
        for name, tensor in load_file(models(kind) / "model.safetensors").items():
            assert tensor.ndim > 1 or tensor.std() > 0.05, (kind, name)

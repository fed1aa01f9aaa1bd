"""The precision-aware optimizer beside the ordinary one, on one GPU.

`python -m pytest -m gpu tests/engines/megatron/test_optimizer_gpu.py`
"""

from __future__ import annotations

import optimizer_views
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from areal_like.algorithms.sft import SFTLoss
from areal_like.engines.megatron.precision_aware import main_copy
from areal_like.runtime.determinism import deterministic_environment
from areal_like.runtime.local import WorkerGroup

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

LENGTHS = [90, 5, 17, 2, 31, 44, 8]
AWARE = {"use_precision_aware_optimizer": True}
BFLOAT16 = AWARE | {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
STEPS = 3
RATE = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("optimizer-gpu")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def gpu():
    environment = deterministic_environment()  # the same batch twice is to have the same gradients
    with WorkerGroup.start("engine", "megatron_hosts:EngineHost", {}, 1, "cuda", environment=environment) as group:
        yield group


@pytest.fixture
def engine(gpu, folder, helpers):
    def build(megatron=None, **changes):
        optimizer = {"lr": RATE, "beta2": 0.95} | changes.pop("optimizer", {})
        megatron = {"use_deterministic_algorithms": True} | (megatron or {})
        changes = {"dtype": "bfloat16", "optimizer": optimizer} | changes
        section = helpers.engine_config("megatron:d1", folder, megatron=megatron, **changes)
        gpu.call("build", "megatron:d1", section, device="cuda")

        def train(steps=STEPS, first=0):
            batches = [helpers.random_batch(LENGTHS, seed) for seed in range(first, first + steps)]
            return [gpu.call("do", "train_batch", batch, SFTLoss())[0] for batch in batches]

        return train

    return build


def values(gpu):
    return gpu.call("ask", optimizer_views.optimizer_values)[0]


def bytes_a_parameter(gpu):
    size, elements = gpu.call("ask", optimizer_views.state_bytes)[0]
    return size / elements


def bits(tensor):
    return tensor.view(torch.int32).long()


def test_remainders_give_the_step_of_the_ordinary_optimizer(gpu, engine):
    """The two kernels do the same float32 arithmetic, up to which products and sums the compiler contracts. A parameter
    differs where its copy lies exactly between two, about one in 2^17: from the second step on the gradients do too."""
    (ordinary,) = engine()(1)
    theirs = values(gpu)
    assert bytes_a_parameter(gpu) == 12
    (aware,) = engine(AWARE)(1)
    ours = values(gpu)
    assert bytes_a_parameter(gpu) == 10
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if name.endswith("parameter"):
            assert (value != theirs[name]).float().mean() < 1e-3, name
        else:
            assert torch.allclose(value, theirs[name], rtol=1e-5, atol=1e-6 * RATE), name
    assert aware["loss"] == ordinary["loss"] and aware["grad_norm"] == pytest.approx(ordinary["grad_norm"], rel=1e-6)


def test_three_steps_with_each_kind_of_moments(gpu, engine):
    """An update is about the learning rate. Rounding its two factors to 8 bits changes it by less than 1 %, and the
    gradients of the next steps by what bfloat16 parameters differ."""
    ordinary = engine()()
    theirs = values(gpu)
    copies = [name for name in theirs if name.endswith("fp32_param")]
    for megatron, size in ((AWARE, 10), (BFLOAT16, 6)):
        aware = engine(megatron)()
        ours = values(gpu)
        assert bytes_a_parameter(gpu) == size and all(f["updated"] for f in aware)
        differences = torch.cat([(ours[n] - theirs[n]).abs() for n in copies])
        assert 0.0 < float(differences.mean()) < 0.05 * RATE
        assert aware[-1]["loss"] == pytest.approx(ordinary[-1]["loss"], rel=2e-3)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_kernel_beside_torch(kind):
    """FusedAdam with the engine's settings, and torch's AdamW on float32 parameters, with the same gradients."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    torch.manual_seed(0)
    start = torch.randn(5000, device="cuda").bfloat16()
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    reduced = {"master_weights": True, "use_decoupled_grad": True, "store_param_remainders": True}
    fused = FusedAdam([ours], **options, **reduced, exp_avg_dtype=kind, exp_avg_sq_dtype=kind)
    whole = torch.nn.Parameter(start.float())
    plain = FusedAdam([whole], **options)
    reference = torch.optim.AdamW([theirs], **options)
    for _ in range(5):
        gradient = torch.randn(5000, device="cuda")
        ours.decoupled_grad, theirs.grad, whole.grad = gradient, gradient.clone(), gradient.clone()
        for optimizer in (fused, reference, plain):
            optimizer.step()
    copy = main_copy(ours, fused.state[ours]["master_param"])
    assert (fused.state[ours]["master_param"] != 0).any()
    if kind is torch.float32:  # the ordinary optimizer, whose kernel has float32 parameters
        assert int((bits(copy) - bits(whole.detach())).abs().max()) <= 4
    tolerance = 1e-7 if kind is torch.float32 else 5e-5
    assert torch.allclose(copy, theirs, rtol=1e-6, atol=tolerance)
    assert (ours.float() - copy).abs().le(2**-8 * copy.abs()).all()


def test_loaded_weights_replace_the_copies(gpu, engine, folder):
    """Megatron-Core leaves them: the next step would go on from the old remainders."""
    train = engine(AWARE)
    train()
    before = values(gpu)
    names = [name.removesuffix(".parameter") for name in before if name.endswith(".parameter")]
    assert any(not torch.equal(before[f"{n}.fp32_param"], before[f"{n}.parameter"]) for n in names)
    gpu.call("do", "load", folder)
    after = values(gpu)
    for name in names:
        assert torch.equal(after[f"{name}.fp32_param"], after[f"{name}.parameter"])
    assert any(not torch.equal(before[f"{n}.parameter"], after[f"{n}.parameter"]) for n in names)


@pytest.mark.parametrize(
    ("saved", "resumed"), [(AWARE, AWARE), (BFLOAT16, BFLOAT16), ({}, AWARE), (AWARE, {}), (BFLOAT16, {})]
)
def test_checkpoints_fit_either_optimizer(gpu, engine, tmp_path, saved, resumed):
    train = engine(saved)
    train()
    gpu.call("do", "save_checkpoint", tmp_path / "step", step=STEPS)
    gpu.call("do", "finish_checkpoint")
    before = values(gpu)
    expected = train(2, first=STEPS)
    train = engine(resumed)
    train(1, first=9)
    assert gpu.call("do", "load_checkpoint", tmp_path / "step") == [STEPS]
    after = values(gpu)
    for name, value in before.items():
        ties = 1 if (saved, resumed) == ({}, AWARE) else 0  # rounded to even: no remainder says it, off by one bit
        assert int((bits(value) - bits(after[name])).abs().max()) <= ties, name
    went_on = train(2, first=STEPS)
    if saved == resumed:
        assert went_on == expected
    assert went_on[1]["loss"] == pytest.approx(expected[1]["loss"], rel=2e-3)


def test_offload_brings_every_bit_back(gpu, engine):
    train = engine(BFLOAT16)
    train()
    before = values(gpu)
    (freed,) = gpu.call("do", "offload")
    elements = sum(v.numel() for n, v in before.items() if n.endswith(".parameter"))
    assert 6 * elements <= freed["optimizer"] < 6.2 * elements
    gpu.call("do", "onload")
    after = values(gpu)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(figures["updated"] for figures in train(1))


def test_gradients_in_16_bits_are_read_as_they_are(gpu, engine):
    plain = engine(AWARE)()
    half = engine(AWARE | {"main_grads_dtype": "bfloat16"}, ddp={"grad_reduce_in_fp32": False})()
    assert half[0]["grad_norm"] == pytest.approx(plain[0]["grad_norm"], rel=2e-2)
    assert half[-1]["loss"] == pytest.approx(plain[-1]["loss"], rel=2e-2)
    clipped = engine(
        AWARE, ddp={"grad_reduce_in_fp32": False}, optimizer={"gradient_clipping": 1e-6, "eps": 1e-3, "lr": RATE}
    )
    clipped(1)
    moved = values(gpu)
    moments = torch.cat([v for n, v in moved.items() if n.endswith("exp_avg")])
    assert float(moments.norm()) == pytest.approx(0.1 * 1e-6, rel=5e-2)  # (1 - beta1) times the clipped gradient


@pytest.mark.parametrize("kind", ["adapters", "fp8 products"])
def test_adapters_and_fp8_products(gpu, engine, kind):
    if kind == "adapters":
        train = engine(AWARE | {"bridge_type": "megatron-bridge"}, use_lora=True, lora_rank=4)
    else:
        train = engine(AWARE | {"fp8_config": {"recipe": "tensorwise"}})
    figures = train(1) + train(1)  # of one batch
    assert figures[1]["loss"] < figures[0]["loss"] and all(f["updated"] for f in figures)
    assert bytes_a_parameter(gpu) == 10

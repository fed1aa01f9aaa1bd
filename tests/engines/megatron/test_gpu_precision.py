"""FP8 and deterministic mode on a GPU: `python -m pytest -m gpu tests/engines/megatron/test_gpu_precision.py`.

All runs start beside each other, each in a process of its own; the tests look at what they told.
"""

from __future__ import annotations

import concurrent.futures
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).parent))

from areal_like.config import FP8Config, MegatronConfig, MicroBatchConfig, OptimizerConfig, TrainEngineConfig
from areal_like.runtime.determinism import deterministic_environment
from areal_like.runtime.local import WorkerGroup
from areal_like.trainers.trial import run_trial

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
FP8 = {
    f"{recipe}{'-param' if param else ''}": {"recipe": recipe, "param": param}
    for recipe in ("tensorwise", "blockwise", "delayed")
    for param in (False, True)
}
FP8["outer"] = {"recipe": "tensorwise", "param": True, "first_last_layers_bf16": True}
MOE_FP8 = {"moe-tensorwise": {"recipe": "tensorwise"}, "moe-blockwise-param": {"recipe": "blockwise", "param": True}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("gpu")
    torch.manual_seed(0)
    small = {**SIZES, "hidden_size": 512, "num_hidden_layers": 4}
    configs = {
        "dense": Qwen3Config(**SIZES, tie_word_embeddings=True),
        "moe": Qwen3MoeConfig(**small, **EXPERTS, tie_word_embeddings=False),
    }
    for name, config in configs.items():
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(root / name)
    return {name: str(root / name) for name in configs}


def section(folder, *, fp8=None, deterministic=False, dtype="bfloat16", bridge="mbridge"):
    return TrainEngineConfig(
        backend="megatron:d1",
        path=folder,
        dtype=dtype,
        disable_dropout=True,
        mb_spec=MicroBatchConfig(max_tokens_per_mb=1024),
        optimizer=OptimizerConfig(lr=1e-4, warmup_steps_proportion=0.0),
        megatron=MegatronConfig(
            bridge_type=bridge,
            fp8_config=None if fp8 is None else FP8Config(**fp8),
            use_deterministic_algorithms=deterministic,
        ),
    )


def start(config):
    deterministic = config.megatron.use_deterministic_algorithms
    environment = deterministic_environment() if deterministic else None
    return WorkerGroup.start("gpu", "gpu_hosts:GpuHost", {"config": config}, 1, "cuda", 2, environment=environment)


def fp8_run(folder, fp8, scratch, bridge="mbridge"):
    with start(section(folder, fp8=fp8, bridge=bridge)) as group:

        def ask(method, *arguments):
            return group.call(method, *arguments)[0]

        told = {
            "kinds": ask("kinds"),
            "exported": ask("differing_weights", folder),
            "distance": ask("largest_relative_difference", folder),
            "main": ask("differing_main_weights", folder),
            "lengths": ask("micro_batch_lengths"),
            "steps": ask("train", 20),
            "saved": ask("save", scratch),
            "offload": ask("attempt", "away_and_back"),
            "resumed": ask("attempt", "resume", f"{scratch}-recovery"),
        }
        ask("load", folder)
        told |= {"main after load": ask("differing_main_weights", folder), "steps after load": ask("train", 1)}
        return told


def deterministic_run(folder, fp8=None):
    with start(section(folder, fp8=fp8, deterministic=True)) as group:
        attention, environment = group.call("core_attention")[0], group.call("environment")[0]
        return attention, environment, group.call("train", 10)[0], group.call("digest")[0]


def packings_run(folder, dtype):
    """Log-probabilities of the same sequences packed in two orders, and the largest difference."""
    with start(section(folder, deterministic=True, dtype=dtype)) as group:
        orders = [list(range(10)), list(reversed(range(10)))]
        first, second = (torch.cat(group.call("log_probs", order)[0]) for order in orders)
    return first, float((first - second).abs().max()), float((first - second).abs().mean())


@pytest.fixture(scope="module")
def runs(folders, tmp_path_factory):
    """Every run of this file, by name; started eight at a time."""
    scratch = tmp_path_factory.mktemp("saved")
    jobs = {"bf16": (fp8_run, folders["dense"], None, scratch / "bf16")}
    jobs |= {n: (fp8_run, folders["dense"], options, scratch / n) for n, options in FP8.items()}
    jobs |= {n: (fp8_run, folders["moe"], options, scratch / n) for n, options in {"moe": None, **MOE_FP8}.items()}
    jobs["bridge"] = (fp8_run, folders["dense"], FP8["tensorwise-param"], scratch / "bridge", "megatron-bridge")
    for again in (1, 2):
        jobs |= {f"repeat {kind} {again}": (deterministic_run, folders[kind]) for kind in ("dense", "moe")}
        jobs[f"repeat fp8 {again}"] = (deterministic_run, folders["dense"], {"recipe": "tensorwise"})
    jobs |= {f"packings {dtype}": (packings_run, folders["dense"], dtype) for dtype in ("float32", "bfloat16")}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        futures = {name: pool.submit(job[0], *map(_text, job[1:])) for name, job in jobs.items()}
        results = {name: future.result() for name, future in futures.items()}
    print("\n" + _table(results))
    return results


def _text(argument):
    return str(argument) if isinstance(argument, Path) else argument


def _table(results):
    """Loss of every fifth step: with -s, for docs/megatron.md."""
    rows = [f"{'run':<22} step 1   step 5   step 10  step 15  step 20   largest |dloss|/loss"]
    for name, told in results.items():
        if isinstance(told, dict):
            reference = results["moe" if name.startswith("moe") else "bf16"]["steps"]
            losses = [told["steps"][i][0] for i in (0, 4, 9, 14, 19)]
            largest = max(abs(a[0] - b[0]) / b[0] for a, b in zip(told["steps"], reference, strict=True))
            rows.append(f"{name:<22} " + "   ".join(f"{x:.4f}" for x in losses) + f"   {largest:.1e}")
    rows += [f"{n}: largest {r[1]:.2e}, mean {r[2]:.2e}" for n, r in results.items() if n.startswith("packings")]
    return "\n".join(rows)


@pytest.mark.parametrize("name", [*FP8, *MOE_FP8, "bridge"])
def test_twenty_steps_beside_bfloat16(runs, name):
    """e4m3 has 4 significant bits: a product differs by about 2**-5 at each weight, independently, so by much less in
    sum. Delayed scaling starts with scales of 1 and is the farthest."""
    ours, theirs = runs[name]["steps"], runs["moe" if name.startswith("moe") else "bf16"]["steps"]
    losses = [abs(a[0] - b[0]) / b[0] for a, b in zip(ours, theirs, strict=True)]
    assert losses[0] < 2e-3 and max(losses) < 5e-2
    assert max(losses) > 1e-6, "it computed in bfloat16"
    assert abs(ours[0][1] - theirs[0][1]) / theirs[0][1] < 1e-1
    assert ours[-1][0] < 0.95 * ours[0][0] and abs(ours[-1][0] - theirs[-1][0]) / theirs[-1][0] < 3e-2


@pytest.mark.parametrize("name", ["bf16", "moe", *(n for n, o in (FP8 | MOE_FP8).items() if not o.get("param"))])
def test_bfloat16_weights_are_those_of_the_checkpoint(runs, name):
    told = runs[name]
    assert set(told["kinds"]) == {"plain"} and told["exported"] == [] and told["main"] == []
    assert told["main after load"] == [] and told["saved"] == []


@pytest.mark.parametrize("name", ["bridge", *(n for n, o in (FP8 | MOE_FP8).items() if o.get("param"))])
def test_fp8_weights(runs, name):
    """Exported is what the model computes with, at most half a unit of 4 significant bits (2**-4) away from the
    checkpoint; the optimizer holds the checkpoint's own values, also after another load."""
    told = runs[name]
    assert told["kinds"]["fp8"] == {"outer": 4 * 6, "moe-blockwise-param": 4 * (2 + 2 * 8)}.get(name, 4 * 8)
    assert told["exported"] and 0.01 < told["distance"] <= 2**-4
    assert told["main"] == [] and told["main after load"] == [] and told["saved"] == []


@pytest.mark.parametrize("name", [n for n in FP8 if not n.startswith("delayed")])
def test_a_load_starts_over(runs, name):
    """Not with recipe delayed, which remembers scales."""
    first, again = runs[name]["steps"][0], runs[name]["steps after load"][0]
    assert again == pytest.approx(first, rel=1e-4)


@pytest.mark.parametrize("name", ["bf16", *FP8])
def test_offload_and_resume(runs, name):
    """With FP8 parameters of recipe delayed the first step after a resume rounds weights with later scales."""
    told = runs[name]
    assert told["offload"] is True
    first, again = told["resumed"]
    assert again == pytest.approx(first, rel=1e-2 if name == "delayed-param" else 1e-4), "a step, made twice"


@pytest.mark.parametrize(("name", "multiple"), [("tensorwise", 16), ("blockwise", 128), ("delayed", 16)])
def test_packed_lengths_are_whole_blocks(runs, name, multiple):
    assert all(n % multiple == 0 for n in runs[name]["lengths"])


@pytest.mark.parametrize("kind", ["dense", "moe", "fp8"])
def test_two_runs_have_the_same_bits(runs, kind):
    first, second = runs[f"repeat {kind} 1"], runs[f"repeat {kind} 2"]
    assert first[0] == ["DocumentAttention"]
    assert first[1] == deterministic_environment()
    assert first[2] == second[2] and first[3] == second[3] and len(first[2]) == 10
    assert first[2][-1][0] < first[2][0][0]


def test_two_packings_differ_by_rounding(runs):
    """In float32 by its rounding; in bfloat16 (8 bits) by that of logits of size 4, which is 2**-6, a few times."""
    assert runs["packings float32"][1] < 1e-4
    assert runs["packings bfloat16"][1] < 0.1


def test_log_probabilities_are_those_of_transformers(runs, folders):
    from gpu_hosts import batch_of

    model = AutoModelForCausalLM.from_pretrained(folders["dense"], dtype=torch.float32)
    rows = []
    with torch.no_grad():
        for ids in batch_of(0).split_tokens(batch_of(0).input_ids):
            chosen = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            rows.append(torch.cat([torch.zeros(1), chosen]))
    assert (torch.cat(rows) - runs["packings float32"][0]).abs().max() < 1e-3
    assert (torch.cat(rows) - runs["packings bfloat16"][0]).abs().max() < 0.1


def test_mxfp8_on_a_gpu_that_has_none(folders):
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this GPU has MXFP8")
    with pytest.raises(Exception, match=r"fp8_config\.recipe mxfp8: .* cannot do it"):
        start(section(folders["dense"], fp8={"recipe": "mxfp8"}))


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "delayed"])
def test_a_trial_in_fp8(recipe):
    report = run_trial("megatron:d1", dtype="bfloat16", fp8=recipe, device="cuda")
    print("\n" + report.render())
    assert report.passed and report.fp8 == recipe, report.render()
    assert max(s.loss_difference for s in report.steps) > 1e-5, "it computed in bfloat16"


@pytest.mark.parametrize("model", ["tiny-dense", "tiny-moe"])
def test_a_deterministic_trial(model):
    report = run_trial("megatron:d1", model=model, dtype="bfloat16", device="cuda", deterministic=True)
    print("\n" + report.render())
    assert report.passed and report.repeats == [], report.render()


def test_the_environment_of_this_process_is_left_alone(runs):
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ

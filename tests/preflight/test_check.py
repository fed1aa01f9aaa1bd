"""The check of a whole configuration: where each finding stands, and that nothing starts after an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from areal_like.config import load_config
from areal_like.preflight import check

ROOT = Path(__file__).parents[2]
DEMO = "demo:smollm2-135m-instruct"
TEXT = """\
experiment_name: toy
trial_name: t
device: cpu
rollout:
  backend: huggingface:d1
actor:
  backend: megatron:d1
  path: demo:smollm2-135m-instruct
  optimizer:
    lr: 1.0e-5
train_dataset:
  path: reasoning_gym/chain_sum
  batch_size: 8
  max_length: 64
gconfig: {n_samples: 8, max_new_tokens: 64}
"""
LINES = {"rollout.backend": (5, 3), "actor.backend": (7, 3), "actor.path": (8, 3)}


@pytest.fixture
def findings(tmp_path):
    """`findings("old" -> "new", ...)`: what the check says about the text with these replacements."""

    def call(*replacements, overrides=(), extra=""):
        text = TEXT
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        file = tmp_path / "run.yaml"
        file.write_text(text + extra)
        return check(load_config(file, list(overrides))), file

    return call


def test_a_good_job_has_no_findings(findings):
    assert findings()[0] == ()


@pytest.mark.parametrize("name", ["gsm8k_grpo_cpu.yaml", "gsm8k_grpo_gpu.yaml"])
def test_the_examples_have_no_errors(name):
    found = check(load_config(ROOT / "examples" / "math" / name, []))
    assert [d.render() for d in found if d.severity == "error"] == []


@pytest.mark.parametrize(
    "name", ["gsm8k_grpo_megatron.yaml", "gsm8k_grpo_megatron_fp8.yaml", "gsm8k_grpo_megatron_moe.yaml"]
)
def test_examples_for_a_cluster_lack_only_a_server(name):
    found = check(load_config(ROOT / "examples" / "math" / name, []))
    assert [(d.code, d.key) for d in found if d.severity == "error"] == [("AL205", "rollout.backend")]


def assert_at(found, file, key, code):
    assert (found.code, found.key) == (code, key)
    assert Path(found.file) == file and (found.line, found.column) == LINES[key]


def test_a_layout_that_does_not_fit(findings):
    (found,), file = findings(("megatron:d1", "megatron:d1t2"))
    assert_at(found, file, "actor.backend", "AL303")
    assert found.message == "9 attention heads do not divide by t2"
    rendered = found.render()
    assert "9 attention heads" in rendered and f"{file}:7:3" in rendered and "t can be 1, 3" in rendered


def test_a_backend_without_an_engine(findings):
    (found, transport), file = findings(("megatron:d1", "fsdp:d1"))
    assert_at(found, file, "actor.backend", "AL205")
    assert "'fsdp'" in found.message and found.help == "use megatron"
    assert (transport.code, transport.severity) == ("AL214", "info")
    (found, _), file = findings(("huggingface:d1", "sglang:d1"))
    assert_at(found, file, "rollout.backend", "AL205")
    assert found.help == "use huggingface"


def test_a_model_that_is_not_known_yet(findings):
    (found,), file = findings((DEMO, "somebody/some-model"))
    assert_at(found, file, "actor.path", "AL310")
    assert found.severity == "info" and "'somebody/some-model'" in found.message


@pytest.mark.parametrize("path", ["/nowhere/model", "./nowhere", "~/nowhere"])
def test_a_model_folder_that_is_not_there(findings, path):
    (found,), file = findings((DEMO, path))
    assert_at(found, file, "actor.path", "AL311")
    assert found.severity == "error" and "no config.json" in found.message


def test_a_model_folder_that_lacks_a_number(findings, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (found,), file = findings((DEMO, str(tmp_path)))
    assert_at(found, file, "actor.path", "AL311")
    assert "num_attention_heads" in found.message


def test_the_dispatcher_of_experts(findings):
    mixture = (DEMO, "Qwen/Qwen3-30B-A3B")
    flex = ["actor.megatron.moe_token_dispatcher_type=flex"]
    found, _ = findings(mixture, overrides=flex)
    assert {(d.code, d.key) for d in found} == {("AL212", "actor.megatron.moe_token_dispatcher_type")}
    assert "flex needs GPUs; device is cpu" in [d.message for d in found]
    assert findings(mixture)[0] == ()
    assert findings(mixture, overrides=["actor.megatron.moe_token_dispatcher_type=allgather"])[0] == ()
    assert [d.code for d in findings(overrides=flex)[0]] in ([], ["AL235"]), "no experts, no matter"


def test_more_gpus_than_there_are(findings):
    gpus = ("device: cpu", "device: cuda")
    cluster = ["cluster.n_gpus_per_node=4", "actor.mb_spec.max_tokens_per_mb=1024"]
    found, file = findings(
        gpus, ("megatron:d1", "megatron:d8"), ("huggingface:d1", "huggingface:d5"), overrides=cluster
    )
    assert_at(found[0], file, "rollout.backend", "AL401")
    assert_at(found[1], file, "actor.backend", "AL401")
    assert found[1].message == "megatron:d8 needs 8 GPUs; the cluster has 4"
    assert found[1].alternatives[0] == "megatron:d4"
    found, _ = findings(gpus, ("megatron:d1", "megatron:d4"), overrides=cluster)
    assert [d.code for d in found] == ["AL404"], "they share"
    found, _ = findings(gpus, ("megatron:d1", "megatron:d3"), overrides=cluster)
    assert found == ()
    assert findings(("megatron:d1", "megatron:d8"))[0] == (), "without GPUs ranks share the cores"


def test_the_reference_is_checked_too(findings):
    extra = f"ref:\n  backend: megatron:d1t2\n  path: {DEMO}\n"
    ((found,), _) = findings(extra=extra)
    assert (found.code, found.key, found.line, found.column) == ("AL303", "ref.backend", 17, 3)


def test_a_reference_without_a_layout_has_the_actor_s(findings):
    found, _ = findings(("megatron:d1", "megatron:d1t2"), extra=f"ref:\n  path: {DEMO}\n")
    assert [d.code for d in found] == ["AL303", "AL303"]
    assert [d.key for d in found] == ["actor.backend", "ref.backend"]


def test_everything_is_found_at_once(findings):
    found, file = findings(
        ("huggingface:d1", "vllm:d2"),
        ("megatron:d1", "megatron:d1t2p31"),
        ("device: cpu", "device: cuda"),
        overrides=["cluster.n_gpus_per_node=1"],
        extra="ref:\n  backend: archon:d1\n  path: /nowhere\n",
    )
    keys = [(d.key, d.code) for d in found if d.severity == "error"]
    assert sorted(keys) == sorted(
        [
            ("actor.backend", "AL303"),
            ("actor.backend", "AL309"),
            ("ref.backend", "AL205"),
            ("ref.path", "AL311"),
            ("rollout.backend", "AL205"),
            ("rollout.backend", "AL401"),
            ("actor.backend", "AL401"),
        ]
    )
    assert all(Path(d.file) == file and d.line > 1 and d.column == 3 for d in found if d.severity == "error")


def test_an_override_is_where_the_fault_is(tmp_path, findings):
    (found,), file = findings(overrides=["actor.backend=megatron:d1t2"])
    assert found.code == "AL303" and found.key == "actor.backend"
    assert "actor.backend=megatron:d1t2" in found.file or found.file != str(file), "not blamed on the file"


# The whole way, as a user calls it


def call_example(tmp_path, *overrides):
    command = [sys.executable, str(ROOT / "examples" / "math" / "gsm8k_rl.py")]
    command += ["--config", str(ROOT / "examples" / "math" / "gsm8k_grpo_cpu.yaml")]
    command += [f"cluster.fileroot={tmp_path / 'runs'}", *overrides]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_d1t2_on_the_demo_model_is_refused_before_anything_starts(tmp_path):
    done = call_example(tmp_path, "actor.backend=megatron:d1t2")
    assert done.returncode == 2
    assert "9 attention heads do not divide by t2" in done.stderr and "actor.backend" in done.stderr
    assert "t can be 1, 3" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout and done.stdout == ""
    assert not (tmp_path / "runs").exists(), "no folder of logs, so no worker"


def test_the_same_layout_in_a_file(tmp_path):
    data = yaml.safe_load((ROOT / "examples" / "math" / "gsm8k_grpo_cpu.yaml").read_text())
    data["actor"]["backend"] = "megatron:d1t2"
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(data))
    line = 1 + next(i for i, text in enumerate(file.read_text().splitlines()) if "megatron:d1t2" in text)
    (found,) = [d for d in check(load_config(file, [])) if d.severity == "error"]
    assert (found.code, Path(found.file), found.line, found.column) == ("AL303", file, line, 3)

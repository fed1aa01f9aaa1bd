"""`areal-like try --resume-as`: the steps after a change of layout are compared as those before it."""

from __future__ import annotations

import pytest
import torch

from areal_like.alloc import AllocationError, ModelAllocation
from areal_like.cli import main
from areal_like.preflight import check_layout
from areal_like.spec import ModelSpec
from areal_like.trainers.tiny_models import make_tiny_model
from areal_like.trainers.trial import run_trial
from areal_like.trainers.trial_report import StepDifferences, TrialReport


def test_it_needs_a_step_afterwards(capsys):
    assert main(["try", "megatron:d1", "--resume-as", "megatron:t2", "--steps", "2"]) == 2
    assert "--resume-as needs 3 steps or more" in capsys.readouterr().err
    with pytest.raises(ValueError, match="more than 2 steps"):
        run_trial("megatron:d1", resume_as="megatron:t2", steps=2)


def test_a_faulty_second_layout_is_refused_before_anything_starts(capsys):
    assert main(["try", "megatron:d1", "--resume-as", "megatorn:t2"]) == 2
    assert "AL201" in capsys.readouterr().err
    with pytest.raises(AllocationError, match="AL307"):
        run_trial("megatron:d1", resume_as="megatron:d2e2")


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-moe"])
def test_the_tiny_model_fits_both_layouts(tmp_path, name):
    texts = ("megatron:t3p2", "megatron:p5v2") if name == "tiny-dense" else ("megatron:d3e3", "megatron:d4p2e4")
    one, other = (ModelAllocation.parse(text) for text in texts)
    make_tiny_model(name, one, tmp_path, dtype=torch.float32, also=other)
    spec = ModelSpec.from_path(tmp_path)
    assert [d.code for a in (one, other) for d in check_layout(a, spec) if d.severity == "error"] == []


def test_the_report_says_where_the_layout_changed():
    report = TrialReport("megatron:t2", "tiny-dense", "mbridge", "float32", "cpu", 2, resumed_as="megatron:p2")
    report.steps = [StepDifferences(n, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1, 1.0) for n in (1, 2, 3)]
    lines = report.render().splitlines()
    assert lines[5].strip() == "saved, processes ended, loaded as megatron:p2"
    assert lines[4].split()[0] == "2" and lines[6].split()[0] == "3"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "other", "options"),
    [
        ("megatron:(attn:d1t2|ffn:e2)", "megatron:d1p2v2", {"model": "tiny-moe"}),
        ("megatron:t2", "megatron:p2", {"lora_rank": 4, "bridge": "megatron-bridge"}),
    ],
)
def test_steps_after_the_change_agree_with_the_reference(text, other, options):
    report = run_trial(text, resume_as=other, steps=4, **options)
    assert report.passed, report.failures
    assert report.resumed_as == str(ModelAllocation.parse(other)) and [s.step for s in report.steps] == [1, 2, 3, 4]

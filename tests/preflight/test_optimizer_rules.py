"""What the check says about accumulation of gradients and about the precision-aware optimizer."""

from __future__ import annotations

import pytest

from areal_like.preflight.examples import findings
from areal_like.preflight.registry import example

AWARE = "actor.megatron.use_precision_aware_optimizer=true"
FUSED = "actor.megatron.gradient_accumulation_fusion=true"
LORA = ("actor.use_lora=true", "rollout.use_lora=true", "actor.megatron.bridge_type=megatron-bridge")
M = "actor.megatron."


def said(*overrides):
    found = findings(example(*overrides))
    return [(d.code, d.message) for d in found if d.code in ("AL571", "AL572", "AL573", "AL574")]


@pytest.mark.parametrize(
    ("overrides", "code", "part"),
    [
        ((FUSED,), None, ""),
        ((M + "gradient_accumulation_fusion=false", "device=cpu"), None, ""),
        ((FUSED, "device=cpu"), "AL571", "device is cpu"),
        ((FUSED, *LORA), "AL571", "with use_lora the model's weights are frozen"),
        ((AWARE,), None, ""),
        ((AWARE, "device=cpu"), "AL572", "device is cpu"),
        ((AWARE, "actor.optimizer.type=sgd"), "AL572", "optimizer.type is sgd"),
        ((AWARE, M + "ddp.use_distributed_optimizer=false"), "AL572", "use_distributed_optimizer: true"),
        ((AWARE, "actor.dtype=float16"), "AL572", "bfloat16, not float16"),
        ((AWARE, *LORA, "actor.lora_dtype=float32"), "AL572", "bfloat16, not float32"),
        ((AWARE, *LORA), None, ""),
        ((AWARE, M + "fp8_config={param: true}"), "AL572", "fp8_config.param"),
        ((AWARE, M + "fp8_config={param: false}"), None, ""),
        ((M + "main_grads_dtype=bfloat16",), "AL573", "no effect without use_precision_aware_optimizer"),
        ((M + "exp_avg_sq_dtype=bfloat16",), "AL573", "no effect without"),
        ((AWARE, M + "main_grads_dtype=bfloat16"), "AL573", "the gradient buffer is float32"),
        ((AWARE, M + "main_grads_dtype=bfloat16", M + "ddp.grad_reduce_in_fp32=false"), None, ""),
        ((AWARE, M + "ddp.grad_reduce_in_fp32=false"), None, ""),
        (
            (AWARE, M + "main_grads_dtype=float32", M + "ddp.grad_reduce_in_fp32=false"),
            "AL573",
            "the gradient buffer is bfloat16",
        ),
        ((AWARE, M + "exp_avg_sq_dtype=bfloat16"), "AL574", "beta2 is 0.999"),
        ((AWARE, M + "exp_avg_sq_dtype=bfloat16", "actor.optimizer.beta2=0.99"), None, ""),
    ],
)
def test_what_is_said(overrides, code, part):
    found = said(*overrides)
    if code is None:
        assert found == []
    else:
        ((said_code, message),) = found
        assert said_code == code and part in message


@pytest.mark.parametrize("text", ["main_params_dtype=float16", "exp_avg_dtype=uint8", "exp_avg_sq_dtype=float16"])
def test_other_types_are_not_there(text):
    found = [d for d in findings(example(AWARE, M + text)) if d.code == "AL811"]
    assert len(found) == 1 and text.split("=")[0] in found[0].message

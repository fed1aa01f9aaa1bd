"""Float32 copies as bfloat16 parameters and 16 bits more, and what the keys ask for."""

from __future__ import annotations

import math
import struct
from types import SimpleNamespace

import pytest
import torch

from areal_like.engines.megatron.checkpoint.optimizer_state import MAIN, Piece
from areal_like.engines.megatron.precision_aware import (
    MAIN_COPY,
    forget_main_copies,
    main_copy,
    remainder,
    settings,
)
from areal_like.preflight.rules.optimizer import STANDSTILL
from areal_like.spec.checkpoint import CheckpointFault


def kernel(parameter: int, rest: int) -> float:
    """`adam.cu` of TransformerEngine on 16-bit integers: undo the rounding, put the halves together."""
    high = parameter - 1 if rest < 0 else parameter
    return struct.unpack("<f", struct.pack("<HH", rest & 0xFFFF, high & 0xFFFF))[0]


def numbers(count=20000):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(count, generator=generator) * torch.exp(8 * torch.randn(count, generator=generator))
    edges = [0.0, -0.0, 1.0, -1.0, 1 - 2**-24, 1 + 2**-23, 2.0**-126, -(2.0**-126), 3e38, 1e-40]
    return torch.cat([wide, torch.tensor(edges)])


def test_a_copy_is_its_rounding_and_a_remainder():
    copies = numbers()
    parameters = copies.bfloat16()
    rest = remainder(parameters, copies)
    assert rest.dtype is torch.int16
    back = main_copy(parameters, rest)
    ties = (copies.view(torch.int32) & 0xFFFF) == 0x8000  # which bfloat16 may round down
    assert torch.equal(back[~ties].view(torch.int32), copies[~ties].view(torch.int32))
    assert ties.sum() < 10 and torch.allclose(back[ties], copies[ties], rtol=2**-23, atol=0.0)


def test_remainders_are_those_of_the_kernel():
    """Which rounds a tie away from zero."""
    copies = torch.cat([numbers(500), torch.tensor([1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8])])
    bits = copies.view(torch.int32)
    high, low = bits >> 16, (bits << 16 >> 16).to(torch.int16)
    stored = (high + (low < 0)).to(torch.int16)
    parameters = stored.view(torch.bfloat16)
    assert torch.equal(remainder(parameters, copies), low)
    expected = [kernel(p, r) for p, r in zip(stored.tolist(), low.tolist(), strict=True)]
    assert main_copy(parameters, low).tolist() == copies.tolist() == expected
    nearest = copies.bfloat16()
    away = parameters != nearest
    assert ((parameters - copies).abs()[away] == (nearest - copies).abs()[away]).all()


def test_copies_of_other_parameters_are_refused():
    with pytest.raises(ValueError, match="are not those of the parameters"):
        remainder(torch.tensor([1.0, 2.0]).bfloat16(), torch.tensor([1.0, 2.1]))
    with pytest.raises(ValueError, match="are not those"):
        remainder(torch.tensor([0.0]).bfloat16(), torch.tensor([-0.0]))
    assert remainder(torch.zeros(0).bfloat16(), torch.zeros(0)).numel() == 0


def test_a_piece_of_a_checkpoint_is_float32_whatever_is_kept():
    copies = torch.tensor([1.001, -2.5003, 0.3])
    shard = copies.bfloat16()
    kept = {MAIN: remainder(shard, copies), "exp_avg": torch.tensor([1.0, 2.0, 3.0]).bfloat16()}
    piece = Piece(0, torch.nn.Parameter(shard), 0, 3, kept, shard)
    assert torch.equal(piece.read(MAIN), copies)
    assert piece.read("exp_avg").dtype is torch.float32 and piece.read("exp_avg").tolist() == [1.0, 2.0, 3.0]
    shard.copy_(copies * 3)  # as a load does before it
    piece.write(MAIN, copies * 3)
    piece.write("exp_avg", torch.tensor([0.1, 0.2, 0.3]))
    assert torch.equal(main_copy(shard, kept[MAIN]), copies * 3)
    assert kept["exp_avg"].tolist() == torch.tensor([0.1, 0.2, 0.3]).bfloat16().tolist()
    with pytest.raises(CheckpointFault, match="contradicts itself"):
        piece.write(MAIN, copies)


def test_loaded_weights_have_no_remainders():
    shard, whole = torch.ones(3).bfloat16(), torch.ones(2)
    state = {shard: {MAIN_COPY: torch.ones(3, dtype=torch.int16), "exp_avg": torch.ones(3)}, whole: {"exp_avg": whole}}
    aware = SimpleNamespace(optimizer=SimpleNamespace(store_param_remainders=True, state=state))
    plain = SimpleNamespace(optimizer=torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]))
    empty = SimpleNamespace(optimizer=None)
    forget_main_copies(SimpleNamespace(chained_optimizers=[aware, plain, empty]))
    assert not state[shard][MAIN_COPY].any()
    assert state[shard]["exp_avg"].all() and state[whole]["exp_avg"].all()


AWARE = {"use_precision_aware_optimizer": True}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"megatron": AWARE, "transformer_engine": False}, "needs TransformerEngine and a GPU"),
        ({"megatron": AWARE, "optimizer": {"type": "sgd"}}, "needs optimizer.type: adam"),
        ({"megatron": AWARE, "distributed": False}, "needs ddp.use_distributed_optimizer: true"),
        ({"megatron": AWARE, "trained": torch.float32}, "needs parameters in bfloat16"),
        ({"megatron": AWARE | {"main_grads_dtype": "bfloat16"}}, "the gradient buffer is float32"),
        (
            {"megatron": AWARE | {"main_grads_dtype": "float32"}, "ddp": {"grad_reduce_in_fp32": False}},
            "the gradient buffer is bfloat16",
        ),
        ({"megatron": {"exp_avg_dtype": "bfloat16"}}, "exp_avg_dtype needs use_precision_aware_optimizer"),
        ({"megatron": {"main_grads_dtype": "float32"}}, None),
        ({"megatron": {}}, None),
        ({"megatron": AWARE}, (torch.float32, torch.float32, torch.float32)),
        (
            {"megatron": AWARE | {"exp_avg_sq_dtype": "bfloat16"}, "ddp": {"grad_reduce_in_fp32": False}},
            (torch.bfloat16, torch.float32, torch.bfloat16),
        ),
    ],
)
def test_what_megatron_is_told(helpers, changes, said):
    changes = dict(changes)
    where = {
        "dtype": changes.pop("trained", torch.bfloat16),
        "distributed": changes.pop("distributed", True),
        "transformer_engine": changes.pop("transformer_engine", True),
    }
    config = helpers.engine_config("megatron:d1", "none", dtype="bfloat16", **changes)
    if isinstance(said, str):
        with pytest.raises(ValueError, match=said):
            settings(config, **where)
        return
    told = settings(config, **where)
    if said is None:
        assert told == {}
    else:
        assert told["use_precision_aware_optimizer"] and told["store_param_remainders"]
        assert tuple(told[n] for n in ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")) == said


def test_on_a_cpu_it_is_refused(solo, models):
    errors = solo.refuses("megatron:d1", models("qwen3"), dtype="bfloat16", megatron=AWARE)
    assert errors[0][0] == "ValueError" and "use_precision_aware_optimizer needs TransformerEngine" in errors[0][1]


@pytest.mark.parametrize(("beta2", "falls"), [(0.95, True), (0.99, True), (0.999, False), (STANDSTILL + 1e-4, False)])
def test_a_bfloat16_mean_of_squares_falls_or_stands_still(beta2, falls):
    """FusedAdam's update with gradients 0: v beta2, rounded to nearest. AL574 says from which beta2 on."""
    mean = torch.linspace(1.0, 2.0, 129)[:-1].bfloat16()
    assert mean.unique().numel() == 128  # every mantissa
    after = (mean.float() * beta2).bfloat16()
    assert bool((after < mean).all()) is falls and bool((after == mean).all()) is not falls
    assert (beta2 <= STANDSTILL) is falls and math.isclose(STANDSTILL, 0.998, rel_tol=1e-4)

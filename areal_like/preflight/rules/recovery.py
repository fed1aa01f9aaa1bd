"""AL58: recovery checkpoints, and the run that would go on from one."""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.preflight.continuing import OTHER, found_for, is_on
from areal_like.preflight.flow import groups_a_step
from areal_like.preflight.job import Job
from areal_like.preflight.registry import Finding, example, rule
from areal_like.spec.checkpoint import checkpoint_identity, differences


@rule(
    "AL586",
    summary="the run would go on from a checkpoint of another model",
    why="A recovery checkpoint holds the weights and the optimizer of one model in one type of numbers. Its layout may"
    " change, and the optimizer's settings; the model may not.",
    bad=example("cluster.fileroot={examples}", "recover={mode: auto, freq_steps: 50}"),
    good=example("cluster.fileroot={examples}", "recover={mode: auto, freq_steps: 50}", "trial_name=another"),
)
def checkpoint_of_another_model(job: Job) -> Iterator[Finding]:
    actor = job.role("actor")
    if job.config is None or actor is None or actor.spec is None or actor.section is None:
        return
    found = found_for(job.config)
    if found.folder is None:
        return
    own = checkpoint_identity(actor.spec, actor.section)
    if differing := differences(found.manifests["actor"].model, own):
        yield Finding(f"recover/{found.folder.name}: {'; '.join(differing)}", OTHER, key="recover.mode")


@rule(
    "AL587",
    summary="the run would go on from a checkpoint of other data",
    why="A checkpoint says which prompts are done. With another seed or batch size they come in another order, and some"
    " would be seen twice and others never.",
    bad=example("cluster.fileroot={examples}", "trial_name=data", "recover={mode: auto, freq_steps: 50}", "seed=2"),
    good=example("cluster.fileroot={examples}", "trial_name=data", "recover={mode: auto, freq_steps: 50}"),
)
def checkpoint_of_other_data(job: Job) -> Iterator[Finding]:
    if job.config is None:
        return
    found = found_for(job.config)
    if found.folder is None or found.state is None:
        return
    own = {"seed": job.config.seed, "batch_size": groups_a_step(job.config)}
    if differing := differences({name: found.state.data.get(name) for name in own}, own):
        yield Finding(f"recover/{found.folder.name}: {'; '.join(differing)}", OTHER, key="recover.mode")


@rule(
    "AL588",
    summary="adapters of random weights cannot be recovered",
    why="A checkpoint of adapters holds the adapters alone: the weights under them come from the model's folder again."
    " Random ones are drawn anew, and under another layout they are others.",
    bad=example(
        "actor.use_lora=true",
        "actor.megatron.bridge_type=megatron-bridge",
        "actor.init_from_scratch=true",
        "recover={mode: auto, freq_steps: 50}",
    ),
    good=example(
        "actor.use_lora=true", "actor.megatron.bridge_type=megatron-bridge", "recover={mode: auto, freq_steps: 50}"
    ),
)
def adapters_of_random_weights(job: Job) -> Iterator[Finding]:
    if job.config is None or not is_on(job.config.recover):
        return
    if job.config.actor.use_lora and job.config.actor.init_from_scratch:
        message = "adapters are trained on random weights, which no checkpoint holds"
        yield Finding(message, "save the random model once and set actor.path to it", key="actor.init_from_scratch")


@rule(
    "AL589",
    summary="no recovery checkpoint is ever written",
    why="recover.mode switches recovery on; freq_steps, freq_epochs or freq_secs say when a checkpoint is due.",
    bad=example("recover.mode=auto"),
    good=example("recover={mode: auto, freq_steps: 50}"),
    severity="warning",
)
def nothing_is_written(job: Job) -> Iterator[Finding]:
    if job.config is None:
        return
    recover = job.config.recover
    if not is_on(recover):
        if job.config.actor.megatron.async_save:
            message = "async_save is about recovery checkpoints, and recover.mode is off"
            yield Finding(message, "set recover.mode and recover.freq_steps", key="actor.megatron.async_save")
    elif recover.freq_steps is None and recover.freq_epochs is None and recover.freq_secs is None:
        message = f"recover.mode is {recover.mode}, and nothing says when a checkpoint is written"
        yield Finding(message, "set recover.freq_steps, freq_epochs or freq_secs", key="recover.mode")

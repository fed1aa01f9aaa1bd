"""Where a run happens, where its rollouts and data come from, and what it leaves behind."""

from __future__ import annotations

from typing import Any, Literal

from areal_like.config.fields import REQUIRED, Section, fileroot, key, run_name, trial_name

_NO_SERVICE = "workers are processes of this machine and find each other without a name service"
_PLACED_BY_LAYOUT = "processes and GPUs follow from `backend`; nothing else is scheduled"
_IN_PROCESS = "rollout workers are called directly, not over HTTP"
_TENSORBOARD = "figures go to TensorBoard and to a JSONL file"
_NO_TRACER = "traces are set up for each model: actor.profiler"


class ClusterConfig(Section):
    """The machine."""

    fileroot: str = key("experiments", "Folder under which each run has its own folder.", min_length=1)
    n_nodes: int = key(
        1, "Machines.", unit="machines", ge=1, unsupported_unless=(1,), why="the local scheduler uses one machine"
    )
    n_gpus_per_node: int = key(8, "GPUs of a machine; of no interest when device is cpu.", unit="GPUs", ge=1)
    cluster_name: str = key("local", "Name of the cluster.", no_effect="nothing depends on the name")
    name_resolve: dict[str, Any] | None = key(None, "AReaL's name service.", no_effect=_NO_SERVICE)


class SchedulerConfig(Section):
    """What starts the processes."""

    type: Literal["local", "ray", "slurm"] | None = key(
        None,
        "`local` starts processes on this machine; null means local.",
        unsupported_unless=(None, "local"),
        why="only the local scheduler is built in: it starts processes on this machine",
    )


class AgentConfig(Section):
    """AReaL's agent rollouts."""

    mode: Literal["inline", "subproc", "online"] = key(
        "inline", "Where the agent runs.", unsupported_unless=("inline",), why="rollouts have one turn"
    )
    export_style: Literal["individual", "concat"] = key(
        "individual", "How turns become samples.", unsupported_unless=("individual",), why="rollouts have one turn"
    )
    turn_discount: float = key(1.0, "Discount over turns.", no_effect="rollouts have one turn")


class BankConfig(Section):
    """The rollout bank: finished groups on disk, see docs/bank.md."""

    path: str | None = key(None, "Folder of the bank; null puts it into the folder of the run.")
    log_probs: Literal["float32", "float16"] = key("float32", "Width of stored log-probabilities.")
    max_bytes: int = key(0, "Size from which a warning is given; 0 never.", unit="bytes", ge=0)
    max_age: int | None = key(
        None,
        "Groups whose oldest token is more versions older than the run that goes on are not restored; null restores"
        " them all.",
        unit="versions",
        ge=0,
    )


class RolloutConfig(Section):
    """The rollout engine, and how far it may run ahead of training."""

    experiment_name: str = run_name()
    trial_name: str = trial_name()
    fileroot: str = fileroot()
    tokenizer_path: str = key("", "Tokenizer again; taken from the top of the file.", same_as="tokenizer_path")
    backend: str = key(REQUIRED, "Engine and layout, as in huggingface:d1.", role="inference")
    environments: str | None = key(
        None,
        "File of the environments that pose the problems, see docs/rollout.md, or `code` for those that the script"
        " gives to the trainer; null takes the rows of train_dataset and their reward.",
    )
    submission_granularity: Literal["R", "G", "B"] = key(
        "B", "Generation is submitted by the rollout (R), by the group (G) or by the batch (B)."
    )
    consumption_granularity: Literal["R", "G", "B"] = key(
        "B",
        "An update takes the groups that are finished first (G), or the batches in the order of the data (B); R is"
        " refused.",
    )
    generation_lag: float | Literal["auto"] | None = key(
        None,
        "Batches under way beyond the one that the trainer waits for, -1 and up; `auto` fills the engine:"
        " floor(replicas * max_requests_per_replica / n_samples) / batch - 1; null follows max_inflight_requests, else"
        " max_head_offpolicyness, else 0.",
        unit="batches",
    )
    max_inflight_requests: int | None = key(
        None,
        "Rollouts under way at once, another way to say generation_lag: N / (batch * n_samples) - 1.",
        unit="rollouts",
        ge=1,
    )
    max_head_offpolicyness: int | None = key(
        None,
        "Versions that generation may run ahead of the update that trains on it: a group of batch b is started only"
        " when version b - max_head_offpolicyness is installed; null sets no such bound.",
        unit="versions",
        ge=0,
    )
    max_concurrent_rollouts: int | None = key(
        None,
        "Groups that the engine serves at once; when this and max_requests_per_replica are null, those of one batch.",
        unit="groups",
        ge=1,
    )
    max_requests_per_replica: int | None = key(
        None,
        "Requests that one replica serves at once, another way to say max_concurrent_rollouts.",
        unit="requests",
        ge=1,
    )
    consumer_batch_size: int | None = key(
        None,
        "Groups that one update takes; train_dataset.batch_size when null.",
        unit="groups",
        ge=1,
        inherits="train_dataset.batch_size",
    )
    queue_size: int | None = key(
        None,
        "Finished groups that may wait before no further one is started; null: as many as the lag has under way, and no"
        " bound at B/B, which needs none.",
        unit="groups",
        ge=1,
    )
    requests_at_update: Literal["interrupt", "finish"] = key(
        "interrupt",
        "What becomes of requests in flight when new weights come: they are interrupted and go on under the new"
        " version, or the weights wait until they have ended.",
    )
    keep_weights: bool = key(
        False,
        "Keep a copy of the last weights in host memory, for a replica that dies in the middle of a step and is started"
        " again; without it it waits for the next update, and a run whose only replica dies ends.",
    )
    filter_groups_with_same_reward: bool = key(
        False, "Replace groups whose answers all have the same reward: they teach nothing (DAPO's dynamic sampling)."
    )
    reward_timeout: float = key(60.0, "Longest computation of one reward.", unit="seconds", gt=0.0)
    reward_retries: int = key(
        1, "Further tries of a reward that raised, hung or died; then its answer counts as failed.", ge=0
    )
    bank: BankConfig | None = key(None, "Keeps finished groups on disk, so that a kill does not lose them.")
    dump_to_file: bool = key(False, "Write every prompt, answer and reward to a JSONL file of the run.")
    setup_timeout: float = key(300.0, "Longest start of the rollout workers.", unit="seconds", gt=0.0)
    request_timeout: float = key(
        3600.0, "Longest single generation request.", unit="seconds", gt=0.0, no_effect=_IN_PROCESS
    )
    request_retries: int = key(3, "Repetitions of a failed request.", ge=0, no_effect=_IN_PROCESS)
    pause_grace_period: float = key(
        0.0, "Wait after generation is paused.", unit="seconds", ge=0.0, no_effect=_IN_PROCESS
    )
    enable_rollout_tracing: bool = key(False, "Messages for each request.", no_effect=_IN_PROCESS)
    use_lora: bool = key(
        False,
        "Take the actor's adapters alone at each update, and add them to the weights of the start; false takes whole"
        " weights, with adapters merged into them.",
    )
    agent: AgentConfig | None = key(None, "Agent rollouts.")
    scheduling_spec: tuple[dict[str, Any], ...] = key(
        (), "Ports, cores, memory, image and command of AReaL's workers.", no_effect=_PLACED_BY_LAYOUT, strict=False
    )
    scheduling_strategy: dict[str, Any] | None = key(
        None, "Placement of AReaL's workers beside another role.", no_effect=_PLACED_BY_LAYOUT
    )


class TrainDatasetConfig(Section):
    """A set of prompts with the answers that rewards are computed from."""

    path: str | None = key(
        None,
        "Name on the Hub, local folder, or reasoning_gym/TASK for generated tasks; needed unless rollout.environments"
        " poses the problems.",
        min_length=1,
    )
    name: str | None = key(None, "Configuration of a dataset that has several (`main` for openai/gsm8k).")
    split: str = key("train", "Split of the dataset.")
    type: Literal["rl", "sft", "rw", "dpo"] = key(
        "rl", "What the rows are for.", unsupported_unless=("rl",), why="this version trains by reinforcement learning"
    )
    batch_size: int = key(1, "Prompts of a batch.", unit="prompts", ge=1)
    shuffle: bool = key(True, "Visit the rows in a new order each epoch, drawn from `seed`.")
    drop_last: bool = key(True, "Leave out the last batch of an epoch when it is not full.")
    max_length: int | None = key(None, "Prompts that are longer are left out.", unit="tokens", ge=1)
    kwargs: dict[str, Any] | None = key(
        None, "Parameters of a reasoning_gym task, as that package names them; null for none."
    )
    num_workers: int = key(
        0,
        "Processes that prepare rows.",
        unit="processes",
        ge=0,
        no_effect="prompts are prepared by the trainer itself",
    )
    pin_memory: bool = key(False, "Page-locked memory.", no_effect="prompts stay in ordinary memory")
    scheduling_spec: dict[str, Any] | None = key(None, "AReaL's data service.", no_effect=_PLACED_BY_LAYOUT)


class ValidDatasetConfig(TrainDatasetConfig):
    """The prompts of an evaluation."""

    path: str = key(REQUIRED, "Name on the Hub, local folder, or reasoning_gym/TASK for generated tasks.", min_length=1)
    split: str = key("test", "Split of the dataset.")
    shuffle: bool = key(False, "Visit the rows in a new order each time.")
    drop_last: bool = key(False, "Leave out the last batch when it is not full.")


class TimerConfig(Section):
    """When something is due: after so many epochs, steps or seconds, whichever comes first; null never."""

    experiment_name: str = run_name()
    trial_name: str = trial_name()
    fileroot: str = fileroot()
    freq_epochs: int | None = key(None, "Every this many epochs.", unit="epochs", ge=1)
    freq_steps: int | None = key(None, "Every this many steps.", unit="steps", ge=1)
    freq_secs: int | None = key(None, "Every this many seconds.", unit="seconds", ge=1)


class SaverConfig(TimerConfig):
    """When the actor is saved as a Hugging Face folder."""

    mode: Literal["auto", "sync", "async"] = key(
        "auto",
        "Save before going on, or beside it.",
        unsupported_unless=("auto", "sync"),
        why="training waits for a save",
    )


class EvaluatorConfig(TimerConfig):
    """When the policy is measured on `valid_dataset`."""

    prompts_per_environment: int = key(
        32,
        "Problems of each environment that is measured, the first ones, or all when it has fewer; valid_dataset is"
        " always measured whole.",
        unit="problems",
        ge=1,
    )
    eval_before_train: bool = key(
        False,
        "Measure once before the first step.",
        unsupported_unless=(False,),
        why="the first evaluation follows the first step that is due",
    )


class RecoverConfig(TimerConfig):
    """Recovery checkpoints: when they are written, and whether a run goes on from one."""

    mode: Literal["on", "auto", "off", "disabled"] = key(
        "disabled",
        "`on` and `auto`: write recovery checkpoints when they are due, and when the run is started again go on from"
        " the newest whole one, or begin anew when there is none. `off` and `disabled`: neither.",
    )
    keep: int = key(2, "Whole recovery checkpoints that stay on disk.", ge=1)
    retries: int = key(
        3,
        "Times that AReaL's launcher starts a failed run again.",
        ge=0,
        no_effect="a run goes on when its command is started again; nothing starts it by itself",
    )


class TensorBoardConfig(Section):
    """TensorBoard event files."""

    path: str | None = key(None, "Folder of the event files; null puts them into the folder of the run.")


def _disabled() -> dict[str, Any]:
    return {"mode": "disabled"}


class StatsLoggerConfig(Section):
    """Where figures go."""

    experiment_name: str = run_name()
    trial_name: str = trial_name()
    fileroot: str = fileroot()
    tensorboard: TensorBoardConfig = key(TensorBoardConfig, "TensorBoard event files.")
    wandb: dict[str, Any] = key(_disabled, "Weights & Biases.", no_effect=_TENSORBOARD)
    swanlab: dict[str, Any] = key(_disabled, "SwanLab.", no_effect=_TENSORBOARD)
    trackio: dict[str, Any] = key(_disabled, "Trackio.", no_effect=_TENSORBOARD)


def _not_enabled() -> dict[str, Any]:
    return {"enabled": False}


class PerfTracerConfig(Section):
    """AReaL's performance traces."""

    experiment_name: str = run_name()
    trial_name: str = trial_name()
    fileroot: str = fileroot()
    enabled: bool = key(False, "Record a trace.", no_effect=_NO_TRACER)
    save_interval: int = key(1, "Steps between writes.", unit="steps", ge=1, no_effect=_NO_TRACER)
    profile_steps: tuple[int, ...] | None = key(None, "Steps that are profiled.", no_effect=_NO_TRACER, strict=False)
    session_tracer: dict[str, Any] | None = key(_not_enabled, "Traces of each rollout.", no_effect=_NO_TRACER)

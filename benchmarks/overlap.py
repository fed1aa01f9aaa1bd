"""How busy the five modes of the pipeline keep the engine, and how old its tokens become, beside the laws.

    python benchmarks/overlap.py [--write benchmarks/results/overlap.md] [--plot docs/figures/overlap.svg]
    python benchmarks/overlap.py --real [--tokens 16] [--batches 6]

Virtual time: the real pipeline, an engine as large as the slots whose rollouts take log-normal times, a trainer that
takes next to none. Every number is of the run; tau is measured from its own rollouts. Exits 1 when R/G leaves the
engine idle for more than 5 % of the time.

`--real`: the demo model in its rollout engine on this machine's CPU, answers of log-normal lengths, a trainer that does
nothing: tokens/s of each mode over those of B/B.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import platform
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from areal_like.spec.flow import FlowControl, Granularity

MODES = ("B/B", "G/G", "G/B", "R/G", "R/B")
LAGS = (-1.0, 0.0, 0.5, 1.0, 2.0)
GROUPS, ATTEMPTS, SIGMA = 16, 8, 1.0
IDLE = 0.05
HEADER = ("mode", "lag", "rollouts in flight", "utilisation", "law", "staleness", "law", "oldest", "groups waiting")


def control(mode: str, lag: float, groups: int = GROUPS, attempts: int = ATTEMPTS, **bounds: int) -> FlowControl:
    submission, consumption = map(Granularity, mode.split("/"))
    return FlowControl(groups, attempts, submission, consumption, lag, **bounds)


def virtual(batches: int) -> list[Any]:
    """A simulated run for every mode and lag."""
    from areal_like.rollout.pipeline.simulation import log_normal, simulate

    runs = []
    for mode in MODES:
        for lag in LAGS:
            if lag < 0 and mode == "B/B":
                continue  # one batch at a time is its lag 0
            runs.append(
                simulate(control(mode, lag), [log_normal(100.0, SIGMA, 1)], train_seconds=0.01, batches=batches)
            )
    return runs


def bounded(batches: int) -> list[tuple[str, Any]]:
    """R/G under a trainer that is four times slower than the engine, without and with the second bound."""
    from areal_like.rollout.pipeline.simulation import log_normal, simulate

    cases: dict[str, dict[str, int]] = {
        "none": {},
        f"queue_size {GROUPS}": {"max_waiting": GROUPS},
        "max_head_offpolicyness 1": {"max_ahead": 1},
    }
    return [
        (
            name,
            simulate(control("R/G", 0, **bounds), [log_normal(100.0, SIGMA, 1)], train_seconds=400.0, batches=batches),
        )
        for name, bounds in cases.items()
    ]


def row(run: Any) -> tuple[str, ...]:
    return (
        run.control.mode,
        f"{run.control.lag:g}",
        str(run.control.rollouts),
        f"{run.utilisation:.3f}",
        f"{run.utilisation_law:.3f}",
        f"{run.mean_staleness:.2f}",
        f"{run.staleness_law:.2f}",
        str(max(run.staleness)),
        str(run.waited),
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows))


def plot(runs: Sequence[Any], path: Path) -> None:
    """Utilisation against staleness, a line a mode, and the measured against the law."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "overlap"  # the same picture for the same numbers
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for mode in MODES:
        own = [run for run in runs if run.control.mode == mode]
        label = {"label": mode, "marker": "o"}
        left.plot([run.mean_staleness for run in own], [run.utilisation for run in own], **label)
        right.plot([run.staleness_law for run in own], [run.mean_staleness for run in own], **label)
    left.set(xlabel="mean first-token staleness, versions", ylabel="utilisation of the engine", ylim=(0, 1.05))
    most = max(run.mean_staleness for run in runs)
    right.plot([0, most], [0, most], color="grey", linewidth=0.8, linestyle="--")
    right.set(xlabel="staleness by the law", ylabel="staleness measured", xscale="symlog", yscale="symlog")
    left.legend()
    figure.savefig(path, metadata={"Date": None})


def real(arguments: argparse.Namespace) -> list[tuple[str, ...]]:
    """Each mode over the demo model; the first row is what the others are divided by."""
    rows: list[tuple[str, ...]] = []
    base = None
    for mode in ("B/B", "G/G", "R/G"):
        tokens_per_second, utilisation = real_run(mode, arguments)
        base = base or tokens_per_second
        numbers = (f"{tokens_per_second:.1f}", f"{tokens_per_second / base:.2f}", f"{utilisation:.3f}")
        rows.append((mode, *numbers))
    return rows


def real_run(mode: str, arguments: argparse.Namespace) -> tuple[float, float]:
    """(tokens/s, slots in use) after the first batch."""
    from areal_like.data.prompts import conversation
    from areal_like.data.rows import Row
    from areal_like.engines.base import SamplingParams
    from areal_like.rollout.agents.attempts import Attempts
    from areal_like.rollout.agents.base import GroupedRolloutGenerator
    from areal_like.rollout.episode import ModelEpisode
    from areal_like.rollout.pipeline import RolloutPipeline, Share
    from areal_like.rollout.trajectories import TokenRollout

    class Lengths(GroupedRolloutGenerator):
        """Sums, answered at log-normal length whatever the model would like to say."""

        name = "lengths"

        def problem(self, index: int) -> Row:
            return Row(f"What is {index} + {index % 7}?", "", index=index)

        async def run(self, episode: Any) -> float:
            drawn = random.Random(1000 * episode.row.index + episode.attempt).lognormvariate(-(SIGMA**2) / 2, SIGMA)
            length = max(1, min(16 * arguments.tokens, round(drawn * arguments.tokens)))
            await episode.chat(conversation(episode.row), max_new_tokens=length, min_new_tokens=length)
            return 0.0

    flow = control(mode, 0.0, arguments.groups, arguments.attempts)
    with engine(flow.rollouts) as (model, tokenizer):

        async def work() -> tuple[float, float]:
            def episode(agent: Any, row: Row, index: int, attempt: int) -> ModelEpisode:
                def sampling(prompt_length: int, call: int) -> SamplingParams:
                    return SamplingParams(arguments.tokens, seed=1000 * index + attempt)

                rewards: Any = None  # no reward function is called
                return ModelEpisode(row, attempt, model, tokenizer=tokenizer, rewards=rewards, sampling=sampling)

            pipeline = RolloutPipeline([Share(Lengths(), arguments.groups)], flow, Attempts(episode))
            pipeline.start()
            tokens, used, began = 0, [], 0.0
            for number in range(arguments.batches + 1):
                batch = await pipeline.take()
                assert batch is not None
                if number == 0:
                    began = time.perf_counter()
                else:
                    members = [m for group in batch.groups for m in group.members if isinstance(m, TokenRollout)]
                    tokens += sum(member.drawn for member in members)
                    used.append(batch.figures["flow/utilisation"])
                await pipeline.installed(number + 1)
            elapsed = time.perf_counter() - began
            await pipeline.close()
            return tokens / elapsed, sum(used) / len(used)

        return asyncio.run(work())


@contextlib.contextmanager
def engine(requests: int) -> Iterator[tuple[Any, Any]]:
    """The demo model behind its queue."""
    from areal_like.alloc import ModelAllocation
    from areal_like.data.models import DEMO_MODEL, resolve_model
    from areal_like.data.prompts import load_tokenizer
    from areal_like.engines.base import SamplingParams
    from areal_like.rollout.inference.engine import EngineInference
    from areal_like.runtime.local import WorkerGroup
    from areal_like.spec import ModelSpec

    folder = resolve_model(DEMO_MODEL, key="model")
    tokenizer, spec = load_tokenizer(folder), ModelSpec.from_path(folder)
    arguments = {
        "allocation": ModelAllocation.parse("huggingface:d1"),
        "config": None,
        "model_path": str(folder),
        "tokenizer_path": str(folder),
    }
    factory = "areal_like.engines.huggingface.engine:HuggingFaceEngine"
    with (
        tempfile.TemporaryDirectory() as logs,
        WorkerGroup.start("rollout", factory, arguments, 1, threads=2, log_dir=Path(logs)) as workers,
    ):
        workers.call("initialize")
        model = EngineInference(
            workers,
            tokenizer,
            SamplingParams(1),
            max_requests=requests,
            vocabulary=spec.vocab_size,
            context=spec.max_position_embeddings,
        )
        try:
            yield model, tokenizer
        finally:
            model.replicas.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, help="batches of each run; 200, or 6 with --real")
    parser.add_argument("--write", type=Path, help="also write the tables to this file")
    parser.add_argument("--plot", type=Path, help="draw an SVG of the runs in virtual time")
    parser.add_argument("--real", action="store_true", help="the demo model instead of virtual time")
    parser.add_argument("--tokens", type=int, default=16, help="mean answer of --real")
    parser.add_argument("--groups", type=int, default=4, help="groups of a batch of --real")
    parser.add_argument("--attempts", type=int, default=4, help="attempts of a group of --real")
    arguments = parser.parse_args()
    arguments.batches = arguments.batches or (6 if arguments.real else 200)
    when = f"{date.today()}, Python {platform.python_version()}, {platform.machine()}"
    if arguments.real:
        header = ("mode", "tokens/s", "of B/B", "slots in use")
        text = f"Demo model on the CPU, {when}\n\n{table(header, real(arguments))}"
        print(text)
    else:
        runs, slow = virtual(arguments.batches), bounded(max(20, arguments.batches // 4))
        what = f"{GROUPS} groups of {ATTEMPTS}, log-normal lengths of sigma {SIGMA:g}, {arguments.batches} batches"
        second = table(("second bound", *HEADER[3:]), [(name, *row(run)[3:]) for name, run in slow])
        text = (
            f"{what}; {when}\n\n{table(HEADER, [row(run) for run in runs])}\n\n"
            f"R/G with lag 0 under a trainer that takes four times as long as a rollout:\n\n{second}"
        )
        print(text)
        if arguments.plot:
            plot(runs, arguments.plot)
        idle = [
            run for run in runs if run.control.mode == "R/G" and run.control.lag >= 0 and run.utilisation < 1 - IDLE
        ]
        if idle:
            print(f"R/G leaves the engine idle: {[f'{run.utilisation:.3f}' for run in idle]}", file=sys.stderr)
            return 1
    if arguments.write:
        arguments.write.write_text(f"# Overlap\n\n{text}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

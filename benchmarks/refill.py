"""A slot that is refilled as soon as it is free, beside whole batches.

    python benchmarks/refill.py [--model demo:smollm2-135m-instruct] [--threads 2] [--slots 16] [--requests 96]

One replica of the embedded engine in its worker process. Answers have log-normal lengths (sigma 1, mean about 36
tokens, cut at 192), in groups of four with one prompt, each request with a seed. The ways:

- whole batches: as many requests as there are slots, all waited for before the next ones (what `Replicas` did before);
- refill: everything in the queue of `Replicas` from the beginning;
- refill, one by one: a request comes when another has ended, each its own submission, as agents of several turns do:
  every one interrupts the replica;
- refill, bounded calls: as refill, but a call of the engine ends after 8 tokens too, which is the alternative to being
  woken up. Its difference to refill is what short calls cost.

The claim: every answer has its length, and refilling gives 1.3 times the tokens a second or more. Exit status 1 if not.
How many answers are equal token by token is told too: a draw within float32 rounding of the border between two
tokens tips over when the batch is another (see `HuggingFaceEngine`), and changes the rest of that answer.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

from areal_like.alloc import ModelAllocation
from areal_like.data.models import DEMO_MODEL, resolve_model
from areal_like.engines.base import Completion, GenerationRequest, SamplingParams
from areal_like.engines.huggingface import HuggingFaceEngine
from areal_like.rollout.replicas import Replicas
from areal_like.runtime.local import WorkerGroup, interrupted

Answers = dict[int, list[int]]


class BoundedEngine(HuggingFaceEngine):
    """Comes back after 8 forwards at the latest."""

    FORWARDS = 8

    def advance(
        self, requests: list[GenerationRequest], interrupted: Callable[[], bool] | None = None
    ) -> list[Completion]:
        left = iter(range(self.FORWARDS - 1))
        return super().advance(requests, lambda: next(left, None) is None or bool(interrupted and interrupted()))


def make_requests(tokenizer: Any, count: int) -> list[GenerationRequest]:
    draw = random.Random(0)
    requests = []
    for i in range(count):
        if i % 4 == 0:
            chat = [{"role": "user", "content": f"What is {i} + {i + 1}? " + "Explain. " * draw.randint(0, 8)}]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        length = max(1, min(192, round(draw.lognormvariate(3.0, 1.0))))
        sampling = SamplingParams(length, min_new_tokens=length, seed=i)
        requests.append(GenerationRequest([int(t) for t in ids], sampling, i))
    return requests


def whole_batches(group: WorkerGroup, requests: list[GenerationRequest], slots: int) -> Answers:
    answers: Answers = {}
    for start in range(0, len(requests), slots):
        for completion in group.call("generate", requests[start : start + slots], interrupted)[0]:
            answers[completion.request_id] = completion.token_ids
    return answers


def through_replicas(
    group: WorkerGroup, requests: list[GenerationRequest], slots: int, *, one_by_one: bool = False
) -> Answers:
    answers: Answers = {}
    done = threading.Event()
    errors: list[BaseException] = []
    later = deque(requests[slots:] if one_by_one else ())

    def finished(completion: Completion) -> None:
        answers[completion.request_id] = completion.token_ids
        if later:
            replicas.submit([later.popleft()])
        if len(answers) == len(requests):
            done.set()

    def failed(error: BaseException) -> None:
        errors.append(error)
        done.set()

    replicas = Replicas(group, max_requests=slots, on_finished=finished, on_error=failed)
    replicas.submit(requests[:slots] if one_by_one else requests)
    done.wait()
    replicas.close()
    if errors:
        raise errors[0]
    return answers


def start(engine: str, folder: str, threads: int) -> WorkerGroup:
    kwargs = {"allocation": ModelAllocation.parse("huggingface:d1"), "config": None, "model_path": folder}
    sys.path.insert(0, str(__file__).rpartition("/")[0])  # for the workers, which take this process's path
    group = WorkerGroup.start("rollout", engine, kwargs, 1, threads=threads)
    group.call("initialize")
    return group


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    folder, slots = str(resolve_model(arguments.model)), arguments.slots
    requests = make_requests(AutoTokenizer.from_pretrained(folder), arguments.requests)
    lengths = [request.sampling.max_new_tokens for request in requests]
    batches = [lengths[i : i + slots] for i in range(0, len(lengths), slots)]
    slowest = sum(map(max, batches)) * slots / sum(lengths)
    print(f"torch {torch.__version__}, {arguments.threads} threads, {slots} slots, {len(requests)} requests,")
    print(f"{sum(lengths)} tokens; whole batches keep {100 / slowest:.0f} % of the slots busy")

    plain = start("areal_like.engines.huggingface:HuggingFaceEngine", folder, arguments.threads)
    bounded = start("refill:BoundedEngine", folder, arguments.threads)
    ways: dict[str, Callable[[], Answers]] = {
        "whole batches": lambda: whole_batches(plain, requests, slots),
        "refill": lambda: through_replicas(plain, requests, slots),
        "refill, one by one": lambda: through_replicas(plain, requests, slots, one_by_one=True),
        "refill, bounded calls": lambda: through_replicas(bounded, requests, slots),
    }
    best, answers = dict.fromkeys(ways, float("inf")), dict[str, Answers]()
    for _ in range(arguments.repeats):
        for name, way in ways.items():
            begun = time.perf_counter()
            answers[name] = way()
            best[name] = min(best[name], time.perf_counter() - begun)
    plain.close()
    bounded.close()
    print("| way | seconds | tokens/s | x whole batches | answers equal |\n|---|---|---|---|---|")
    for name, seconds in best.items():
        equal = sum(answers[name][i] == tokens for i, tokens in answers["whole batches"].items())
        ratio = best["whole batches"] / seconds
        print(f"| {name} | {seconds:.1f} | {sum(lengths) / seconds:.0f} | {ratio:.2f} | {equal} of {len(requests)} |")
    complete = all([len(answer[i]) for i in range(len(requests))] == lengths for answer in answers.values())
    held = complete and best["whole batches"] >= 1.3 * best["refill"]
    print("held" if held else "not held")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())

"""The embedded inference engine beside what Transformers offers: `generate` and continuous batching.

    python benchmarks/generation.py [--model demo:smollm2-135m-instruct] [--threads 2] [--repeats 3]

Eight chat prompts of 39 to 53 tokens, eight answers each, greedy, end tokens ignored, in two mixes: every answer 16
tokens (the demo), and answers of 16 to 128 tokens. Every way gives the same number of tokens, and log-probabilities of
them; the best of the repeats counts. The ways take turns, so that other load on the machine meets all of them.
The claim: the same tokens as `generate`, and at least twice its tokens per second. Exit status 1 if not.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from areal_like.alloc import ModelAllocation
from areal_like.data.models import DEMO_MODEL, resolve_model
from areal_like.engines.base import GenerationRequest, SamplingParams
from areal_like.engines.huggingface import HuggingFaceEngine

Way = Callable[[list[list[int]], list[int]], list[list[int]]]


class Lengths(StoppingCriteria):
    """Each row ends at its own length."""

    def __init__(self, prompt: int, lengths: list[int]) -> None:
        self.prompt, self.lengths = prompt, torch.tensor(lengths)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return self.lengths <= input_ids.shape[1] - self.prompt


@torch.inference_mode()
def generate(model: Any, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    """`model.generate` on the left-padded batch; scores kept for the log-probabilities."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    output = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=max(lengths),
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([Lengths(longest, lengths)]),
        return_dict_in_generate=True,
        output_logits=True,
    )
    model.compute_transition_scores(output.sequences, output.logits, normalize_logits=True)
    return [row[longest : longest + n].tolist() for row, n in zip(output.sequences, lengths, strict=True)]


def continuous_batching(model: Any, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    """Transformers' paged cache and scheduler, blocks of shared prompts shared."""
    generation = GenerationConfig(do_sample=False, max_new_tokens=max(lengths), eos_token_id=-1, pad_token_id=0)
    config = ContinuousBatchingConfig(block_size=32, num_blocks=512, max_batch_tokens=512, return_logprobs=True)
    done: dict[str, list[int]] = {}
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, block=True, timeout=5
    ) as manager:
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            manager.add_request(list(prompt), max_new_tokens=length, request_id=str(i))
        while len(done) < len(prompts):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done[result.request_id] = list(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError("continuous batching ended early")
    return [done[str(i)] for i in range(len(prompts))]


def engine(engine: HuggingFaceEngine, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    requests = [
        GenerationRequest(prompt, SamplingParams(max_new_tokens=length, min_new_tokens=length, greedy=True))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    return [completion.token_ids for completion in engine.generate(requests)]


def ways(folder: str) -> dict[str, Way]:
    """The engine's own model has its attention; the others have Transformers' default."""
    ours = HuggingFaceEngine(ModelAllocation.parse("huggingface:d1"), config=None, model_path=folder)
    ours.initialize()
    ours.end_ids = frozenset()
    plain = HuggingFaceEngine(ModelAllocation.parse("huggingface:d1"), config=None, model_path=folder)
    plain.initialize()
    plain.end_ids = frozenset()
    assert plain.model is not None
    plain.model.set_attn_implementation("sdpa")
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    return {
        "transformers generate": partial(generate, theirs),
        "transformers continuous batching": partial(continuous_batching, theirs),
        "engine, Transformers' attention": partial(engine, plain),
        "engine": partial(engine, ours),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)

    folder = str(resolve_model(arguments.model))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    chats = [[{"role": "user", "content": f"What is {i} + {i + 1}? " + "Explain. " * i}] for i in range(8)]
    encoded = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=True, return_dict=True)
    prompts: list[list[int]] = [prompt for prompt in encoded["input_ids"] for _ in range(8)]
    draw = random.Random(0)
    mixes = {"16 tokens": [16] * 64, "16 to 128 tokens": [draw.randint(16, 128) for _ in prompts]}

    held = True
    candidates = ways(folder)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {arguments.threads} threads, {folder}")
    print("| mix | way | seconds | tokens/s | x generate | tokens equal to generate |\n|---|---|---|---|---|---|")
    for mix, lengths in mixes.items():
        total, best, answers = sum(lengths), dict.fromkeys(candidates, float("inf")), {}
        for _ in range(arguments.repeats):
            for name, way in candidates.items():
                start = time.perf_counter()
                answers[name] = way(prompts, lengths)
                best[name] = min(best[name], time.perf_counter() - start)
        reference = "transformers generate"
        for name, seconds in best.items():
            pairs = zip(answers[name], answers[reference], strict=True)
            equal = sum(a == b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
            ratio = best[reference] / seconds
            print(f"| {mix} | {name} | {seconds:.1f} | {total / seconds:.0f} | {ratio:.2f} | {equal} of {total} |")
            held &= equal == total and (name != "engine" or ratio >= 2)
    print("held" if held else "not held")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())

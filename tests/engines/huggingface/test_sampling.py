"""What is drawn: frequencies against exact probabilities, seeds, ends."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from areal_like.alloc import ModelAllocation
from areal_like.engines.base import GenerationRequest, SamplingParams
from areal_like.engines.huggingface import HuggingFaceEngine
from areal_like.engines.huggingface.sampling import sample
from areal_like.engines.huggingface.sequences import Sequence

PROMPT = [20, 31, 44]


def make_engine(folder, **kwargs) -> HuggingFaceEngine:
    engine = HuggingFaceEngine(ModelAllocation.parse("huggingface:d1"), config=None, model_path=str(folder), **kwargs)
    engine.initialize()
    return engine


def exact(folder, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """Probabilities of the token after PROMPT, by the definitions, in plain numpy."""
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([PROMPT])).logits[0, -1].double().numpy()
    p = np.exp(logits / temperature - (logits / temperature).max())
    p /= p.sum()
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0
        p /= p.sum()
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]  # a token stays while those before it do not reach top_p
        p[order[before >= top_p]] = 0
        p /= p.sum()
    return p


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_p": 0.6},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.7},
        {"top_k": 10**6},
    ],
)
def test_frequencies_equal_probabilities(models, limits: dict) -> None:
    count = 4000
    engine = make_engine(models(), seed=1)
    done = engine.generate([GenerationRequest(PROMPT, SamplingParams(1, **limits))] * count)
    seen = Counter(c.token_ids[0] for c in done)
    probabilities = exact(models(), **limits)
    assert all(probabilities[token] > 0 for token in seen)
    # Pearson's chi-square over the tokens expected at least five times, the rest in one class; mean = freedom,
    # variance = 2 * freedom, so five deviations are beyond one in a million.
    classes = [(seen[t], count * p) for t, p in enumerate(probabilities) if count * p >= 5]
    rest = count - sum(n for n, _ in classes), count - sum(e for _, e in classes)
    classes += [rest] if rest[1] >= 5 else []
    statistic = sum((n - e) ** 2 / e for n, e in classes)
    freedom = len(classes) - 1
    assert freedom >= 2
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_rows_with_their_own_parameters(models) -> None:
    """Greedy, tempered and truncated rows in one batch do not disturb each other."""
    engine = make_engine(models())
    kinds = [
        SamplingParams(15, greedy=True),
        SamplingParams(15, temperature=0),
        SamplingParams(15, top_k=1),
        SamplingParams(15, top_p=1e-6),
        SamplingParams(15, seed=3, temperature=1.7),
        SamplingParams(15, seed=3, top_k=4, top_p=0.9),
    ]
    together = engine.generate([GenerationRequest(PROMPT, s) for s in kinds])
    alone = [engine.generate([GenerationRequest(PROMPT, s)])[0] for s in kinds]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert together[0].token_ids == together[1].token_ids == together[2].token_ids == together[3].token_ids
    assert together[4].token_ids != together[5].token_ids


def test_a_seed_gives_the_same_tokens_in_any_company(models) -> None:
    engine = make_engine(models())
    mine = GenerationRequest(PROMPT, SamplingParams(40, seed=11, min_new_tokens=40))
    others = [GenerationRequest([9 + i] * (i + 1), SamplingParams(5 + i)) for i in range(20)]
    alone = engine.generate([mine])[0].token_ids
    assert engine.generate([*others, mine])[-1].token_ids == alone
    assert make_engine(models(), seed=99).generate([mine, *others])[0].token_ids == alone
    other_seed = GenerationRequest(PROMPT, SamplingParams(40, seed=12, min_new_tokens=40))
    assert engine.generate([other_seed])[0].token_ids != alone


def test_without_a_seed_the_engine_s_counts(models, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [GenerationRequest(PROMPT, SamplingParams(10, min_new_tokens=10))] * 4

    def draw(seed: int, rank: str) -> list[list[int]]:
        monkeypatch.setenv("RANK", rank)
        engine = make_engine(models(), seed=seed)
        return [c.token_ids for _ in range(2) for c in engine.generate(asked)]

    first = draw(5, "0")
    assert len(set(map(tuple, first))) == 8  # members of a group differ, and so do calls
    assert draw(5, "0") == first
    assert not set(map(tuple, draw(6, "0"))) & set(map(tuple, first))
    assert not set(map(tuple, draw(5, "1"))) & set(map(tuple, first))  # replicas differ


def test_min_new_tokens_and_stop_token_ids(models) -> None:
    engine = make_engine(models())
    held = engine.generate([GenerationRequest(PROMPT, SamplingParams(30, min_new_tokens=29))] * 50)
    assert all(7 not in c.token_ids[:-1] for c in held)
    assert any(
        c.token_ids[-1:] == [7] and c.finish_reason == "stop"
        for c in engine.generate([GenerationRequest(PROMPT, SamplingParams(30))] * 50)
    )
    engine.end_ids = frozenset()
    free = engine.generate([GenerationRequest(PROMPT, SamplingParams(30, seed=0))])[0]
    stop = free.token_ids[9]
    first = free.token_ids.index(stop)
    done = engine.generate([GenerationRequest(PROMPT, SamplingParams(30, seed=0, stop_token_ids=(stop,)))])[0]
    assert (done.token_ids, done.finish_reason) == (free.token_ids[: first + 1], "stop")
    held = SamplingParams(30, seed=0, stop_token_ids=(stop,), min_new_tokens=first + 1)
    later = engine.generate([GenerationRequest(PROMPT, held)])[0]
    assert len(later.token_ids) > first + 1
    assert stop not in later.token_ids[: first + 1]


def test_logits_that_are_not_finite(models) -> None:
    engine = make_engine(models())
    engine.model.lm_head.weight[3] = float("nan")
    with pytest.raises(FloatingPointError, match="NaN"):
        engine.generate([GenerationRequest(PROMPT, SamplingParams(1))])


def test_the_ends_of_the_distribution(models) -> None:
    """Draws of 0 and of almost 1 take the first and the last possible token, never an impossible one."""
    inf = float("inf")
    logits = torch.tensor([[-inf, 0.0, -inf, 1.0, -inf]]).expand(2, -1)

    def row(draw: float) -> Sequence:
        sequence = Sequence(
            GenerationRequest([1], SamplingParams(9)),
            end_ids=frozenset(),
            vocabulary=5,
            context=99,
            tokenizer=None,
            seed=np.random.SeedSequence(0),
        )
        sequence.draw = lambda: draw
        return sequence

    assert sample(logits, [row(0.0), row(1 - 2**-53)])[0] == [1, 3]


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Token id b is byte b: every stop string spans several tokens, every character beyond ASCII too."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    vocabulary = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=chr(8 + 256)).save_pretrained(folder)
    return str(folder)


class Script:
    """A sequence that is told its tokens: what `Sequence.append` decides, without a model."""

    def __init__(self, tokenizer, text: str, **sampling) -> None:
        self.sequence = Sequence(
            GenerationRequest([65], SamplingParams(**{"max_new_tokens": 99} | sampling)),
            end_ids=frozenset(),
            vocabulary=256,
            context=999,
            tokenizer=tokenizer,
            seed=np.random.SeedSequence(0),
        )
        for byte in text.encode():
            self.sequence.append(byte, -1.0, 0)
            if self.sequence.finish_reason:
                break
        self.text = bytes(self.sequence.generated).decode(errors="replace")
        self.reason = self.sequence.finish_reason


def test_stop_strings(byte_tokenizer: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer)
    for text, sampling, expected in [
        ("So 4.\n\nNext", {"stop": ("\n\n",)}, "So 4.\n\n"),
        ("So 4.\n\nNext", {"stop": ("Next", "4.")}, "So 4."),
        ("a é? b é! c", {"stop": ("é!",)}, "a é? b é!"),
        ("xx ENDS", {"stop": ("END",)}, "xx END"),
        ("one END two END", {"stop": ("END",), "min_new_tokens": 8}, "one END two END"),
        ("one END two", {"stop": ("END",), "min_new_tokens": 7}, "one END"),
    ]:
        script = Script(tokenizer, text, **sampling)
        assert (script.text, script.reason) == (expected, "stop"), text
    assert Script(tokenizer, "nothing here", stop=("END",)).reason is None
    assert Script(tokenizer, "abc", stop=("END",), max_new_tokens=3).reason == "length"
    with pytest.raises(ValueError, match="stop strings: an empty text"):
        Script(tokenizer, "x", stop=("",))


def test_stop_strings_through_the_engine(models, byte_tokenizer: str) -> None:
    engine = make_engine(models(), tokenizer_path=byte_tokenizer)
    assert engine.end_ids == {7, 8}  # the model's and the tokenizer's
    engine.end_ids = frozenset()
    free = engine.generate([GenerationRequest(PROMPT, SamplingParams(60, seed=0))])[0].token_ids
    start = next(i for i in range(5, 58) if all(32 <= b < 127 for b in free[i : i + 2]))
    stop = bytes(free[start : start + 2]).decode()
    done = engine.generate([GenerationRequest(PROMPT, SamplingParams(60, seed=0, stop=(stop,)))])[0]
    end = bytes(free).index(stop.encode()) + 2
    assert (done.token_ids, done.finish_reason) == (free[:end], "stop")

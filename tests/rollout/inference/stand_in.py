"""A stand-in for vLLM and sglang: their HTTP protocol over our own engine, in a process of its own.

The server and the model are real, the HTTP is real; what it cannot show is how the real servers read the arguments.
Model names choose faults: `fail-STATUS-N` answers the first N requests with that status, `drop-N` breaks the first N
connections, `hang` never answers. `GET /seen` gives the bodies and authorisations so far.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from areal_like.alloc import ModelAllocation
from areal_like.engines.base import GenerationRequest, SamplingParams
from areal_like.engines.huggingface import HuggingFaceEngine

torch.set_num_threads(1)
folder = sys.argv[1]
engine = HuggingFaceEngine(ModelAllocation.parse("huggingface:d1"), None, folder, folder)
engine.initialize()
lock = threading.Lock()
seen: list[dict] = []
asked: Counter[str] = Counter()
busy = Counter()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.reply(200, {"seen": seen, "most": busy["most"]})

    def do_POST(self):
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        body = json.loads(raw)
        with lock:
            seen.append({"path": self.path, "authorization": self.headers.get("Authorization"), **body})
            asked[body["model"]] += 1
            number = asked[body["model"]]
        fault, *rest = body["model"].split("-")
        if fault == "fail" and number <= int(rest[1]):
            return self.reply(int(rest[0]), {"error": f"out of order, {self.headers.get('Authorization')}"}, wait="0")
        if fault == "drop" and number <= int(rest[0]):
            self.close_connection = True
            return self.connection.close()
        if fault == "hang":
            time.sleep(3600)
        if fault == "slow":
            with lock:
                busy["now"] += 1
                busy["most"] = max(busy["most"], busy["now"])
            time.sleep(0.1)
            with lock:
                busy["now"] -= 1
        if fault == "text":
            return self.reply(200, None, raw=b"<html>a proxy</html>")
        return self.reply(200, self.answer(body, plain=fault == "plain"))

    def answer(self, body, *, plain):
        chat = self.path.endswith("/chat/completions")
        if chat:
            prompt = engine.tokenizer.apply_chat_template(
                body["messages"], add_generation_prompt=True, tokenize=True, return_dict=False
            )
        else:
            prompt = body["prompt"]
        sampling = SamplingParams(
            body["max_tokens"],
            body.get("min_tokens", 0),
            body["temperature"],
            body["top_p"],
            max(0, body.get("top_k", 0)),
            stop_token_ids=tuple(body.get("stop_token_ids", ())),
            stop=tuple(body.get("stop", ())),
            seed=body.get("seed"),
        )
        with lock:
            (completion,) = engine.generate([GenerationRequest(prompt, sampling)])
        text = engine.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        choice = {"index": 0, "finish_reason": completion.finish_reason}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        top = {}
        if body.get("return_token_ids") and not plain:
            choice["token_ids"] = completion.token_ids
            (top if chat else choice)["prompt_token_ids"] = prompt
        if body.get("logprobs") is True:
            content = [{"token": "?", "logprob": x} for x in completion.log_probs]
            choice["logprobs"] = {"content": content}
        elif body.get("logprobs"):
            choice["logprobs"] = {"tokens": ["?"] * len(completion.log_probs), "token_logprobs": completion.log_probs}
        return {"object": "answer", "choices": [choice], **top}

    def reply(self, status, value, *, wait=None, raw=None):
        data = json.dumps(value).encode() if raw is None else raw
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if wait is not None:
            self.send_header("Retry-After", wait)
        self.end_headers()
        self.wfile.write(data)


listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
listening.daemon_threads = True
print(json.dumps({"url": f"http://127.0.0.1:{listening.server_address[1]}/v1"}), flush=True)
listening.serve_forever()

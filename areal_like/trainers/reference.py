"""The other side of a trial: Transformers' own model, torch's AdamW, one process, one sequence at a time."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal_like.config import OptimizerConfig
from areal_like.data.batch import PackedBatch

__all__ = ["ReferenceModel", "saved_weights"]


class ReferenceModel:
    """A plain training loop to compare with."""

    def __init__(self, path: Path, optimizer: OptimizerConfig, *, dtype: torch.dtype, device: str) -> None:
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self.model = self.load(path, dtype)
        self.clip = optimizer.gradient_clipping
        # Small gradients would round to zero in float16: there the loss is multiplied by it, and gradients divided.
        self.loss_scale = optimizer.initial_loss_scale if dtype is torch.float16 else 1.0
        # AdamW keeps float32 copies of lower-precision weights, as mixed-precision training does.
        self.master = {n: p.detach().float().clone().requires_grad_(True) for n, p in self.trained()}
        decayed = [p for p in self.master.values() if p.ndim > 1]
        plain = [p for p in self.master.values() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": optimizer.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
        )

    def load(self, path: Path, dtype: torch.dtype) -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        return model.to(self.device)

    def trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The parameters that are trained, each once."""
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def logits(self, batch: PackedBatch) -> Tensor:
        """float32 `[tokens, vocabulary]`."""
        with torch.no_grad():
            rows = [self._sequence_logits(ids) for ids in batch.split_tokens(batch.input_ids)]
        return torch.cat(rows).cpu()

    def train(self, batch: PackedBatch) -> tuple[float, float]:
        """One step of cross-entropy, averaged over the loss tokens of the batch; the loss and the gradient norm."""
        weight = float(batch.tokens["loss_mask"].sum())
        total = 0.0
        self.model.zero_grad()
        rows = zip(batch.split_tokens(batch.input_ids), batch.split_tokens(batch.tokens["loss_mask"]), strict=True)
        for ids, mask in rows:
            log_probs = self._sequence_logits(ids)[:-1].log_softmax(-1)
            chosen = log_probs.gather(1, ids[1:, None].to(self.device))[:, 0]
            loss = -(chosen * mask[1:].to(self.device)).sum() / weight
            (loss * self.loss_scale).backward()
            total += float(loss.detach())
        for name, parameter in self.trained():
            gradient = parameter.grad
            self.master[name].grad = None if gradient is None else gradient.float() / self.loss_scale
        norm = torch.nn.utils.clip_grad_norm_(self.master.values(), self.clip)
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.trained():
                parameter.copy_(self.master[name])
        return total, float(norm)

    def adapters(self) -> dict[str, Tensor] | None:
        """The adapters by PEFT's names; None for a model without."""
        return None

    def weights(self) -> dict[str, Tensor]:
        """Weights under the names of a Hugging Face folder (Transformers itself may hold experts fused)."""
        return saved_weights(self.model)

    def _sequence_logits(self, ids: Tensor) -> Tensor:
        return self.model(ids[None].to(self.device), use_cache=False).logits[0].float()


def saved_weights(model: Any) -> dict[str, Tensor]:
    """What a Hugging Face folder of the model holds."""
    with tempfile.TemporaryDirectory(prefix="areal-like-reference-") as folder:
        model.save_pretrained(folder)
        return {k: v for file in Path(folder).glob("*.safetensors") for k, v in load_file(file).items()}

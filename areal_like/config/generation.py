"""How tokens are drawn."""

from __future__ import annotations

from areal_like.config.fields import Section, key


class GenerationConfig(Section):
    """Sampling of rollouts (`gconfig`) and of evaluation (`eval_gconfig`)."""

    n_samples: int = key(1, "Answers drawn for each prompt: the size of a group.", unit="answers", ge=1)
    max_new_tokens: int = key(16384, "Longest answer; generation stops there.", unit="tokens", ge=1)
    min_new_tokens: int = key(0, "No answer ends before this many tokens.", unit="tokens", ge=0)
    max_tokens: int | None = key(
        None, "Longest prompt and answer together; null leaves it to max_new_tokens.", unit="tokens", ge=1
    )
    greedy: bool = key(False, "Take the most likely token instead of drawing one.")
    temperature: float = key(
        1.0, "Logits are divided by it before a token is drawn; 0 takes the most likely token.", ge=0.0
    )
    top_p: float = key(1.0, "Draw from the smallest set of tokens whose probabilities reach this sum.", gt=0.0, le=1.0)
    top_k: int = key(0, "Draw from this many most likely tokens; 0 sets no limit.", unit="tokens", ge=0)
    stop_token_ids: tuple[int, ...] = key((), "Token ids that end an answer, besides those of the model.", strict=False)
    stop: tuple[str, ...] = key((), "Texts that end an answer when they appear in it.", strict=False)
    ignore_eos: bool = key(
        False,
        "Go on after the model's end token.",
        unsupported_unless=(False,),
        why="answers always end at the model's end token",
    )
    frequency_penalty: float = key(
        0.0,
        "Lower the logits of tokens that the answer already contains.",
        unsupported_unless=(0.0,),
        why="the log-probabilities of penalised tokens would not be those that the trainer computes",
    )

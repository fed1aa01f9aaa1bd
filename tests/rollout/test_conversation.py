"""Turns of a conversation as tokens, with the demo model's real tokenizer and template."""

from __future__ import annotations

import pytest

from areal_like.data.models import DEMO_MODEL, resolve_model
from areal_like.data.prompts import load_tokenizer
from areal_like.rollout.conversation import Conversation
from areal_like.rollout.inference.base import Generation
from areal_like.rollout.rows import trajectories
from areal_like.rollout.trajectories import TokenRollout, Turn


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve_model(DEMO_MODEL, key="path"))


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def answer(tokenizer, prompt, text, *, end=True, ids=None):
    """What a model that saw `prompt` and said `text` gives."""
    drawn = ids if ids is not None else tokenizer.encode(text, add_special_tokens=False)
    drawn = [*drawn, tokenizer.eos_token_id] if end else list(drawn)
    return Generation(text, "stop" if end else "length", list(prompt), drawn, [-1.0] * len(drawn), [0] * len(drawn))


def whole(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)


def test_a_first_prompt_is_what_the_template_says(tokenizer):
    assert Conversation(tokenizer).prompt([user("2 + 3?")]) == whole(tokenizer, [user("2 + 3?")])


@pytest.mark.parametrize("end", [True, False], ids=["ended", "cut"])
def test_the_next_turn_begins_with_the_tokens_of_the_last_one(tokenizer, end):
    first = [user("2 + 3?")]
    second = [*first, said("It is 6."), user("Again."), said("5"), user("Thanks.")]
    conversation = Conversation(tokenizer)
    prompt = conversation.prompt(first)
    given = answer(tokenizer, prompt, "It is 6.", end=end)
    conversation.answered(first, given)
    following = conversation.prompt(second[:3])
    assert following[: len(prompt) + len(given.token_ids)] == [*prompt, *given.token_ids]
    assert tokenizer.decode(following) == tokenizer.decode(whole(tokenizer, second[:3]))
    conversation.answered(second[:3], answer(tokenizer, following, "5"))
    assert tokenizer.decode(conversation.prompt(second)) == tokenizer.decode(whole(tokenizer, second))


def test_unusual_tokens_of_the_model_are_kept(tokenizer):
    """The model spelt a word letter by letter, which the tokenizer would not."""
    letters = [tokenizer.encode(c, add_special_tokens=False)[0] for c in "answer"]
    assert letters != tokenizer.encode("answer", add_special_tokens=False)
    first = [user("Say answer.")]
    conversation = Conversation(tokenizer)
    prompt = conversation.prompt(first)
    conversation.answered(first, answer(tokenizer, prompt, "answer", ids=letters))
    following = conversation.prompt([*first, said("answer"), user("Again.")])
    assert following[len(prompt) : len(prompt) + 6] == letters


def test_another_conversation_is_encoded_anew(tokenizer):
    first = [user("2 + 3?")]
    conversation = Conversation(tokenizer)
    conversation.answered(first, answer(tokenizer, conversation.prompt(first), "5"))
    for other in ([user("4 + 4?")], [*first, said("changed"), user("Go on.")], [*first, said("5")]):
        assert conversation.prompt(other) == whole(tokenizer, other)


def test_a_template_that_takes_thinking_out_of_earlier_turns(tokenizer):
    """As Qwen3's does: the model would not see in service what it wrote, so the whole is encoded anew."""

    class Forgetful:
        chat_template = tokenizer.chat_template
        encode, decode = tokenizer.encode, tokenizer.decode

        @staticmethod
        def apply_chat_template(messages, **more):
            kept = [{**m, "content": m["content"].split("</think>")[-1]} for m in messages]
            return tokenizer.apply_chat_template(kept, **more)

    first = [user("2 + 3?")]
    conversation = Conversation(Forgetful)
    conversation.answered(first, answer(tokenizer, conversation.prompt(first), "hm</think>5"))
    later = [*first, said("hm</think>5"), user("Sure?")]
    assert "hm" not in tokenizer.decode(conversation.prompt(later))


def test_bad_conversations(tokenizer):
    with pytest.raises(ValueError, match="at least one message"):
        Conversation(tokenizer).prompt([])


# From turns to the rows that are trained on


def turn(prompt, drawn, version=0, finish="stop"):
    return Turn(prompt, drawn, [-float(t) for t in drawn], [version] * len(drawn), finish)


def test_turns_that_are_prefixes_become_one_sequence():
    turns = [turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6], 1), turn([1, 2, 3, 4, 5, 6], [7, 8], 2, "length")]
    (row,) = trajectories(TokenRollout(turns, 0.5), group=3)
    assert list(row.prompt_ids) == [1, 2] and list(row.completion_ids) == [3, 4, 5, 6, 7, 8]
    assert list(row.drawn) == [True, True, False, True, True, True]
    assert list(row.log_probs) == [-3.0, -4.0, 0.0, -6.0, -7.0, -8.0]
    assert list(row.versions) == [0, 0, -1, 1, 2, 2]
    assert row.truncated and row.reward == 0.5 and row.group == 3


def test_other_turns_become_sequences_of_their_own_with_the_same_reward():
    turns = [turn([1, 2], [3]), turn([1, 9, 3], [4]), turn([1, 9, 3, 4], [5]), turn([7], [])]
    first, second = trajectories(TokenRollout(turns, 1.0), group=0)
    assert (list(first.prompt_ids), list(first.completion_ids)) == ([1, 2], [3]) and first.drawn is None
    assert (list(second.prompt_ids), list(second.completion_ids)) == ([1, 9, 3], [4, 5])
    assert first.reward == second.reward == 1.0


def test_an_episode_that_failed_is_not_trained_on():
    with pytest.raises(ValueError, match="cannot be trained on: the tool broke"):
        trajectories(TokenRollout([turn([1], [2])], None, failure="the tool broke"), group=0)

"""Prompts through a real Transformers tokenizer, made on the spot."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal_like.data.prompts import conversation, encode_prompt, filter_by_length, load_tokenizer, prompt_text
from areal_like.data.rows import DataError, Row

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer():
    words = "<user> <system> <assistant> What is 3 + 4? Answer with the number only. one two three Be brief."
    ids = {word: i for i, word in enumerate(["[UNK]", *dict.fromkeys(words.split(" "))])}
    inner = Tokenizer(models.WordLevel(ids, "[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", chat_template=TEMPLATE)


SUM = Row("State the final answer: 3 + 4 =", "7", {"expression": "3 + 4"}, 0, "reasoning_gym/chain_sum")


def test_a_sum_is_asked_for_the_number_only(tokenizer):
    assert prompt_text(SUM) == "What is 3 + 4? Answer with the number only."
    text = "<user> What is 3 + 4? Answer with the number only. <assistant>"
    assert tokenizer.decode(encode_prompt(SUM, tokenizer)) == text


def test_gsm8k_is_asked_for_a_box_also_as_a_local_copy():
    for row in (Row("Why?", "1", {}, 0, "openai/gsm8k"), Row("Why?", "1", {"solution": "#### 1"}, 0, "./copy.jsonl")):
        assert prompt_text(row) == "Why?\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert prompt_text(Row("Why {x}?", "1", {}, 0, "./other.jsonl")) == "Why {x}?"  # braces of a question are its own


def test_conversations_are_taken_as_they_are(tokenizer):
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "one two"})
    row = Row(messages, "1")
    assert conversation(row) == list(messages)
    assert tokenizer.decode(encode_prompt(row, tokenizer)) == "<system> Be brief. <user> one two <assistant>"
    assert prompt_text(row) == "one two"


def test_without_a_chat_template_the_text_is_the_prompt(tokenizer):
    tokenizer.chat_template = None
    assert tokenizer.decode(encode_prompt(Row("one two", "1"), tokenizer)) == "one two"
    with pytest.raises(ValueError, match="row 5 of there has an empty prompt"):
        encode_prompt(Row(" ", "1", {}, 5, "there"), tokenizer)


def test_long_prompts_are_left_out_and_counted(tokenizer):
    rows = [Row("one", "1"), Row("one two three", "1"), Row("one two", "1")]  # 3, 5, 4 tokens with the template
    filtered = filter_by_length(rows, tokenizer, 4)
    assert list(filtered.rows) == [rows[0], rows[2]]
    assert str(filtered) == "1 of 3 prompts are longer than 4 tokens and are left out"
    assert filter_by_length(rows, tokenizer, None).rows is rows
    with pytest.raises(DataError, match=r"all 3 prompts are longer than max_length 2(.|\n)*the shortest has 3 tokens"):
        filter_by_length(rows, tokenizer, 2)


def test_loading_a_tokenizer(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "model")
    loaded = load_tokenizer(tmp_path / "model")
    assert encode_prompt(SUM, loaded) == encode_prompt(SUM, tokenizer)
    with pytest.raises(DataError, match="there is no such folder"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no tokenizer in .*empty"):
        load_tokenizer(tmp_path / "empty")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"no tokenizer in .*model"):
        load_tokenizer(tmp_path / "model")


def test_a_chat_template_that_refuses_names_the_row(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="chat template refuses row 0 of reasoning_gym/chain_sum: roles must"):
        encode_prompt(SUM, tokenizer)

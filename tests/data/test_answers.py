"""Finding answers in text, and exact numbers."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_like.data.answers import last_boxed, last_number, marked_answer, to_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        (" 7. ", 7),
        ("+7.0", 7),
        ("-3.50", Fraction(-7, 2)),
        ("\N{MINUS SIGN}3", -3),
        ("- 3", -3),
        ("1,234,567", 1234567),
        ("$18", 18),
        ("\\$18.00", 18),
        ("2/4", Fraction(1, 2)),
        ("007", 7),
        ("0.1", Fraction(1, 10)),
        ("1,23", None),
        ("3 4", None),
        ("1e3", None),
        ("3x", None),
        ("1/0", None),
        ("", None),
        (".", None),
        ("-", None),
        ("٣", None),
        ("9" * 65, None),
    ],
)
def test_to_number(text, value):
    assert to_number(text) == value


@given(st.fractions(max_denominator=999))
def test_any_fraction_comes_back(value):
    text = f"{value.numerator}/{value.denominator}"
    assert to_number(text) == (value if len(text) <= 64 else None)


@given(st.text())
def test_no_text_raises(text):
    for function in (to_number, last_number, last_boxed, marked_answer):
        function(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7", "7"),
        ("The answer is 12.", "12"),
        ("3-4", "4"),  # an operator
        ("3 - 4", "4"),
        ("(3)-4", "4"),
        ("it is -4", "-4"),
        ("= -4.5!", "-4.5"),
        ("5 - 9 = \N{MINUS SIGN}4", "-4"),
        ("1,200 apples", "1,200"),
        ("a sum of 3, 4", "4"),
        ("half is 1/2", "1/2"),
        ("x2 b4", None),  # inside words
        ("٣", None),
        ("none", None),
        ("", None),
        ("7\n\n8 + 2 =", "2"),
        ("**42**", "42"),
        ("12%", "12"),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{18}.", "18"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{5} and \boxed{unfinished", "5"),
        (r"\boxed{", None),
        (r"\boxed{}", ""),
        (r"\boxed{a \boxed{b}}", "b"),
        (r"} \boxed{7} }", "7"),
        ("no box", None),
    ],
)
def test_last_boxed(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>7</answer> or <answer> 8 </answer>", "8"),
        (r"answer is 3, I mean \boxed{4}", "4"),
        ("so\n#### 18\nbye", "18"),
        ("The answer is 12.", "12."),
        ("Answer: yes\nthanks", "yes"),
        ("The final answer is: 5", "5"),
        ("the answer is", None),
        ("no mark 5", None),
        ("answering is 5", None),
    ],
)
def test_marked_answer(text, answer):
    assert marked_answer(text) == answer


@pytest.mark.parametrize("unit", ["\\boxed{", "<answer>", "</answer>", "answer is ", "1,", "{", "}", "9", "####"])
def test_a_model_that_repeats_itself_costs_no_time(unit):
    text = unit * (100_000 // len(unit))
    begin = time.monotonic()
    last_number(text), last_boxed(text), marked_answer(text), to_number(text)
    assert time.monotonic() - begin < 2

"""Arithmetic as a model writes it, evaluated exactly and within bounds. Nothing is executed: Python's parser makes a
tree, and only numbers and operators of the tree are computed."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from fractions import Fraction

__all__ = ["ArithmeticFault", "evaluate", "numbers_in", "shown"]

LONGEST = 200
"""Characters of an expression."""

LARGEST = 512
"""Bits of a numerator or denominator, of every intermediate value."""

_SAME = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")"})  # noqa: RUF001
_THOUSANDS = re.compile(r"(?<![\d.])(\d{1,3}(?:,\d{3})+)(?!\d)")
_ALLOWED = re.compile(r"[0-9+\-*/(). ]*")


class ArithmeticFault(ValueError):
    """An expression that has no value here; the message is short and may be shown to a model."""


def evaluate(text: str, *, powers: bool = True) -> Fraction:
    """The exact value of an expression of numbers, `+ - * /`, brackets and (with `powers`) `**` or `^`.

    Raises:
        ArithmeticFault: it is no such expression, divides by zero, or is too large.
    """
    plain = _plain(text)
    return _value(_tree(plain), plain, powers)


def numbers_in(text: str) -> list[Fraction]:
    """The numbers that an expression is written with, in any order.

    Raises:
        ArithmeticFault: it is no expression.
    """
    plain = _plain(text)
    return [_constant(node, plain) for node in ast.walk(_tree(plain)) if isinstance(node, ast.Constant)]


def shown(value: Fraction) -> str:
    """A value as a calculator shows it: exact when it has few decimals, else rounded to 12 significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = value * 10**12
    if scaled.denominator == 1:
        sign = "-" if value < 0 else ""
        whole, decimals = divmod(abs(scaled.numerator), 10**12)
        return f"{sign}{whole}.{decimals:012d}".rstrip("0")
    return f"{float(value):.12g}"


def _plain(text: str) -> str:
    plain = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text.strip().translate(_SAME)).replace("^", "**")
    if not plain:
        raise ArithmeticFault("there is no expression")
    if len(plain) > LONGEST:
        raise ArithmeticFault(f"the expression has more than {LONGEST} characters")
    if not _ALLOWED.fullmatch(plain):
        raise ArithmeticFault("only numbers, + - * / ** and brackets are allowed")
    return plain


def _tree(plain: str) -> ast.expr:
    try:
        return ast.parse(plain, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ArithmeticFault("this is not an expression") from None


def _value(node: ast.expr, plain: str, powers: bool) -> Fraction:
    if isinstance(node, ast.Constant):
        return _constant(node, plain)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        operand = _value(node.operand, plain, powers)
        return -operand if isinstance(node.op, ast.USub) else operand
    if isinstance(node, ast.BinOp):
        compute = _OPERATORS.get(type(node.op))
        if compute is not None and (powers or compute is not _power):
            return _bounded(compute(_value(node.left, plain, powers), _value(node.right, plain, powers)))
    raise ArithmeticFault("only numbers, + - * / and brackets are allowed")


def _constant(node: ast.Constant, plain: str) -> Fraction:
    return _bounded(Fraction(plain[node.col_offset : node.end_col_offset]))  # as it is written, not as a float


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > LARGEST:
        raise ArithmeticFault("the number is too large")
    return value


def _divide(left: Fraction, right: Fraction) -> Fraction:
    if right == 0:
        raise ArithmeticFault("division by zero")
    return left / right


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ArithmeticFault("an exponent is a whole number")
    if base == 0 and exponent < 0:
        raise ArithmeticFault("division by zero")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    # The result has more than (bits - 1) * |exponent| bits: known before it is computed.
    if (bits - 1) * abs(exponent.numerator) > LARGEST:
        raise ArithmeticFault("the number is too large")
    return base ** (exponent.numerator % 2 if bits == 1 and abs(base) == 1 else exponent.numerator)


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: _divide,
    ast.Pow: _power,
}

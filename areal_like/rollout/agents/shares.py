"""How many groups of a batch each environment has."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

__all__ = ["shares"]


def shares(weights: Sequence[float], groups: int) -> list[int]:
    """Groups of each environment, by largest remainder (Hamilton's method); they sum to `groups`.

    Every positive weight has at least one group, and weight 0 has none: who would have less than one group gets one,
    and the others share the rest. Of equal remainders the earlier one wins. The same weights always give the same
    shares.

    Raises:
        ValueError: a weight is negative or not finite, none is positive, or there are fewer groups than positive
            weights.
    """
    if any(not 0 <= weight < float("inf") for weight in weights):
        raise ValueError(f"weights are finite and at least 0, not {list(weights)}")
    exact = [Fraction(str(weight)) for weight in weights]  # 0.1 is meant as a tenth
    sampled = [i for i, weight in enumerate(exact) if weight > 0]
    if not sampled:
        raise ValueError("no weight is positive: nothing would be sampled")
    if len(sampled) > groups:
        raise ValueError(f"{groups} groups cannot hold {len(sampled)} environments with at least one group each")
    found = [0] * len(exact)
    while True:
        total = sum(exact[i] for i in sampled)
        small = [i for i in sampled if exact[i] * groups < total]
        if not small:
            break
        for i in small:
            found[i] = 1
        groups -= len(small)
        sampled = [i for i in sampled if i not in small]
    quotas = {i: exact[i] * groups / total for i in sampled}
    for i, quota in quotas.items():
        found[i] = int(quota)
    rest = groups - sum(found[i] for i in sampled)
    for i in sorted(sampled, key=lambda i: (int(quotas[i]) - quotas[i], i))[:rest]:
        found[i] += 1
    return found

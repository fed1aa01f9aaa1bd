"""Print the version of every distribution that the project and its development tools bring into this environment.

Distributions that happen to be installed beside them (of other extras, or by hand) are left out.
"""

from __future__ import annotations

from importlib.metadata import Distribution, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = "areal-like"


def required(found: Distribution, extras: set[str]) -> list[Requirement]:
    """The requirements of a distribution that apply here, with these extras of it."""
    requirements = [Requirement(text) for text in found.requires or ()]
    return [
        requirement
        for requirement in requirements
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in {"", *extras})
    ]


def installed(name: str, extras: set[str]) -> dict[str, str]:
    """Name and version of everything that `name` needs, itself included."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(canonicalize_name(name), frozenset(extras))]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        found = distribution(node[0])
        versions[node[0]] = found.version
        waiting += [(canonicalize_name(item.name), frozenset(item.extras)) for item in required(found, set(node[1]))]
    return versions


def main() -> None:
    versions = installed(PROJECT, {"dev", "megatron-bridge"})
    del versions[PROJECT]
    print("# The tested versions, for Python 3.12: `make pins` writes this file.")
    for name, version in sorted(versions.items()):
        print(f"{name}=={version}")


if __name__ == "__main__":
    main()

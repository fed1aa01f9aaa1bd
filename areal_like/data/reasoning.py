"""Generated tasks of the package `reasoning-gym`: `path: reasoning_gym/TASK`, offline, with the task's own scorer."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, overload

from areal_like.alloc.diagnostics import closest
from areal_like.data.rows import Asker, Row

PREFIX = "reasoning_gym/"
_OTHER_SPLIT = 10**9  # a task draws row i from seed + i: splits that are this far apart share no row


class GeneratedRows(Sequence[Row]):
    """The rows of one task; each is generated when it is asked for, always the same."""

    def __init__(self, task: str, parameters: Mapping[str, Any]) -> None:
        self.task = task
        self.parameters = dict(parameters)
        self._json = json.dumps(self.parameters, sort_keys=True)
        self._generator = generator(task, self._json)

    def __len__(self) -> int:
        return len(self._generator)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        entry = self._generator[position]
        answer = entry["answer"]
        metadata = {**entry["metadata"], "entry": entry, "parameters": self._json}
        return Row(entry["question"], "" if answer is None else str(answer), metadata, position, PREFIX + self.task)


def generated_rows(path: str, parameters: Mapping[str, Any], split: str, seed: int, asker: Asker) -> GeneratedRows:
    """The rows of `reasoning_gym/TASK`.

    Args:
        parameters: of the task, as the package names them; `size` and `seed` among them.
        split: other splits than train draw from another seed, so that no row is shared.
        seed: when `parameters` has none.

    Raises:
        DataError: unknown task, or a parameter that the task does not take.
    """
    from reasoning_gym.factory import DATASETS

    task = path.removeprefix(PREFIX)
    if task not in DATASETS:
        near = closest(task, DATASETS)
        raise asker.error(
            "AL563",
            f"reasoning_gym has no task {task!r}",
            f"it has {len(DATASETS)}, among them chain_sum, gsm_symbolic, basic_arithmetic, simple_equations",
            alternatives=(PREFIX + near,) if near else (),
        )
    settings = DATASETS[task][1]
    known = [f.name for f in fields(settings)] if hasattr(settings, "__dataclass_fields__") else []
    for name in parameters:
        if known and name not in known:
            near = closest(name, known)
            raise asker.error(
                "AL564",
                f"{task} takes no parameter {name!r}",
                f"it takes {', '.join(known)}",
                key="kwargs",
                alternatives=(near,) if near else (),
            )
    chosen = {**parameters}
    if chosen.get("seed") is None:  # null would draw a new one each time
        chosen["seed"] = seed if split == "train" else seed + _OTHER_SPLIT
    try:
        rows = GeneratedRows(task, chosen)
        rows[0]
    except IndexError as error:
        raise asker.error("AL565", f"{task} has no rows", "set size to at least 1", key="kwargs") from error
    except (AssertionError, TypeError, ValueError, KeyError) as error:
        reason = str(error) or type(error).__name__
        raise asker.error(
            "AL564", f"{task} refuses {dict(parameters)}: {reason}", f"it takes {', '.join(known)}", key="kwargs"
        ) from error
    return rows


@functools.lru_cache(maxsize=32)
def generator(task: str, parameters: str) -> Any:
    """The package's own data set of a task; `parameters` as JSON. It has rows by index, and `score_answer`."""
    import reasoning_gym

    return reasoning_gym.create_dataset(task, **json.loads(parameters))

"""The arguments of an agent type: those of its constructor, as a Pydantic model.

A constructor is its own schema: names, types, defaults, and with `Annotated[..., Field(...)]` bounds and descriptions.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

__all__ = ["SEED", "arguments_model"]

SEED = "seed"
"""An argument of this name that the file does not give is the run's seed."""

_CONFIG = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


@cache
def arguments_model(kind: type[Any]) -> type[BaseModel]:
    """The model of the arguments that a file may give.

    Raises:
        TypeError: the constructor takes arguments that a file cannot give: positional-only ones, `*args`, `**kwargs`,
            or one without a type. The message names it.
    """
    hints = get_type_hints(kind.__init__, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(kind).parameters.items()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{kind.__name__}.__init__ takes {parameter}: arguments of a file are passed by name")
        if name not in hints:
            raise TypeError(f"{kind.__name__}.__init__ does not say of what type {name} is")
        fields[name] = (hints[name], ... if parameter.default is parameter.empty else parameter.default)
    model: type[BaseModel] = create_model(kind.__name__, __config__=_CONFIG, **fields)
    return model

"""Where agent types are declared, and Megatron-RL's names for some: the check reads them too, without importing one."""

from __future__ import annotations

__all__ = ["ALIASES", "GROUP"]

GROUP = "areal_like.agents"

ALIASES = {"GSM8KAgent": "gsm8k", "DAPOAgent": "dapo", "AIMEAgent": "aime", "CountdownAgent": "countdown"}

"""The rollout bank: finished groups on disk before anybody trains on them, so that SIGKILL costs none.

Read in this order: `bank.py` (what is promised), `writer.py` (how many groups share one fsync), `record.py` and
`values.py` (a group as bytes), `lines.py` and `generation.py` (the files), `manifest.py` (which files count), `lock.py`
(one writer), `recovery.py` (what comes back), `reader.py` (looking without touching). `docs/bank.md` is for its owner.
"""

from areal_like.rollout.bank.bank import RolloutBank
from areal_like.rollout.bank.manifest import BankError
from areal_like.rollout.bank.reader import BankReader
from areal_like.rollout.bank.record import LogProbWidth
from areal_like.rollout.bank.recovery import Dropped, Recovered

__all__ = ["BankError", "BankReader", "Dropped", "LogProbWidth", "Recovered", "RolloutBank"]

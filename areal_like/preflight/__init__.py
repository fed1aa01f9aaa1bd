"""What can be known before anything starts: allocation x model x cluster x job -> diagnostics. No torch."""

from areal_like.preflight.check import check, check_job, check_layout, is_legal
from areal_like.preflight.job import Cluster, Job, Role, make_job

__all__ = ["Cluster", "Job", "Role", "check", "check_job", "check_layout", "is_legal", "make_job"]

"""What can be known before anything starts: allocation x model x cluster x job -> diagnostics. No torch."""

from areal_like.preflight.check import check, check_layout

__all__ = ["check", "check_layout"]

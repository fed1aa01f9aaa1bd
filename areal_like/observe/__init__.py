"""What a run shows of itself: figures of each step, progress on the terminal, generated samples, curves.

Figures are named `group/name`: `reward/mean`, `actor/loss`, `actor/grad_norm`, `actor/approx_kl`, `actor/entropy`,
`speed/tokens_per_second`, `seconds/generation`.
"""

from areal_like.observe.metrics import MetricsWriter, keep_steps, read_metrics
from areal_like.observe.progress import Progress
from areal_like.observe.samples import Sample, SampleWriter
from areal_like.observe.timers import PhaseTimers

__all__ = ["MetricsWriter", "PhaseTimers", "Progress", "Sample", "SampleWriter", "keep_steps", "read_metrics"]

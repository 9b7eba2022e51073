"""The training run's figures, in steps and tokens, never in wall time: the same plan gives the same run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """`workers`: threads that share a batch.

    `long_from`: the share of the steps after which rows are `long_row` instead of `short_row` tokens long.
    """

    steps: int = 1300
    tokens_per_batch: int = 4096
    short_row: int = 256
    long_row: int = 512
    long_from: float = 0.85
    warmup: int = 40
    matrix_lr: float = 0.02
    other_lr: float = 0.003
    momentum: float = 0.95
    weight_decay: float = 0.1
    gradient_clip: float = 1.0
    workers: int = 2
    seed: int = 3
    evaluate_every: int = 50

    def row_length(self, step: int) -> int:
        """Return the length of rows: short ones first (attention is cheaper), the whole context at the end."""
        return self.long_row if step >= self.long_from * self.steps else self.short_row

    def lr_factor(self, step: int) -> float:
        """Return a factor that rises in `warmup` steps, is flat for 15 % of the run, and falls straight to zero."""
        flat = 0.15 * self.steps
        decay = (self.steps - step) / (self.steps - flat) if step > flat else 1.0
        return min((step + 1) / self.warmup, decay)

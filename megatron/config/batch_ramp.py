"""--rampup-batch-size: the global batch size as a function of the samples consumed, and how long a run then is."""

from __future__ import annotations

import dataclasses
import functools

from megatron.config.errors import refuse


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """The global batch size, samples: from `start` up to `final` in steps of `increment` over `ramp_samples`.

    The steps are of equal length in samples, as upstream's; a run resumes in the middle of a ramp by its consumed
    samples alone. Without a ramp `start` is `final`.
    """

    final: int
    start: int
    increment: int = 1
    ramp_samples: int = 0

    def at(self, consumed_samples: int) -> int:
        """The size of the batch that begins after `consumed_samples`."""
        steps = (self.final - self.start) // self.increment
        if steps == 0 or consumed_samples > self.ramp_samples:
            return self.final
        # Not more than `final`: with a ramp of 0 samples, and after its last sample.
        done = int(consumed_samples / (self.ramp_samples / steps)) if self.ramp_samples else steps
        return min(self.start + done * self.increment, self.final)

    def consumed(self, iterations: int) -> int:
        """Samples of the first `iterations`."""
        consumed = 0
        for done in range(iterations):
            if self.at(consumed) == self.final:
                return consumed + (iterations - done) * self.final
            consumed += self.at(consumed)
        return consumed

    def iterations(self, train_samples: int) -> int:
        """Iterations that `train_samples` make; an incomplete last batch is dropped."""
        if self.start == self.final:
            return train_samples // self.final
        count = consumed = 0
        while consumed <= self.ramp_samples and consumed + self.at(consumed) <= train_samples:
            consumed += self.at(consumed)
            count += 1
        if consumed <= self.ramp_samples:  # the run ends within the ramp
            return count
        return count + (train_samples - consumed) // self.final


def batch_sizes(ramp: tuple[int, ...], global_batch_size: int, step: int) -> BatchSizes:
    """The sizes that --rampup-batch-size and --global-batch-size describe.

    `step`: --micro-batch-size x data-parallel size, which each batch size must be a multiple of. Raises ConfigError.
    """
    if not ramp:
        return BatchSizes(global_batch_size, global_batch_size)
    refuse_ramp = functools.partial(refuse, "--rampup-batch-size", ramp)
    if len(ramp) != 3:
        refuse_ramp("give three numbers: first batch size, increment, samples of the ramp")
    start, increment, ramp_samples = ramp
    if start < 1 or increment < 1 or ramp_samples < 0:
        refuse_ramp("the first two must be at least 1, the third at least 0")
    if start > global_batch_size or (global_batch_size - start) % increment:
        refuse_ramp(
            f"steps of {increment} do not lead from {start} to --global-batch-size {global_batch_size}; change one of "
            "the three"
        )
    if start % step or (start != global_batch_size and increment % step):
        refuse_ramp(f"first size and increment must be multiples of --micro-batch-size x data-parallel size = {step}")
    return BatchSizes(global_batch_size, start, increment, ramp_samples)

"""A published figure, what this project's code makes of its inputs, and whether the two agree."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

EQUAL, CLOSE, WITHIN, MISSED = "equal", "close", "in the range", "missed"
DIFFERS = "BEYOND ITS LIMIT"
CLOSE_SHARE = 0.05  # off by more: missed


@dataclass(frozen=True)
class Source:
    """Where a figure was published. `read`: the text in which it was read, if that is not the source itself."""

    name: str
    url: str
    read: str | None = None


@dataclass(frozen=True)
class Figure:
    """A published number beside the predicted one; `where`: its table or section; `inputs`: what the source states.

    `digits` after the decimal point are those of the source (-1: tens). `predicted` is a pair where the inputs are a
    range. `limit` is the share of the published number by which the prediction may be off before that is an error, in
    its direction (0.1: up to 10 % above); it was set when the deviation was known. `why` is the reason. `unit_chosen`:
    the source writes another unit, and this one was chosen when the prediction was known.
    """

    what: str
    source: Source
    where: str
    published: float
    unit: str
    inputs: str
    predicted: float | tuple[float, float]
    _: KW_ONLY
    digits: int = 0
    limit: float = 0.0
    why: str = ""
    unit_chosen: bool = False

    @property
    def deviation(self) -> float | None:
        """Of the prediction from the published number, as a share of that; None if that is a range."""
        if isinstance(self.predicted, tuple):
            return None
        return self.predicted / self.published - 1

    @property
    def verdict(self) -> str:
        """EQUAL: to the digits of the source. CLOSE: off by at most CLOSE_SHARE. MISSED: by more.

        DIFFERS: beyond the limit of this figure, or in the other direction.
        """
        if isinstance(self.predicted, tuple):
            return WITHIN if self.predicted[0] <= self.published <= self.predicted[1] else DIFFERS
        if round(self.predicted, self.digits) == self.published:
            return EQUAL
        least, most = sorted((0.0, self.limit))
        deviation = self.predicted / self.published - 1
        if not least <= deviation <= most:
            return DIFFERS
        return CLOSE if abs(deviation) <= CLOSE_SHARE else MISSED

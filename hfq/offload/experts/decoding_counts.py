"""Hits of the expert cache while tokens are decoded one by one."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DecodingCounts"]


@dataclass
class DecodingCounts:
    """Lookups so far of the calls for single tokens.

    A prompt needs most experts of a layer at once, so its hits tell little about the next token.

    Attributes:
        period: Number of calls of one token.
        calls: Number of calls.
        lookups: Number of experts that they were routed to.
        kept: Number of those that were in the cache, and were read for no guess.
    """

    period: int
    calls: int = 0
    lookups: int = 0
    kept: int = 0

    @property
    def tokens(self) -> int:
        """Number of whole tokens."""
        return self.calls // max(self.period, 1)

    @property
    def hit_rate(self) -> float:
        """Share of the experts that were not read; 0 before the first one."""
        return self.kept / self.lookups if self.lookups else 0.0

    def note(self, lookups: int, kept: int) -> None:
        """Counts lookups, and those of them that were kept."""
        self.lookups += lookups
        self.kept += kept

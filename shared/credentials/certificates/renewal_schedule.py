"""When a certificate is renewed, and when it is tried again: arithmetic without a clock.

1. A renewal is due when a share of the certificate's life is over, less a random part, so that the workloads
   of one rollout do not come to their authority all at once, a day later, every day.
2. After a failure there is a pause, at random between half of a bound and the bound, which doubles with
   each failure in a row up to a most. It is never more than a quarter of the life that is left: what remains
   of the certificate is enough for some attempts, however short it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.backoff import doubled_s, half_or_more

LEFT_PART = 0.25


@dataclass(frozen=True, slots=True)
class RenewalRules:
    """The settings of a schedule; seconds."""

    share: float = 0.5
    """Of a certificate's life, after which it is renewed: half, as SPIFFE's and Istio's agents have it. An
    authority may be away for the other half. In 0.1..0.9."""

    jitter: float = 0.1
    """Of a certificate's life, by which a renewal may be earlier at random; less than `share`."""

    first_pause_s: float = 1.0
    """After the first failure: a restarted authority is there again within seconds."""

    most_pause_s: float = 300.0
    """An authority that has come back hears of everybody within five minutes, and is not overrun."""

    def due_at(self, start_s: float, end_s: float, chance: float) -> float:
        """When a certificate that lives from `start_s` to `end_s` is to be renewed; `chance` is in 0..1."""
        life_s = max(0.0, end_s - start_s)
        return start_s + life_s * (self.share - self.jitter * chance)

    def pause(self, failures: int, left_s: float, chance: float) -> float:
        """How long to wait after so many failures in a row (1 and up), while the certificate in use has
        `left_s` seconds to live (none or expired: 0 or less)."""
        bound_s = doubled_s(self.first_pause_s, self.most_pause_s, failures - 1)
        if left_s > 0:
            bound_s = max(self.first_pause_s, min(bound_s, left_s * LEFT_PART))
        return half_or_more(bound_s, chance)

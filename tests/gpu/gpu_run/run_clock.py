"""What the run has done, what it skipped and why, and how long it may still take."""

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RunLog:
    """Owner of the results. begin: monotonic; budget in seconds."""

    budget: float
    begin: float = field(default_factory=time.monotonic)
    results: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def seconds_left(self) -> float:
        return self.budget - (time.monotonic() - self.begin)

    def has_time(self, what: str, seconds: float) -> bool:
        """False, and noted, when less is left than `what` needs."""
        left = self.seconds_left()
        if left >= seconds:
            return True
        self.skipped.append(f"{what}: {seconds:.0f} s needed, {left:.0f} s left")
        self.say(f"skipped {self.skipped[-1]}")
        return False

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:6.1f} s] {text}", flush=True)

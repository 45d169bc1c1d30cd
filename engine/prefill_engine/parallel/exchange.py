"""What ranks of one engine tell each other before a step, so that all run it or none does (serving.md 2.4, step 6).

LocalExchange is the one-rank form. The trap for the form with more ranks: a rank without work still steps (placeholder) as long
as any rank has work, else the others wait in an all-to-all for ever.
"""

from typing import Protocol

from prefill_engine.lockstep import StepWish


class Exchange(Protocol):
    """Agreement of all ranks on one step."""

    def agree(self, wish: StepWish) -> tuple[StepWish, ...]:
        """Wishes of all ranks, by rank; every rank gets the same answer.

        Raises:
            PeerError: a rank did not answer in 5 s.
        """
        ...


class LocalExchange:
    """One rank: its wish is the agreement."""

    def agree(self, wish: StepWish) -> tuple[StepWish, ...]:
        return (wish,)

import pytest

from prefill_engine.kvd.open_plan import OpenPlan, Source, plan_open

LETTERS = {
    "P": Source.POOL,
    "p": Source.POOL,
    "J": Source.JOIN,
    "C": Source.CHECK,
    "R": Source.READ,
    "-": Source.ABSENT,
}


@pytest.mark.parametrize(
    ("blocks", "num_takeable", "budget", "expected"),
    [
        ("", 0, 0, (0, 0, 0)),
        ("---", 9, 9, (0, 0, 0)),
        ("PPP", 0, 0, (3, 0, 0)),
        ("ppp", 3, 0, (3, 0, 0)),
        ("PP-RR", 9, 9, (2, 0, 0)),
        ("PJCR", 1, 1, (4, 1, 0)),
        ("RRRR", 2, 9, (2, 2, 2)),
        ("RRRR", 9, 3, (3, 3, 1)),
        ("RRRR-R", 0, 9, (0, 0, 4)),
        ("pR", 1, 9, (1, 0, 1)),
        ("Rp", 1, 9, (1, 1, 1)),
        ("Rp", 2, 9, (2, 1, 0)),
        ("RPPPR", 1, 9, (4, 1, 1)),
    ],
    ids=[
        "nothing-asked",
        "nothing-known",
        "held-by-others-costs-nothing",
        "what-is-in-the-pool-always-fits",
        "ends-at-the-first-gap",
        "every-source",
        "no-room",
        "no-read-budget",
        "no-room-at-all",
        "own-block-takes-the-last-room",
        "read-would-evict-the-next-block",
        "both-fit",
        "held-blocks-after-a-read",
    ],
)
def test_open_leases_the_longest_run_that_fits(
    blocks: str, num_takeable: int, budget: int, expected: tuple[int, int, int]
) -> None:
    """p = in the pool and held by nobody else."""
    sources = [LETTERS[letter] for letter in blocks]
    takeable = [letter == "p" for letter in blocks]
    plan = plan_open(sources, takeable, num_takeable=num_takeable, read_budget_blocks=budget)
    assert plan == OpenPlan(num_blocks=expected[0], num_reads=expected[1], shrunk_blocks=expected[2])
    assert (plan.retry_seconds > 0) is (expected[2] > 0)

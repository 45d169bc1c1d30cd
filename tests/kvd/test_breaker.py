from prefill_engine.kvd.breaker import Breaker


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_opens_after_failures_in_a_row_and_lets_one_try_through_per_pause() -> None:
    time = Time()
    breaker = Breaker(limit=3, clock=time)
    for _ in range(2):
        breaker.fail()
    breaker.succeed()
    for _ in range(2):
        breaker.fail()
    assert breaker.allows()
    assert not breaker.is_open
    breaker.fail()
    assert breaker.is_open
    assert not breaker.allows()
    time.now = 0.6
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    breaker.succeed()
    assert breaker.allows()
    assert not breaker.is_open


def test_pause_doubles_up_to_half_a_minute() -> None:
    time = Time()
    breaker = Breaker(limit=1, clock=time)
    pauses = []
    for _ in range(9):
        breaker.fail()
        start = time.now
        while not breaker.allows():
            time.now += 0.25
        pauses.append(time.now - start)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_try_that_never_reports_does_not_block_the_next() -> None:
    time = Time()
    breaker = Breaker(limit=1, clock=time)
    breaker.fail()
    time.now = 0.6
    assert breaker.allows()
    time.now = 1.2
    assert breaker.allows()

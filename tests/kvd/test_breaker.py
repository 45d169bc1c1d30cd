from prefill_engine.kvd.breaker import Breaker, Renewal


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


def test_renewal_is_due_after_pauses_that_double_while_it_fails() -> None:
    time = Time()
    renewal = Renewal(first_seconds=15.0, last_seconds=100.0, clock=time)
    due = []
    for second in range(400):
        time.now = float(second)
        if renewal.is_due(is_failing=True):
            due.append(second)
    assert due == [15, 45, 105, 205, 305]


def test_a_medium_that_answers_in_between_is_not_renewed() -> None:
    time = Time()
    renewal = Renewal(first_seconds=15.0, last_seconds=100.0, clock=time)
    for second in range(100):
        time.now = float(second)
        assert not renewal.is_due(is_failing=second % 15 != 0)


def test_only_an_answer_makes_the_pauses_short_again() -> None:
    """After a renewal the breakers are closed: that alone proves nothing."""
    time = Time()
    renewal = Renewal(first_seconds=15.0, last_seconds=100.0, clock=time)

    def seconds_until_due() -> float:
        started = time.now
        assert not renewal.is_due(is_failing=False)
        while not renewal.is_due(is_failing=True):
            time.now += 1.0
        return time.now - started

    assert [seconds_until_due() for _ in range(5)] == [15, 30, 60, 100, 100]
    renewal.succeed()
    assert seconds_until_due() == 15

"""Log lines are JSON objects with their fields; bound ids are on each line; exceptions are one line too."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from prefill_engine.log import JsonFormatter, bind


@pytest.fixture
def stream() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(JsonFormatter({"engine_id": "pe-1"}))
    logger = logging.getLogger("test.log")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    logger.propagate = False
    yield logger, text
    logger.removeHandler(handler)


def lines(text: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.getvalue().splitlines()]


def test_line_has_the_standard_fields_constants_and_extras(stream: tuple[logging.Logger, io.StringIO]):
    logger, text = stream
    logger.info("step done", extra={"step_id": 7})
    (line,) = lines(text)
    assert set(line) == {"ts", "level", "logger", "message", "engine_id", "step_id"}
    assert (line["level"], line["logger"], line["message"], line["step_id"]) == ("INFO", "test.log", "step done", 7)


def test_bound_logger_adds_ids_and_keeps_extras(stream: tuple[logging.Logger, io.StringIO]):
    logger, text = stream
    bind(logger, {"request_id": "r1"}).info("x", extra={"rows": 3})
    (line,) = lines(text)
    assert (line["request_id"], line["rows"]) == ("r1", 3)


def test_exception_stays_on_one_line(stream: tuple[logging.Logger, io.StringIO]):
    logger, text = stream
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logger.exception("failed")
    (line,) = lines(text)
    assert "RuntimeError: boom" in str(line["exception"])

"""JSON log lines on stderr: ts, level, logger, message and whatever came in `extra=`. Importable by all, imports none of ours.

The trap: no prompt content. Callers never pass token ids, images, keys or ticket ids; `bind` adds the ids of a request.
"""

import json
import logging
import sys
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any, TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object per line. constants: fields of every line (engine id, rank)."""

    def __init__(self, constants: Mapping[str, object]) -> None:
        super().__init__()
        self._constants = dict(constants)

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, tz=UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._constants,
        }
        line.update((key, value) for key, value in vars(record).items() if key not in _STANDARD)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class RequestLogger(logging.LoggerAdapter[logging.Logger]):
    """Adds the bound fields to each line; a line's own extra wins."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, {**kwargs, "extra": {**(self.extra or {}), **(kwargs.get("extra") or {})}}


def bind(logger: logging.Logger, ids: Mapping[str, object]) -> RequestLogger:
    """A logger whose lines carry these ids, e.g. request_id, attempt, attempt_id."""
    return RequestLogger(logger, dict(ids))


def setup_logging(*, level: str, constants: Mapping[str, object], stream: TextIO | None = None) -> None:
    """Sends all log records of the process as JSON lines to `stream` (stderr)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(constants))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)

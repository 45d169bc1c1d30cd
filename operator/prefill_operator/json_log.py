"""JSON log lines on stderr: ts, level, logger, message and whatever came in `extra=`."""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# kopf puts whole objects into its records.
_DROPPED = frozenset({"settings", "k8s_ref", "k8s_skip"})


class JsonFormatter(logging.Formatter):
    """One JSON object per line. constants: fields of every line."""

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
        line.update((key, value) for key, value in vars(record).items() if key not in _STANDARD | _DROPPED)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def setup_logging(*, level: str, constants: Mapping[str, object], stream: TextIO | None = None) -> None:
    """Sends all log records of the process as JSON lines to `stream` (stderr); kopf's chatter from WARNING on."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(constants))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.getLogger("kopf").setLevel(logging.WARNING)

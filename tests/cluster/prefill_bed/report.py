"""Results of a session as one Markdown table: case, result, seconds, and the figures a case measured."""

import os
import platform
import subprocess
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from prefill_bed.cluster import ROOT


@dataclass(slots=True)
class CaseResult:
    title: str
    group: str
    outcome: str = "passed"
    seconds: float = 0.0
    figures: list[str] = field(default_factory=list)
    failure: str = ""


def hardware() -> str:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{os.cpu_count()} × {model}, {pages / 2**30:.0f} GiB, Linux {platform.release()}"


def commit() -> str:
    """Id of the commit, marked when files differ from it."""
    head = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return (head or "unknown") + (" with changes" if changed else "")


class Report:
    """pytest plug-in: gathers results and writes them at the end of the session."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._results: dict[str, CaseResult] = {}

    def figure(self, item: pytest.Item, text: str) -> None:
        """A measured value that belongs into the report."""
        self._entry(item).figures.append(text)

    def _entry(self, item: pytest.Item) -> CaseResult:
        function = getattr(item, "function", None)
        title = (getattr(function, "__doc__", None) or item.name).strip().splitlines()[0].rstrip(".")
        call = getattr(item, "callspec", None)
        if call is not None:
            title += f" [{call.id}]"
        return self._results.setdefault(item.nodeid, CaseResult(title, item.path.stem.removeprefix("test_")))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        entry = self._entry(item)
        if report.when == "call":
            entry.seconds = report.duration
        if report.failed:
            entry.outcome = "failed" if report.when == "call" else f"failed in {report.when}"
            entry.failure = (
                str(call.excinfo.value).splitlines()[0][:300]
                if call.excinfo and str(call.excinfo.value)
                else "see the log"
            )
        elif report.skipped:
            entry.outcome = "not run"
            entry.failure = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
        return report

    def pytest_sessionfinish(self) -> None:
        if self._path is None or not self._results:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(self.text())

    def text(self) -> str:
        results = list(self._results.values())
        passed = sum(result.outcome == "passed" for result in results)
        lines = [
            "# Cluster tests",
            "",
            f"{passed} of {len(results)} cases passed, {sum(r.seconds for r in results):.0f} s.",
            "",
        ]
        lines += [
            f"- commit: {commit()}",
            f"- machine: {hardware()}",
            "- Kubernetes 1.36.3 (etcd, API server, controllers, scheduler, kubelets built from source)",
        ]
        for group in dict.fromkeys(result.group for result in results):
            lines += ["", f"## {group}", "", "| case | result | seconds | figures |", "|---|---|---|---|"]
            for result in results:
                if result.group == group:
                    note = (
                        "; ".join([*result.figures, *([result.failure] if result.failure else [])])
                        .replace("|", "\\|")
                        .replace("\n", " ")
                    )
                    lines.append(f"| {result.title} | {result.outcome} | {result.seconds:.1f} | {note} |")
        return "\n".join(lines) + "\n"

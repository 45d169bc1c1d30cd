"""A GoldenReport as a table for people or as JSON for machines."""

import json
from collections.abc import Iterable

from prefill_engine.check.compare import Finding
from prefill_engine.check.golden import GoldenReport


def worst_findings(findings: Iterable[Finding]) -> list[Finding]:
    """The worst finding per (regime, group, tensor), in order of first appearance."""
    worst: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        key = (finding.regime, finding.group, finding.tensor)
        if key not in worst or finding.excess > worst[key].excess:
            worst[key] = finding
    return list(worst.values())


def render_table(report: GoldenReport) -> str:
    """One line per regime, group and tensor with its worst error and the case it occurred in; every failure; a summary."""
    rows: list[tuple[str, ...]] = [("regime", "group", "tensor", "worst", "limit", "case", "verdict")]
    rows += [_row(finding) for finding in worst_findings(report.findings)]
    failed = [finding for finding in report.findings if not finding.passed]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"OUT  {'  '.join(_row(finding)[:-1])}" for finding in failed]
    lines += [f"OUT  {name}: expected value without a counterpart" for name in report.unknown]
    cases = {(finding.regime, finding.group, finding.case) for finding in report.findings}
    verdict = "all within tolerance" if report.passed else f"{len(failed) + len(report.unknown)} OUT OF TOLERANCE"
    lines.append(f"{len(cases)} cases, {len(report.findings)} comparisons: {verdict}")
    return "\n".join(lines)


def render_json(report: GoldenReport) -> str:
    """Every finding; `passed` is the verdict of all."""
    findings = [
        {
            "regime": finding.regime,
            "group": finding.group,
            "case": finding.case,
            "tensor": finding.tensor,
            "worst": finding.worst,
            "bound": finding.bound,
            "bound_is": "least share" if finding.is_share else "largest error",
            "passed": finding.passed,
        }
        for finding in report.findings
    ]
    return json.dumps({"passed": report.passed, "unknown": list(report.unknown), "findings": findings})


def _row(finding: Finding) -> tuple[str, ...]:
    bound = f">= {finding.bound:g}" if finding.is_share else f"<= {finding.bound:g}"
    verdict = "ok" if finding.passed else "OUT"
    return finding.regime, finding.group, finding.tensor, f"{finding.worst:.3g}", bound, finding.case, verdict

"""The chart's Prometheus rules and dashboards: every expression parses, types and reads real metrics; promtool runs the rules."""

import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from prefill_engine.kvd.kvd_metrics import KvdMetrics
from prefill_engine.metrics import Metrics
from prefill_engine.vision.ve_metrics import VeMetrics
from prefill_operator.names import ConditionType
from prefill_operator.operator_metrics import OperatorMetrics
from prefill_operator.pool_metrics import PoolMetrics
from prefill_testing.chart import CHART, EVERYTHING, ROOT, Json, dashboard_targets, merged, render, rule_groups

DATA = Path(__file__).with_name("data")
DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))


def metric_names(expression: str) -> set[str]:
    """Metrics an expression reads. Raises ValueError if it does not parse, or a function gets a value of another type."""
    names: set[str] = set()

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.MatrixSelector):
            node = node.vector_selector
        if isinstance(node, promql_parser.VectorSelector):
            names.add(node.name)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return names


def rules() -> list[Json]:
    return [rule for group in rule_groups(render(EVERYTHING)) for rule in group["rules"]]


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """(place, query); Grafana's variables stand inside quotes, so the query parses as it is."""
    for path in DASHBOARDS:
        for title, query in dashboard_targets(json.loads(path.read_text())):
            yield f"{path.stem}: {title}", query


def exported_metrics() -> set[str]:
    """Series of the engine, its sidecar, the vision encoder, the operator, and of our own recording rules."""
    operator = OperatorMetrics().registry
    PoolMetrics(operator)
    encoder = CollectorRegistry()
    VeMetrics(encoder)
    families = (*operator.collect(), *pod_families(), *encoder.collect())
    names = {f"{family.name}{suffix}" for family in families for suffix in _SUFFIXES[family.type]}
    return names | {rule["record"] for rule in rules() if "record" in rule}


def pod_families() -> list[Metric]:
    """What a pod exports: its engine's, and from another port its kvd's. Some names are of both: queries choose a container."""
    engine, kvd = CollectorRegistry(), CollectorRegistry()
    Metrics(engine)
    KvdMetrics(kvd)
    return [*engine.collect(), *kvd.collect()]


_SUFFIXES = {
    "gauge": ("",),
    "counter": ("_total",),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("_sum", "_count"),
}


def test_rules_read_only_metrics_that_exist() -> None:
    read = {name for rule in rules() for name in metric_names(rule["expr"])}

    assert len(read) > 30
    assert read - exported_metrics() == set()


def test_dashboards_read_only_metrics_that_exist() -> None:
    read = {name: place for place, query in dashboard_queries() for name in metric_names(query)}

    assert len(read) > 40
    assert {name: place for name, place in read.items() if name not in exported_metrics()} == {}


def hidden(families: Iterable[Metric]) -> set[str]:
    """Those that no dashboard and no rule reads."""
    shown = {name for _, query in dashboard_queries() for name in metric_names(query)}
    shown |= {name for rule in rules() for name in metric_names(rule["expr"])}
    names = {family.name for family in families}
    return {name for name in names if not any(re.fullmatch(f"{name}(_total|_bucket|_sum|_count)?", s) for s in shown)}


def test_every_engine_metric_is_on_a_dashboard_or_in_a_rule() -> None:
    """A figure nobody can see is not worth its series."""
    assert hidden(pod_families()) == {"pe_engine_info", "pe_cache_info", "pe_steps", "pe_image_tokens"}


def test_every_encoder_metric_is_on_a_dashboard_or_in_a_rule() -> None:
    registry = CollectorRegistry()
    VeMetrics(registry)
    assert hidden(registry.collect()) == {"ve_info", "ve_epoch"}


def test_alerts_have_unique_names_and_say_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    names = [rule["alert"] for rule in alerts]

    assert len(set(names)) == len(names)
    assert all(rule["labels"]["severity"] in ("critical", "warning", "info") for rule in alerts)
    assert all(rule["annotations"].keys() == {"summary", "description"} for rule in alerts)


def test_alerts_point_to_sections_that_exist() -> None:
    headings = {
        name: re.findall(r"^#+ (.+)$", (ROOT / "docs" / f"{name}.md").read_text(), re.MULTILINE)
        for name in ("troubleshooting", "operations")
    }
    named = [
        match
        for rule in rules()
        for match in re.findall(r"See (\w+): (?:the )?([\w ]+)\.", rule.get("annotations", {}).get("description", ""))
    ]

    assert len(named) >= 10
    for document, section in named:
        assert any(section.lower() in heading.lower() for heading in headings[document]), f"{document}: {section}"


def test_condition_alerts_name_real_conditions() -> None:
    texts = [rule["expr"] for rule in rules()] + [query for _, query in dashboard_queries()]
    named = {name for text in texts for group in re.findall(r'[{ ]type=~?"([^"]+)"', text) for name in group.split("|")}

    assert named == {str(condition) for condition in ConditionType}


def test_alerts_can_be_left_out_and_labelled() -> None:
    values = {"metrics": {"prometheusRule": {"enabled": True, "disabledAlerts": ["PrefillEngineRestarted"]}}}
    left = {rule["alert"] for group in rule_groups(render(values)) for rule in group["rules"] if "alert" in rule}

    assert {rule["alert"] for rule in rules() if "alert" in rule} - left == {"PrefillEngineRestarted"}
    assert all(rule["labels"]["team"] == "inference" for rule in rules() if "alert" in rule)


def test_forecast_looks_as_far_ahead_as_the_values_say() -> None:
    forecast = {"horizonSeconds": 600, "trendSeconds": 1200, "seasonSeconds": 86400}
    values = {"metrics": {"prometheusRule": {"enabled": True}}, "autoscaling": {"forecast": forecast}}
    (rule,) = (
        rule for group in rule_groups(render(values)) for rule in group["rules"] if "forecast" in rule.get("record", "")
    )

    assert "demand_rows_per_second[1200s], 600)" in rule["expr"]
    assert "[600s] offset 85800s" in rule["expr"]


@pytest.fixture(scope="module")
def promtool() -> Path:
    """Debian's, put in place by `make setup` (charts/tools/promtool.sh). Where there is none, CI fails and others are told."""
    binary = ROOT / ".venv-tools" / "bin" / "promtool"
    if not binary.exists():
        reason = f"{binary} is missing: run charts/tools/promtool.sh {binary.parent}"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    return binary


def _run(promtool: Path, *args: str, cwd: Path) -> str:
    done = subprocess.run([promtool, *args], cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_the_rules(promtool: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": rule_groups(render(EVERYTHING))}))

    assert f"SUCCESS: {len(rules())} rules found" in _run(promtool, "check", "rules", "rules.yaml", cwd=tmp_path)


def test_promtool_accepts_the_queries_of_dashboards(promtool: Path, tmp_path: Path) -> None:
    queries = [{"record": f"query:{index}", "expr": query} for index, (_, query) in enumerate(dashboard_queries())]
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": queries}]}))

    assert f"SUCCESS: {len(queries)} rules found" in _run(promtool, "check", "rules", "queries.yaml", cwd=tmp_path)


# File of cases -> seconds of the season they assume.
@pytest.mark.parametrize(("cases", "season"), [("chart_rules_test.yaml", 604800), ("chart_season_test.yaml", 86400)])
def test_rules_do_what_they_say(promtool: Path, tmp_path: Path, cases: str, season: int) -> None:
    """Demand, forecast and alerts over given series."""
    groups = rule_groups(render(merged(EVERYTHING, {"autoscaling": {"forecast": {"seasonSeconds": season}}})))
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    (tmp_path / "cases.yaml").write_text((DATA / cases).read_text())

    assert "SUCCESS" in _run(promtool, "test", "rules", "cases.yaml", cwd=tmp_path)

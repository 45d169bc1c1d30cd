"""Documentation of the chart against what it describes."""

import json
import re
from typing import Any

import pytest
import yaml

from prefill_operator.api import parse_pool
from prefill_operator.crd import load_crd
from prefill_operator.failures import PodState
from prefill_operator.manifest_check import check_manifest
from prefill_operator.names import CONDITION_REASONS, ConditionType, EventReason, Kind, Reason
from prefill_operator.render_autoscaling import FORECAST_SERIES, PATCHES, SERIES
from prefill_testing.chart import CHART, EVERYTHING, ROOT, load_tool, merged, operator_container, render, rule_groups

DOCS = ROOT / "docs"
VALUES = (CHART / "values.yaml").read_text()


def test_every_value_is_documented() -> None:
    tool = load_tool("values_table")
    documented = {value.path: value for value in tool.documented_values(VALUES)}
    covers = [path for path, value in documented.items() if not value.is_block]

    bare = [
        leaf
        for leaf in tool.leaves(yaml.safe_load(VALUES))
        if not any(leaf == path or leaf.startswith(f"{path}.") for path in covers)
    ]
    assert bare == []


def test_readme_lists_the_values() -> None:
    """`python charts/tools/values_table.py` prints the table."""
    assert load_tool("values_table").values_table(VALUES) in (CHART / "README.md").read_text()


def _schema_paths(schema: dict[str, Any], path: str = "") -> set[str]:
    found = set()
    for name, inner in schema.get("properties", {}).items():
        place = f"{path}.{name}" if path else name
        found |= _schema_paths(inner, place) or {place}
    return found


def test_schema_and_values_hold_the_same_names() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    named = _schema_paths(schema) - {"global", "resources.claims"}
    in_values = set(load_tool("values_table").leaves(yaml.safe_load(VALUES)))

    # Kubernetes' own structures are open in the schema: their inner names are values only.
    open_parts = tuple(f"{path}." for path in named)
    assert {path for path in named - in_values if not any(leaf.startswith(f"{path}.") for leaf in in_values)} == set()
    assert {path for path in in_values - named if not path.startswith(open_parts)} == set()


def test_no_object_of_the_schema_is_open_by_accident() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def closed(part: dict[str, Any]) -> bool:
        return "properties" not in part or (
            part["additionalProperties"] is False and all(closed(inner) for inner in part["properties"].values())
        )

    assert closed(schema)


@pytest.mark.parametrize("condition", ConditionType)
def test_troubleshooting_explains_every_reason_of_a_condition(condition: ConditionType) -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    section = re.search(rf"^## {condition}\b(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)

    assert section is not None
    explained = set(re.findall(r"^\| `(\w+)` ", section[1], re.MULTILINE))
    assert explained == {str(reason) for reason in CONDITION_REASONS[condition]}


def test_troubleshooting_explains_every_state_of_a_pod() -> None:
    """But for Ready, which is no trouble."""
    text = (DOCS / "troubleshooting.md").read_text()
    section = re.search(r"^## Reasons of unhealthy PEs(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)

    assert section is not None
    explained = re.findall(r"^\| `(\w+)` ", section[1], re.MULTILINE)
    assert sorted(explained) == sorted(str(state) for state in PodState if state is not PodState.READY)


def test_operations_names_every_event() -> None:
    text = (DOCS / "operations.md").read_text()

    assert {str(reason) for reason in EventReason} <= set(re.findall(r"`(\w+)`", text))


def test_documents_use_no_unknown_reason() -> None:
    """Words in the form of Condition=Status/Reason."""
    known = {str(reason) for reason in Reason}
    named = {
        match
        for path in DOCS.glob("*.md")
        for match in re.findall(r"\b[A-Z]\w+=(?:True|False|Unknown)/(\w+)", path.read_text())
    }

    assert named
    assert named <= known


def test_links_between_documents_lead_somewhere() -> None:
    for path in [*DOCS.glob("*.md"), CHART / "README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_quick_start_installs_the_images_that_it_pushes() -> None:
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    (operator, engine) = re.findall(r"^skopeo copy docker-archive:\S+ docker://(\S+)$", text, re.MULTILINE)
    (install,) = re.findall(r"^helm install prefill charts/prefill (.+)$", text, re.MULTILINE)
    values: dict[str, Any] = {}
    for path, value in re.findall(r"--set ([\w.]+)=(\S+)", install):
        part, name = path.split(".")
        values.setdefault(part, {})[name] = value
    assert operator_container(render(values))["image"] == operator

    ((placeholder, ours),) = re.findall(r'sed "s#([^#]+)#([^#]+)#" examples/', text)
    assert ours == engine
    for path in (ROOT / "examples").glob("*.yaml"):
        assert set(re.findall(r"\S+/prefill-engine\S*", path.read_text())) <= {placeholder}
        assert placeholder in path.read_text()


def _yaml_blocks(name: str) -> list[Any]:
    blocks = re.findall(r"```yaml\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)
    return [document for block in blocks for document in yaml.safe_load_all(block)]


def test_adapter_serves_what_our_autoscalers_ask_for() -> None:
    """The rules for prometheus-adapter give the same figures as KEDA's queries, under the names of the HPA's metrics."""
    (adapter,) = (block for block in _yaml_blocks("autoscaling.md") if isinstance(block.get("rules"), dict))
    served = {rule["name"]["as"]: rule["metricsQuery"] for rule in adapter["rules"]["external"]}
    asked = {
        series.external_name: series.expression.replace("{selector}", "{<<.LabelMatchers>>}") + " or vector(0)"
        for series in (*SERIES.values(), PATCHES)
    }

    assert served == asked


def test_adapter_finds_the_series_that_its_queries_read() -> None:
    (adapter,) = (block for block in _yaml_blocks("autoscaling.md") if isinstance(block.get("rules"), dict))

    for rule in adapter["rules"]["external"]:
        name = rule["seriesQuery"].partition("{")[0]
        assert f"{name}{{<<.LabelMatchers>>}}" in rule["metricsQuery"]


def test_forecast_of_the_chart_is_the_series_that_pools_ask_for() -> None:
    recorded = {rule.get("record") for group in rule_groups(render(EVERYTHING)) for rule in group["rules"]}

    assert FORECAST_SERIES in recorded


def test_pools_in_documents_are_accepted() -> None:
    pools = [
        block for path in DOCS.glob("*.md") for block in _yaml_blocks(path.name) if block.get("kind") == "PrefillPool"
    ]

    assert pools
    for pool in pools:
        check_manifest(pool, load_crd(Kind.PREFILL_POOL))
        assert parse_pool(merged(pool, {"metadata": {"namespace": "default"}})).spec.autoscaling is not None
        assert "replicas" not in pool["spec"]


@pytest.mark.parametrize("path", ["docs/autoscaling.md", "charts/prefill/README.md"])
def test_values_in_documents_are_accepted(path: str) -> None:
    """Blocks of YAML that are values of this chart; the first line of others says whose they are."""
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)
    ours = [yaml.safe_load(block) for block in blocks if re.match(r"# values of the chart prefill|rbac:|scope:", block)]

    assert ours
    for values in ours:
        assert render(values)

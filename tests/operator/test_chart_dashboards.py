"""The Grafana dashboards as files: no server renders them here, so what can be checked is checked."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from prefill_testing.chart import CHART, EVERYTHING, by_kind, dashboard_targets, render

FILES = sorted((CHART / "dashboards").glob("*.json"))
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in FILES}
# Grafana's own variables beside a dashboard's.
BUILT_IN = {"__all", "datasource"}


def _overlap(first: dict[str, int], second: dict[str, int]) -> bool:
    return all(
        first[start] < second[start] + second[size] and second[start] < first[start] + first[size]
        for start, size in (("x", "w"), ("y", "h"))
    )


def test_the_config_map_holds_the_files() -> None:
    maps = by_kind(render(EVERYTHING), "ConfigMap")
    data = maps["prefill-dashboards"]["data"]

    assert {name: json.loads(text) for name, text in data.items()} == {
        f"prefill-{name}.json": dashboard for name, dashboard in DASHBOARDS.items()
    }
    assert maps["prefill-dashboards"]["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert len(json.dumps(data)) < 500_000


def test_dashboards_are_told_apart() -> None:
    assert len({dashboard["uid"] for dashboard in DASHBOARDS.values()}) == len(FILES) == 3


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_have_ids_and_places_of_their_own(name: str) -> None:
    panels = DASHBOARDS[name]["panels"]
    places = [panel["gridPos"] for panel in panels]

    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert not [pair for pair in itertools.combinations(places, 2) if _overlap(*pair)]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_use_the_chosen_data_source_and_have_units(name: str) -> None:
    charts = [panel for panel in DASHBOARDS[name]["panels"] if panel["type"] != "row"]

    assert all(panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"} for panel in charts)
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in charts)
    assert all(panel["targets"] for panel in charts)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_titles_are_unique_within_a_dashboard(name: str) -> None:
    titles = [panel["title"] for panel in DASHBOARDS[name]["panels"]]

    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_queries_use_only_variables_that_are_defined(name: str) -> None:
    dashboard: dict[str, Any] = DASHBOARDS[name]
    defined = {variable["name"] for variable in dashboard["templating"]["list"]} | BUILT_IN
    words = [word for _, query in dashboard_targets(dashboard) for word in query.split("$")[1:]]

    assert words
    assert {word.split('"')[0] for word in words} <= defined


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_end_in_a_newline(path: Path) -> None:
    assert path.read_text().endswith("}\n")

"""Every object of the chart against the schemas of three Kubernetes versions, and the CRD copies against their source."""

import json
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from prefill_testing.chart import EVERYTHING, NAMESPACED, ROOT, by_kind, load_tool, render
from prefill_testing.kube_schema import KUBE_VERSIONS, check_object

SCENARIOS = {"defaults": {}, "everything": EVERYTHING, "namespaced": NAMESPACED}
# Kinds of other projects: Kubernetes has no schema of them.
FOREIGN_GROUPS = ("monitoring.coreos.com/", "keda.sh/")


@pytest.mark.parametrize("version", KUBE_VERSIONS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_objects_match_the_schemas_of_kubernetes(scenario: str, version: str) -> None:
    objects = render(SCENARIOS[scenario], kube_version=version)
    native = [item for item in objects if not item["apiVersion"].startswith(FOREIGN_GROUPS)]

    assert len(native) >= 10
    for item in native:
        check_object(item, version)


def test_the_schema_check_finds_unknown_fields() -> None:
    """The strict schemas are in use: with the lenient ones a misspelt field would pass."""
    (deployment,) = by_kind(render({}), "Deployment").values()
    broken = json.loads(json.dumps(deployment))
    broken["spec"]["template"]["spec"]["containers"][0]["redinessProbe"] = {}

    with pytest.raises(jsonschema.ValidationError, match="redinessProbe"):
        check_object(broken, KUBE_VERSIONS[0])


def test_newest_version_is_checked() -> None:
    assert kubernetes_validate.latest_version() == KUBE_VERSIONS[-1]


def test_crd_copies_are_current() -> None:
    """`python charts/tools/copy_crds.py` after every change of crds/."""
    tool = load_tool("copy_crds")
    copies = {path.name: path.read_text() for path in tool.TARGET.glob("*.yaml")}

    assert copies == {source.name: tool.chart_copy(source) for source in tool.sources()}


def test_rendered_crds_are_the_source_of_truth() -> None:
    rendered = by_kind(render({}), "CustomResourceDefinition")
    sources = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "crds").glob("*.yaml"))]

    assert len(sources) == 2
    for source in sources:
        crd = json.loads(json.dumps(rendered[source["metadata"]["name"]]))
        assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        assert crd == source


def test_crds_can_be_left_out() -> None:
    assert not by_kind(render({"crds": {"install": False}}), "CustomResourceDefinition")


def test_crds_can_go_with_the_release() -> None:
    crds = by_kind(render({"crds": {"keep": False}}), "CustomResourceDefinition")

    assert len(crds) == 2
    assert all("annotations" not in crd["metadata"] for crd in crds.values())


@pytest.mark.parametrize("text", ["metadata:\n", "\nmetadata:\n  annotations: {}\n", "\nmetadata:\n  name: '{{'\n"])
def test_crds_that_can_not_be_copied_are_refused(text: str, tmp_path: Path) -> None:
    source = tmp_path / "crd.yaml"
    source.write_text(text)

    with pytest.raises(ValueError, match=r"crd\.yaml"):
        load_tool("copy_crds").chart_copy(source)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_needs_a_webhook_a_certificate_or_a_job(scenario: str) -> None:
    """k8s.md 2 rows 58 and 59: with the operator down, lists, garbage collection and pods of others go on."""
    objects = render(SCENARIOS[scenario])

    kinds = {item["kind"] for item in objects}
    assert not [kind for kind in kinds if "Webhook" in kind or kind in ("APIService", "Certificate", "Issuer")]
    assert kinds.isdisjoint({"Job", "CronJob", "Secret"})
    for crd in by_kind(objects, "CustomResourceDefinition").values():
        assert "conversion" not in crd["spec"]
        assert [version["name"] for version in crd["spec"]["versions"]] == ["v1alpha1"]
    hooks = {item["metadata"].get("annotations", {}).get("helm.sh/hook") for item in objects} - {None}
    assert hooks == {"test"}


def test_crds_were_never_where_helm_does_not_upgrade_them() -> None:
    """k8s.md 2 rows 54 and 55."""
    chart = load_tool("copy_crds").TARGET.parents[1]

    assert load_tool("copy_crds").TARGET.relative_to(chart).parts[0] == "templates"
    assert not (chart / "crds").exists()

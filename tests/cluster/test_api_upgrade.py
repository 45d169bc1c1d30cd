"""The chart on a cluster of its own, installed, upgraded and taken away again by Helm (k8s.md 7.3 item 14)."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from prefill_bed.api import ApiError, Json
from prefill_bed.bed import Bed
from prefill_bed.cluster import Cluster, Profile
from prefill_bed.installation import CHART, CRD_NAMES, Helm
from prefill_bed.pools import gpu_pool
from prefill_bed.waiting import until

HOME = "prefill-system"
FIELD = "extraShm"
"""Of spec.engine. The version before does not know it."""


@pytest.fixture
def empty_cluster(bed: Bed) -> Cluster:
    """A control plane without nodes that nothing was installed on."""
    bed.end()
    return bed.use(Profile(nodes=0))


@pytest.fixture
def chart_before(tmp_path: Path) -> Path:
    """This chart with a CRD that lacks FIELD."""
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    crd = chart / "templates" / "crds" / "prefillpools.yaml"
    text, count = re.subn(rf"^( +){FIELD}:\n(?:\1 +.*\n)+", "", crd.read_text(), flags=re.MULTILINE)
    assert count == 1
    crd.write_text(text)
    return chart


def refusal(call: Callable[[], object]) -> str:
    """What the API server says against it; "" if it is done."""
    try:
        call()
    except ApiError as error:
        return error.message
    return ""


def test_upgrade_brings_the_crds_and_uninstall_keeps_them(
    empty_cluster: Cluster, helm: Callable[[Cluster], Helm], chart_before: Path
) -> None:
    """A field of the newer CRD works after helm upgrade; pools keep UID and generation; helm uninstall leaves them."""
    api, client = empty_cluster.api, helm(empty_cluster)
    client.run("install", "prefill", str(chart_before), "--namespace", HOME, "--create-namespace")
    pool = gpu_pool(replicas=0)

    def make() -> Json:
        answer = refusal(lambda: api.create("prefillpools", "default", pool, fieldValidation="Strict"))
        assert not answer, answer
        return api.get("prefillpools", "default", "flash")

    made = until("the first pool", make, seconds=60)
    change = {"spec": {"engine": {FIELD: "8Gi"}}}

    def use() -> str:
        return refusal(lambda: api.patch("prefillpools", "default", "flash", change, fieldValidation="Strict"))

    assert f'unknown field "spec.engine.{FIELD}"' in use()

    client.run("upgrade", "prefill", str(CHART), "--namespace", HOME)

    after = api.get("prefillpools", "default", "flash")["metadata"]
    assert (after["uid"], after["generation"]) == (made["metadata"]["uid"], made["metadata"]["generation"])

    def works() -> None:
        answer = use()
        assert not answer, answer

    until("the new field", works, seconds=60)
    client.run("uninstall", "prefill", "--namespace", HOME)

    assert not api.list("deployments", HOME)
    for name in CRD_NAMES:
        assert "deletionTimestamp" not in api.get("customresourcedefinitions", None, name)["metadata"]
    left = api.get("prefillpools", "default", "flash")
    assert (left["metadata"]["uid"], left["spec"]["engine"][FIELD]) == (made["metadata"]["uid"], "8Gi")

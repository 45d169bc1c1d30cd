"""The CRDs on a real API server: what is accepted, refused, defaulted, scaled and pruned (k8s.md 7.3 items 1 and 2)."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from prefill_bed.api import ApiError, Json
from prefill_bed.cluster import ROOT, Cluster
from prefill_bed.waiting import until

DATA = ROOT / "tests" / "operator" / "data"
CASES = yaml.safe_load((DATA / "crd_cases.yaml").read_text())
PLURAL = {"PrefillPool": "prefillpools", "VEPool": "vepools"}
CRD_FILES = sorted((ROOT / "crds").glob("*.yaml"))


@pytest.fixture
def crds(control_plane: Cluster) -> Cluster:
    """Both CRDs are served."""
    control_plane.kubectl("apply", "--server-side", *(f"--filename={path}" for path in CRD_FILES))
    for plural in PLURAL.values():
        until(f"{plural} to be served", lambda plural=plural: served(control_plane, plural))
    return control_plane


def served(cluster: Cluster, plural: str) -> None:
    try:
        cluster.api.list(plural, "default")
    except ApiError as error:
        raise AssertionError(str(error)) from error


def edited(document: Json, changes: dict[str, Any], removed: list[str]) -> Json:
    """A copy with dotted paths set and removed."""
    out = copy.deepcopy(document)
    for path, value in changes.items():
        node, keys = out, path.split(".")
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = value
    for path in removed:
        node, keys = out, path.split(".")
        for key in keys[:-1]:
            node = node[key]
        del node[keys[-1]]
    return out


def verdict(cluster: Cluster, namespace: str, case: Json) -> str:
    """ "" if the API server judges as the case says, else what happened."""
    pool = edited(CASES["bases"][case["base"]], case.get("set", {}), case.get("remove", []))
    resource, name = PLURAL[pool["kind"]], pool["metadata"]["name"]
    try:
        if "then" in case:
            cluster.api.create(resource, namespace, pool, fieldValidation="Strict")
            try:
                live = edited(cluster.api.get(resource, namespace, name), case["then"], [])
                path = cluster.api.path(resource, namespace, name, fieldValidation="Strict")
                cluster.api.request("PUT", path, live)
            finally:
                cluster.api.delete(resource, namespace, name)
        else:
            cluster.api.create(resource, namespace, pool, fieldValidation="Strict", dryRun="All")
    except ApiError as error:
        if case["expect"] == "reject" and case.get("message", "") in error.message:
            return ""
        return (
            f"{case['name']}: expected {case['expect']} ({case.get('message', '')}), got {error.status} {error.message}"
        )
    return (
        "" if case["expect"] == "accept" else f"{case['name']}: accepted, expected refusal: {case.get('message', '')}"
    )


@pytest.mark.short
def test_accept_and_reject(
    crds: Cluster, new_namespace: Callable[[Cluster], str], figure: Callable[[str], None]
) -> None:
    """The API server judges every object of crd_cases.yaml as written there."""
    namespace = new_namespace(crds)
    wrong = [text for case in CASES["cases"] if (text := verdict(crds, namespace, case))]
    figure(f"{len(CASES['cases']) - len(wrong)} of {len(CASES['cases'])} objects judged right")
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.short
@pytest.mark.parametrize("base", ["pool", "encoder"])
def test_defaults_are_golden(crds: Cluster, new_namespace: Callable[[Cluster], str], base: str) -> None:
    """What the API server makes of a minimal object is the golden file that the operator's structs are checked against."""
    minimal = CASES["bases"][base]
    made = crds.api.create(PLURAL[minimal["kind"]], new_namespace(crds), minimal, dryRun="All")
    golden = yaml.safe_load((DATA / f"defaults_{PLURAL[minimal['kind']]}.yaml").read_text())
    assert made["spec"] == golden["spec"]


@pytest.mark.short
def test_client_side_apply_fits(crds: Cluster) -> None:
    """`kubectl apply` without --server-side takes the CRDs: they fit into its annotation."""
    crds.kubectl("apply", *(f"--filename={path}" for path in CRD_FILES))


@pytest.mark.short
def test_status_and_scale_stand_apart(crds: Cluster, new_namespace: Callable[[Cluster], str]) -> None:
    """A status write changes no generation and no spec; a scale write changes replicas; unknown status is pruned."""
    namespace = new_namespace(crds)
    made = crds.api.create("prefillpools", namespace, CASES["bases"]["pool"])
    status = {"status": {"replicas": 2, "selector": "a=b", "kopf": {"progress": 1}}, "spec": {"replicas": 7}}
    after = crds.api.patch("prefillpools/status", namespace, "flash", status)
    assert after["metadata"]["generation"] == made["metadata"]["generation"]
    assert after["spec"]["replicas"] == 3
    assert "kopf" not in after["status"]
    scale = crds.api.get("prefillpools/scale", namespace, "flash")
    assert (scale["spec"]["replicas"], scale["status"]) == (3, {"replicas": 2, "selector": "a=b"})
    crds.kubectl("scale", "-n", namespace, "pfp/flash", "--replicas=5")
    scaled = crds.api.get("prefillpools", namespace, "flash")
    assert scaled["spec"]["replicas"] == 5
    assert scaled["metadata"]["generation"] == made["metadata"]["generation"] + 1


@pytest.mark.short
def test_names_users_type(crds: Cluster, new_namespace: Callable[[Cluster], str]) -> None:
    """Short names, the category and the columns work in kubectl."""
    namespace = new_namespace(crds)
    for base in ("pool", "encoder"):
        pool = CASES["bases"][base]
        crds.api.create(PLURAL[pool["kind"]], namespace, pool)
    both = crds.kubectl("get", "prefill", "-n", namespace, "-o", "name").stdout.split()
    assert both == ["prefillpool.prefill.dev/flash", "vepool.prefill.dev/flash"]
    for short, columns in {
        "pfp": "DESIRED READY UP-TO-DATE SPARES EP DEVICE AVAILABLE REDUNDANT AGE",
        "vep": "DESIRED READY",
    }.items():
        header = crds.kubectl("get", short, "-n", namespace).stdout.splitlines()[0].split()
        assert [name for name in columns.split() if name not in header] == []
    explained = crds.kubectl("explain", "prefillpool.spec.expertParallel.size").stdout
    assert "DESCRIPTION" in explained
    assert "<empty>" not in explained


@pytest.mark.parametrize(
    ("server_side", "first", "scaled", "second", "expected"),
    [
        (True, None, 5, None, 5),
        (True, 3, 5, 3, "conflict"),
        (True, 3, 5, None, 5),
        (True, 3, None, None, 1),
        (False, 3, 5, None, 1),
    ],
    ids=["never-written", "written-again", "left-out-after-scale", "left-out-unscaled", "client-side"],
)
def test_manifest_sequences(
    crds: Cluster,
    new_namespace: Callable[[Cluster], str],
    server_side: bool,
    first: int | None,
    scaled: int | None,
    second: int | None,
    expected: int | str,
) -> None:
    """Who owns spec.replicas after apply, scale, apply (k8s.md 3.4, trap 4)."""
    namespace = new_namespace(crds)

    def apply(replicas: int | None, *, check: bool = True) -> str:
        pool = edited(CASES["bases"]["pool"], {"metadata.namespace": namespace}, ["spec.replicas"])
        if replicas is not None:
            pool["spec"]["replicas"] = replicas
        flags = ("--server-side",) if server_side else ()
        return crds.kubectl("apply", *flags, "-f", "-", objects=[pool], check=check).stderr

    apply(first)
    if scaled is not None:
        crds.kubectl("scale", "-n", namespace, "pfp/flash", f"--replicas={scaled}")
    answer = apply(second, check=expected != "conflict")
    if expected == "conflict":
        assert "conflict" in answer
        expected = 5
    assert crds.api.get("prefillpools", namespace, "flash")["spec"]["replicas"] == expected

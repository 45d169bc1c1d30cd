"""The chart's KV directory: its command line is the verb's, who selects whom, and the address that pools are told."""

import argparse
import re

import yaml

from prefill_engine.cli import directory as verb
from prefill_operator.api import parse_pool
from prefill_operator.crd import load_crd
from prefill_operator.manifest_check import check_manifest
from prefill_operator.names import MANAGED_BY, MANAGED_BY_LABEL, Kind
from prefill_testing.chart import (
    CHART,
    EVERYTHING,
    NAMESPACE,
    RELEASE,
    ROOT,
    Json,
    by_kind,
    merged,
    render,
    run_helm,
)

ON: Json = {"directory": {"enabled": True}}
NAME = "prefill-directory"


def _container(objects: list[Json]) -> Json:
    (container,) = by_kind(objects, "Deployment")[NAME]["spec"]["template"]["spec"]["containers"]
    return container


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return parser.parse_args(arguments)


def test_nothing_of_it_by_default() -> None:
    assert not [item for item in render({}) if "directory" in item["metadata"]["name"]]


def test_command_line_is_one_of_the_verb() -> None:
    container = _container(render(ON))
    assert container["args"][0] == "directory"
    args = _parsed(container["args"][1:])

    assert (args.port, args.metrics_port, args.log_level) == (50061, 9091, "INFO")
    assert (args.tls_certificate, args.tls_key, args.tls_authority) == ("", "", "")
    assert {port["containerPort"] for port in container["ports"]} == {args.port, args.metrics_port}


def test_secret_gives_all_three_files_and_probes_need_no_certificate() -> None:
    objects = render(EVERYTHING)
    container = _container(objects)
    args = _parsed(container["args"][1:])
    (mount,) = container["volumeMounts"]
    (volume,) = by_kind(objects, "Deployment")[NAME]["spec"]["template"]["spec"]["volumes"]

    assert [args.tls_certificate, args.tls_key, args.tls_authority] == [
        f"{mount['mountPath']}/{name}" for name in ("tls.crt", "tls.key", "ca.crt")
    ]
    assert (volume["name"], volume["secret"]["secretName"]) == (mount["name"], "kv-tls")
    assert args.max_blocks == 1
    assert all("grpc" not in container[probe] for probe in ("livenessProbe", "readinessProbe"))
    assert _container(render(ON))["livenessProbe"]["grpc"] == {"port": 50061}


def test_never_two_at_a_time_and_no_rights() -> None:
    deployment = by_kind(render(ON), "Deployment")[NAME]["spec"]
    pod = deployment["template"]["spec"]

    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    assert pod["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in pod
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert _container(render(ON))["securityContext"]["readOnlyRootFilesystem"] is True


def test_each_selector_finds_its_own_pods_only() -> None:
    """Service, budget, monitors and policies of operator and directory."""
    objects = render(EVERYTHING)
    pods = {
        name: item["spec"]["template"]["metadata"]["labels"] for name, item in by_kind(objects, "Deployment").items()
    }
    services = {name: item["metadata"]["labels"] for name, item in by_kind(objects, "Service").items()}
    assert set(pods) == {"prefill", NAME}

    def selected(labels: Json, among: dict[str, Json]) -> set[str]:
        return {name for name, found in among.items() if labels.items() <= found.items()}

    assert {name: selected(item["spec"]["selector"], pods) for name, item in by_kind(objects, "Service").items()} == {
        "prefill-metrics": {"prefill"},
        NAME: {NAME},
    }
    policies = by_kind(objects, "NetworkPolicy")
    assert {name: selected(item["spec"]["podSelector"]["matchLabels"], pods) for name, item in policies.items()} == {
        "prefill": {"prefill"},
        NAME: {NAME},
    }
    monitors = by_kind(objects, "ServiceMonitor")
    assert {name: selected(item["spec"]["selector"]["matchLabels"], services) for name, item in monitors.items()} == {
        "prefill": {"prefill-metrics"},
        NAME: {NAME},
    }
    (budget,) = by_kind(objects, "PodDisruptionBudget").values()
    assert selected(budget["spec"]["selector"]["matchLabels"], pods) == {"prefill"}


def test_policy_lets_the_sidecars_in_and_nothing_out() -> None:
    policy = by_kind(render(EVERYTHING), "NetworkPolicy")[NAME]["spec"]
    sidecars, metrics = policy["ingress"]

    assert sidecars["from"][0]["podSelector"]["matchLabels"] == {MANAGED_BY_LABEL: MANAGED_BY}
    assert [port["port"] for rule in (sidecars, metrics) for port in rule["ports"]] == ["grpc", "metrics"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in policy


def test_notes_and_guide_name_the_address_of_the_service() -> None:
    """Helm 4 only: Helm 3 asks a cluster even for a dry run."""
    (service,) = (item for name, item in by_kind(render(ON), "Service").items() if name == NAME)
    port = next(port["port"] for port in service["spec"]["ports"] if port["name"] == "grpc")
    address = f"{service['metadata']['name']}.{NAMESPACE}.svc:{port}"
    done = run_helm(
        "helm4",
        "install",
        RELEASE,
        str(CHART),
        "--namespace",
        NAMESPACE,
        "--dry-run=client",
        "--set",
        "directory.enabled=true",
    )
    assert done.returncode == 0, done.stderr
    assert f"spec.kvd.directoryAddress: {address}\n" in done.stdout

    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "kv_network.md").read_text(), re.DOTALL)
    (kvd,) = (block["spec"]["kvd"] for block in map(yaml.safe_load, blocks) if "kvd" in block.get("spec", {}))
    assert kvd["directoryAddress"] == address


def test_address_fits_the_field_of_the_pool() -> None:
    """With the longest names that a release and a namespace may have."""
    values = merged(ON, {"fullnameOverride": "p" * 40})
    name = next(name for name in by_kind(render(values), "Service") if name.endswith("-directory"))
    pool = yaml.safe_load((ROOT / "examples" / "h200.yaml").read_text().split("\n---")[0])
    pool["spec"]["kvd"]["directoryAddress"] = f"{name}.{'n' * 63}.svc:50061"
    check_manifest(pool, load_crd(Kind.PREFILL_POOL))

    assert parse_pool(merged(pool, {"metadata": {"namespace": "default"}})).spec.kvd.directory_address

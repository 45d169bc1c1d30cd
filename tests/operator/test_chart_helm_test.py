"""What `helm test` runs in the cluster: charts/prefill/files/dry_run.py, against scripted answers of an API server."""

import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from prefill_operator.api import parse_pool
from prefill_operator.crd import load_crd
from prefill_operator.errors import PoolInvalid
from prefill_operator.manifest_check import check_manifest
from prefill_operator.names import LEASE_NAME, Kind
from prefill_testing.chart import CHART, NAMESPACE, NAMESPACED, Json, by_kind, render

Answer = tuple[int, Json]


@pytest.fixture(scope="module")
def dry_run() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dry_run", CHART / "files" / "dry_run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def admit(body: Json) -> Answer:
    """As the API server would: schema, then the rules."""
    try:
        check_manifest(body, load_crd(Kind.PREFILL_POOL))
        parse_pool({**body, "metadata": {**body["metadata"], "namespace": "default"}})
    except PoolInvalid as error:
        return 422, {"message": error.message}
    return 201, body


def lease(*, holder: str, renewals: int) -> Callable[[], Answer]:
    """Answers of a Lease that is renewed so many times while one looks."""
    times = iter(range(renewals))
    last = [0]

    def answer() -> Answer:
        last[0] = next(times, last[0])
        return 200, {"spec": {"holderIdentity": holder, "renewTime": f"2026-01-01T00:00:{last[0]:02}Z"}}

    return answer


def server(look: Callable[[], Answer], create: Callable[[Json], Answer] = admit) -> Callable[..., Answer]:
    def ask(method: str, path: str, body: Any = None) -> Answer:
        if method == "POST":
            assert path == "/apis/prefill.dev/v1alpha1/namespaces/team-a/prefillpools?dryRun=All"
            return create(body)
        assert path == f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{LEASE_NAME}"
        return look()

    return ask


def run(dry_run: ModuleType, ask: Callable[..., Answer]) -> int:
    failed: int = dry_run.main(NAMESPACE, "team-a", ask=ask, sleep=lambda _: None)
    return failed


def test_a_sound_installation_passes(dry_run: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(dry_run, server(lease(holder="prefill-1", renewals=3))) == 0
    assert "an operator leads: prefill-1" in capsys.readouterr().out


BROKEN: dict[str, tuple[Callable[..., Answer], int]] = {
    "no CRDs": (server(lease(holder="a", renewals=3), lambda _: (404, {"message": "not found"})), 2),
    "rules not in force": (server(lease(holder="a", renewals=3), lambda body: (201, body)), 1),
    "no lease": (server(lambda: (404, {})), 1),
    "lease released": (server(lease(holder="", renewals=60)), 1),
    "holder that no longer renews": (server(lease(holder="gone", renewals=1)), 1),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_installation_is_noticed(dry_run: ModuleType, case: str) -> None:
    ask, failures = BROKEN[case]

    assert run(dry_run, ask) == failures


def test_the_pod_holds_the_script_and_asks_about_its_own_namespaces() -> None:
    pod = by_kind(render(NAMESPACED), "Pod")["prefill-test"]
    (container,) = pod["spec"]["containers"]
    script, *arguments = container["args"]

    assert script.strip() == (CHART / "files" / "dry_run.py").read_text().strip()
    assert arguments == [NAMESPACE, "team-a"]
    compile(script, "dry_run.py", "exec")

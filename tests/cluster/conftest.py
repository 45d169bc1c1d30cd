"""Fixtures of the cluster suite. Collected only by its own pytest.ini; the root suite passes this directory by."""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

HERE = Path(__file__).parent
STORIES = pytest.StashKey[list[Callable[[], str]]]()

if TYPE_CHECKING:
    from prefill_bed.bed import Bed
    from prefill_bed.cluster import Cluster
    from prefill_bed.installation import Helm, LocalOperators, Release


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if config.rootpath == HERE else True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report", type=Path, default=None, help="write results to this Markdown file")


def pytest_configure(config: pytest.Config) -> None:
    if config.rootpath != HERE:
        return
    from prefill_bed.report import Report

    if os.geteuid() != 0:
        pytest.exit("the cluster suite needs root: it starts nodes and network devices", returncode=3)
    config.pluginmanager.register(Report(config.getoption("--report")), "bed-report")


@pytest.fixture(scope="session")
def bed() -> "Iterator[Bed]":
    from prefill_bed.bed import Bed

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prefill-cluster"
    bed = Bed(Path(os.environ.get("PREFILL_CLUSTER_CACHE") or cache))
    yield bed
    bed.end()


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Puts a measured value into the report."""
    report = request.config.pluginmanager.get_plugin("bed-report")
    return lambda text: report.figure(request.node, text)


@pytest.fixture(scope="session")
def _numbers() -> "itertools.count[int]":
    return itertools.count(1)


@pytest.fixture
def new_namespace(
    request: pytest.FixtureRequest, bed: "Bed", _numbers: "itertools.count[int]"
) -> "Iterator[Callable[[Cluster], str]]":
    """Makes a namespace of the case's own; a failure tells what is in it; in the end it is deleted."""
    made: list[tuple[Cluster, str]] = []

    def make(cluster: "Cluster") -> str:
        name = f"t{next(_numbers)}"
        cluster.api.create("namespaces", None, {"metadata": {"name": name}})
        made.append((cluster, name))
        return name

    request.node.stash[STORIES].append(lambda: "\n".join(cluster.describe(name) for cluster, name in made))
    yield make
    for cluster, name in made:
        cluster.api.delete("namespaces", None, name)


@pytest.fixture
def checkpoint(bed: "Bed") -> Path:
    """A tiny random checkpoint on this machine."""
    return bed.checkpoint


@pytest.fixture
def control_plane(bed: "Bed") -> "Cluster":
    """A control plane with four fake nodes of eight GPUs; its fake kubelets are as new."""
    from prefill_bed.bed import FakeNodes
    from prefill_bed.cluster import Profile

    cluster = bed.use(Profile(nodes=0, grace_seconds=6, audit=True), FakeNodes())
    bed.fakes.reset()
    return cluster


@pytest.fixture
def helm(bed: "Bed") -> "Callable[[Cluster], Helm]":
    from prefill_bed.installation import Helm

    return lambda cluster: Helm(cluster, bed.helm_binary)


@pytest.fixture
def reads_nodes(request: pytest.FixtureRequest) -> bool:
    """Whether the chart lets the operator of `install` read nodes."""
    allowed: bool = getattr(request, "param", True)
    return allowed


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each case of `install` runs with and without the right to read nodes; node-triggered ones are skipped by name (C35).

    CI's profile runs the first half, and test_works_without_reading_nodes, which says for itself what it wants.
    """
    marks = list(metafunc.definition.iter_markers())
    chosen = any(mark.name == "parametrize" and "reads_nodes" in mark.args[0] for mark in marks)
    if chosen or "reads_nodes" not in metafunc.fixturenames or metafunc.config.getoption("markexpr") == "short":
        return
    reason = f"{metafunc.function.__name__}: node-triggered, and the operator may not read nodes"
    is_blind = any(mark.name == "sees_nodes" for mark in marks)
    without = pytest.param(False, marks=[pytest.mark.skip(reason=reason)] if is_blind else [])
    metafunc.parametrize("reads_nodes", [True, without], ids=["nodes", "no-nodes"], indirect=True)


@pytest.fixture
def install(
    request: pytest.FixtureRequest,
    control_plane: "Cluster",
    helm: "Callable[[Cluster], Helm]",
    new_namespace: "Callable[[Cluster], str]",
    reads_nodes: bool,
) -> "Iterator[Callable[..., LocalOperators]]":
    """Installs the operator for one namespace of its own, as processes with the chart's rights; keywords are chart values.

    In the end no request of theirs may have been forbidden: the chart grants what the code needs (k8s.md 2, row 62).
    """
    from prefill_bed.installation import QUICK, LocalOperators, merged

    made: list[LocalOperators] = []
    start = control_plane.audit_size()

    def make(**values: object) -> "LocalOperators":
        namespace = new_namespace(control_plane)
        all_values = merged(merged(QUICK, {"rbac": {"nodes": reads_nodes}}), values)
        operators = LocalOperators(control_plane, helm(control_plane), namespace, all_values)
        made.append(operators)
        return operators

    request.node.stash[STORIES].append(lambda: "\n".join(operators.tails() for operators in made))
    yield make
    for operators in made:
        operators.end()
    accounts = {f"system:serviceaccount:{operators.namespace}:{operators.account}" for operators in made}
    refused = control_plane.refused(accounts, since=start)
    assert not refused, f"forbidden by the chart's roles: {refused}"


@pytest.fixture
def nodes(bed: "Bed") -> "Cluster":
    """Two real nodes that have the images of this checkout."""
    from prefill_bed.cluster import Profile

    return bed.use(Profile(nodes=2, images=bed.images))


@pytest.fixture
def chart_values() -> dict[str, object]:
    """Values of `release` beside those that every case has; a module with other wishes overrides it."""
    return {}


@pytest.fixture
def release(
    request: pytest.FixtureRequest,
    nodes: "Cluster",
    helm: "Callable[[Cluster], Helm]",
    chart_values: dict[str, object],
) -> "Release":
    """The chart, installed on the real nodes once."""
    from prefill_bed.installation import Release

    release = Release(nodes, helm(nodes), ["/"])
    request.node.stash[STORIES].append(lambda: nodes.describe(Release.NAMESPACE))
    request.node.stash[STORIES].append(release.logs)
    release.install(**chart_values)
    return release


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[STORIES] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A failure is reported with what the fixtures can tell: pools, pods, events, logs."""
    report = yield
    if report.failed and report.when != "teardown":  # after it there is nothing left to tell
        for tell in item.stash.get(STORIES, []):
            try:
                report.sections.append(("test bed", tell()))
            except Exception as error:  # the story of a failure must not become another one
                report.sections.append(("test bed", f"nothing can be told: {error}"))
    return report

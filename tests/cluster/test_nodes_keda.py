"""Layer 6: pools scaled by a real KEDA and its HPA, on what a real Prometheus scrapes from the engines' own queues."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prefill_bed.api import Json, conditions, documents
from prefill_bed.bed import Bed
from prefill_bed.cluster import ROOT, SCRIPTS, Cluster, Profile, run_script
from prefill_bed.image_load import PATCHES, Pictures
from prefill_bed.installation import Helm, Release
from prefill_bed.load import Load, Prompts
from prefill_bed.pools import API_VERSION, PoolView, ReadyWatch, cpu_encoder_pool, cpu_pool, expect
from prefill_bed.prometheus import ADDRESS, Prometheus
from prefill_bed.waiting import until

pytestmark = pytest.mark.keda

Figure = Callable[[str], None]
SLOW = 400
"""Deadline of a state that needs engines to start while others compute on the same two cores."""
TOKENS = 1000
"""Of a prompt. Engines compute one after the other, so nearly all that is in flight waits: 1,000 rows of demand each."""
TARGET = 12_000
"""Rows per engine."""
FOR_TWO, FOR_THREE = 22, 34
"""Prompts in flight that ask for so many engines, also while up to five of them have half a prompt computed."""
IMAGES_FOR_THREE, PATCHES_PER_ENCODER = 60, 4_000
"""Images in flight: 22,680 patches, of which two in five have to wait for the three encoders of maxReplicas."""


@pytest.fixture
def nodes(bed: Bed) -> Cluster:
    """Two real nodes with KEDA, which may scale our kinds and no others, as docs/autoscaling.md has it."""
    built = Path(run_script(SCRIPTS / "build.sh", "keda").strip())
    archives = (str(built / "keda.tar"), str(built / "keda-adapter.tar"))
    cluster = bed.use(Profile(nodes=2, images=(*bed.images, *archives)))
    if cluster.api.find("namespaces", None, "keda") is None:
        place = {"CLUSTER_BIN": str(bed.binaries), "CLUSTER_DIR": str(cluster.directory)}
        run_script(SCRIPTS / "keda.sh", environment=place)
        role = cluster.api.get("clusterroles", None, "keda-operator")
        for rule in role["rules"]:
            rule["apiGroups"] = ["prefill.dev" if group == "*" else group for group in rule["apiGroups"]]
        cluster.api.patch("clusterroles", None, "keda-operator", {"rules": role["rules"]})
    return cluster


@pytest.fixture
def chart_values() -> Json:
    """As docs/autoscaling.md has them."""
    return {"rbac": {"keda": True}, "autoscaling": {"prometheus": {"serverAddress": ADDRESS}}}


@pytest.fixture
def prometheus(nodes: Cluster, helm: Callable[[Cluster], Helm], tmp_path: Path) -> Iterator[Prometheus]:
    """Scrapes engines and operator; has the chart's rules."""
    values = {"metrics": {"prometheusRule": {"enabled": True}}}
    objects = helm(nodes).render(Release.NAME, Release.NAMESPACE, values)
    (rules,) = [item["spec"] for item in objects if item["kind"] == "PrometheusRule"]
    server = Prometheus(nodes, tmp_path / "prometheus", rules)
    try:
        server.start()
        yield server
    finally:
        server.end()


@pytest.fixture
def start(
    release: Release,
    prometheus: Prometheus,
    new_namespace: Callable[[Cluster], str],
    checkpoint: Path,
) -> Callable[..., PoolView]:
    """A pool between one and four engines, without spec.replicas; keywords are fields of its spec."""

    def make(**spec: object) -> PoolView:
        view = PoolView(release.cluster, new_namespace(release.cluster), "tiny")
        scaling = {
            "actuator": "KEDA",
            "minReplicas": 1,
            "maxReplicas": 4,
            "metrics": [
                {"name": "RowsWaitingPerGPU", "target": TARGET},
                {"name": "ForecastRowsPerSecondPerGPU", "target": 1_000_000},
            ],
            "scaleUpStabilizationSeconds": 0,
            "scaleDownStabilizationSeconds": 10,
            "maxScaleUpPerMinute": 10,
            "maxScaleDownPerMinute": 10,
        }
        # Long enough for all that an engine has started; what waits is sent back at once.
        lifecycle = {"drainTimeoutSeconds": 60}
        pool = cpu_pool("tiny", checkpoint, **{"autoscaling": scaling, "lifecycle": lifecycle, **spec})
        del pool["spec"]["replicas"]
        view.create(pool)
        return view

    return make


def hpa(view: PoolView, *, name: str = "keda-hpa-tiny") -> Json:
    """KEDA's, as it is now."""
    found = view.cluster.api.find("horizontalpodautoscalers", view.namespace, name)
    assert found, f"KEDA has made no HPA {name}"
    return found


def replicas(view: PoolView) -> int:
    count: int = view.get()["spec"]["replicas"]
    return count


def wait_replicas(view: PoolView, count: int, *, seconds: float = SLOW, name: str = "keda-hpa-tiny") -> float:
    """Seconds until the autoscaler had written this count."""
    begin = time.monotonic()
    view.wait(
        f"spec.replicas {count}",
        lambda: expect(replicas(view) == count, hpa(view, name=name).get("status")),
        seconds=seconds,
    )
    return time.monotonic() - begin


def watch_syncs(view: PoolView, count: int, check: Callable[[Json], None]) -> None:
    """Holds `check` against the HPA until its controller has written `count` more states of it."""
    seen: set[str] = set()

    def enough() -> None:
        state = hpa(view)
        try:
            check(state)
        except AssertionError as error:
            pytest.fail(f"after {len(seen)} syncs: {error}; HPA {state.get('status')}")
        seen.add(state["metadata"]["resourceVersion"])
        assert len(seen) > count, f"{len(seen)} states of the HPA seen"

    view.wait(f"{count} syncs of the HPA", enough, seconds=SLOW)


NO_SPARES = {"redundancy": {"mode": "None"}}


def test_follows_the_queue(start: Callable[..., PoolView], prometheus: Prometheus, figure: Figure) -> None:
    """Queued prompts bring two more engines; when few are left, two are drained and no prompt is lost."""
    view = start(quota=NO_SPARES)
    view.wait_settled(1, seconds=SLOW)
    view.wait_condition("AutoscalingActive", "True", "Active")
    with Load(view, Prompts(TOKENS)) as load:
        begin = time.monotonic()
        load.keep(FOR_THREE)
        figure(f"{FOR_THREE} prompts of {TOKENS} tokens: 3 replicas asked for after {wait_replicas(view, 3):.0f} s")
        view.wait_settled(3, seconds=SLOW)
        figure(f"3 engines ready after {time.monotonic() - begin:.0f} s")
        series = f'namespace="{view.namespace}",pool="{view.name}"'
        desired = f'prefill_pool_desired{{{series},part="capacity"}}'
        until("the operator's series", lambda: expect(prometheus.value(desired) == 3, desired))
        forecast = f"prefill_pool_forecast_rows_per_second{{{series}}}"
        until("the forecast", lambda: expect(prometheus.value(forecast) > 0, forecast), seconds=SLOW)
        begin = time.monotonic()
        with ReadyWatch(view) as watch:
            load.keep(FOR_TWO)
            figure(f"load cut: 2 replicas asked for after {wait_replicas(view, 2):.0f} s")
            view.wait_settled(2, seconds=SLOW)
            # Placement is Spread: the engine that went is one of the two on one node.
            assert {pod["spec"]["nodeName"] for pod in view.live()} == {"node-1", "node-2"}
            load.keep(3)
            wait_replicas(view, 1)
            view.wait_settled(1, seconds=SLOW)
            figure(f"back at one engine after {time.monotonic() - begin:.0f} s")
            assert watch.lowest >= 1
    outcome = load.outcome
    figure(f"{outcome.completed} prompts completed, {outcome.moved} sent back by draining engines and taken by others")
    assert not outcome.lost, outcome.lost
    assert outcome.completed > FOR_THREE


def test_spares_are_hidden(start: Callable[..., PoolView], figure: Figure) -> None:
    """Constant demand for two engines beside a spare: over ten syncs the HPA sees two, and the spare stays a spare."""
    view = start(quota={"redundancy": {"mode": "Fixed", "spares": 1}})
    view.wait_settled(2, seconds=SLOW)
    with Load(view, Prompts(TOKENS)) as load:
        load.keep(FOR_TWO)
        wait_replicas(view, 2)
        view.wait_settled(3, seconds=SLOW)
        values: list[str] = []

        def steady(state: Json) -> None:
            status = state["status"]
            values.append(status["currentMetrics"][0]["external"]["current"]["averageValue"])
            seen = (status["currentReplicas"], status["desiredReplicas"], replicas(view), len(view.live()))
            assert seen == (2, 2, 2, 3), f"HPA's current and desired, spec.replicas, pods: {seen}"

        watch_syncs(view, 10, steady)
        figure(f"average rows per engine as the HPA saw them: {', '.join(dict.fromkeys(values))}")
        view.change(autoscaling=None)
        view.wait(
            "no HPA", lambda: expect(not view.cluster.api.list("horizontalpodautoscalers", view.namespace), "HPA")
        )
        assert replicas(view) == 2
    assert not load.outcome.lost, load.outcome.lost


def test_prometheus_away(start: Callable[..., PoolView], prometheus: Prometheus, figure: Figure) -> None:
    """Prometheus stops, then the load too: replicas stay and the pool says why; when it is back, they follow again."""
    view = start(quota=NO_SPARES)
    view.wait_settled(1, seconds=SLOW)
    with Load(view, Prompts(TOKENS)) as load:
        load.keep(FOR_TWO)
        wait_replicas(view, 2)
        view.wait_settled(2, seconds=SLOW)
        view.wait_condition("AutoscalingActive", "True", "Active")
        begin = time.monotonic()
        prometheus.stop()
        load.keep(0)
        view.wait_condition("AutoscalingActive", "False", "MetricsUnavailable")
        figure(f"MetricsUnavailable {time.monotonic() - begin:.0f} s after Prometheus ended")

        def falls_back() -> None:
            scaled = view.cluster.api.get("scaledobjects", view.namespace, view.name)
            assert conditions(scaled)["Fallback"]["status"] == "True", conditions(scaled)

        view.wait("KEDA to fall back", falls_back)
        end = time.monotonic() + 30  # three times what a scale-down waits for
        while time.monotonic() < end:
            assert (replicas(view), len(view.live())) == (2, 2)
            time.sleep(0.5)
        view.wait_condition("AutoscalingActive", "False", "MetricsUnavailable", seconds=5)
        begin = time.monotonic()
        prometheus.start()
        view.wait_condition("AutoscalingActive", "True", "Active")
        figure(f"Active {time.monotonic() - begin:.0f} s after Prometheus was started again")
        wait_replicas(view, 1)
        view.wait_settled(1, seconds=SLOW)
    assert not load.outcome.lost, load.outcome.lost


def test_node_drained_while_scaling_up(start: Callable[..., PoolView], figure: Figure) -> None:
    """A node is drained and a loading engine deleted in the midst of a scale-up: it ends at three engines and a spare."""
    view = start(quota={"redundancy": {"mode": "Fixed", "spares": 1}})
    view.wait_settled(2, seconds=SLOW)
    old = set(view.names())
    victim = "node-2"

    def first_new() -> str:
        fresh = set(view.names()) - old
        assert fresh, f"only {old}"
        return min(fresh)

    with Load(view, Prompts(TOKENS)) as load:
        load.keep(FOR_THREE)
        wait_replicas(view, 3)
        loading = view.wait("a new engine", first_new)
        begin = time.monotonic()
        view.cluster.kubectl("delete", "pod", loading, "-n", view.namespace, "--wait=false")
        try:
            view.cluster.kubectl(
                "drain", victim, f"--pod-selector=prefill.dev/pool={view.name}", "--delete-emptydir-data", "--force",
                f"--timeout={SLOW}s",
            )  # fmt: skip
            figure(f"node drained in {time.monotonic() - begin:.0f} s")
            view.wait_settled(4, seconds=SLOW)
            figure(f"3 engines and the spare ready after {time.monotonic() - begin:.0f} s")
            assert replicas(view) == 3
            assert {pod["spec"]["nodeName"] for pod in view.live()} == {"node-1"}
        finally:
            view.cluster.kubectl("uncordon", victim)
    figure(f"{load.outcome.completed} prompts completed, {load.outcome.moved} sent back and taken by others")
    assert not load.outcome.lost, load.outcome.lost


def test_encoders_scaled_object(
    release: Release,
    prometheus: Prometheus,
    new_namespace: Callable[[Cluster], str],
) -> None:
    """The ScaledObject of examples/vepool.yaml is taken by KEDA; it scales the VEPool to the minimum, from zero too."""
    (pool,) = documents(ROOT / "examples" / "vepool.yaml")
    view = PoolView(release.cluster, new_namespace(release.cluster), pool["metadata"]["name"], resource="vepools")
    view.create(pool)
    view.wait_condition("AutoscalingActive", "True", "Active")
    state = view.wait("an HPA", lambda: hpa(view, name=f"keda-hpa-{view.name}-ve"))
    assert state["spec"]["scaleTargetRef"] == {"apiVersion": API_VERSION, "kind": "VEPool", "name": view.name}
    assert (state["spec"]["minReplicas"], state["spec"]["maxReplicas"]) == (2, 6)
    view.wait("the minimum", lambda: expect(replicas(view) == 2, replicas(view)))
    view.wait("two encoders and a spare", lambda: expect(len(view.live()) == 3, view.names()))
    view.change(replicas=0)
    view.wait("KEDA to end what zero would switch off", lambda: expect(replicas(view) == 2, replicas(view)))


def test_encoders_follow_the_patches(
    release: Release,
    prometheus: Prometheus,
    new_namespace: Callable[[Cluster], str],
    checkpoint: Path,
    figure: Figure,
) -> None:
    """Waiting patches bring two more encoders; when none wait, they are drained and no image is lost."""
    view = PoolView(release.cluster, new_namespace(release.cluster), "eyes", resource="vepools")
    scaling = {
        "actuator": "KEDA",
        "minReplicas": 1,
        "maxReplicas": 3,
        "targetPendingPatchesPerVE": PATCHES_PER_ENCODER,
        "scaleUpStabilizationSeconds": 0,
        "scaleDownStabilizationSeconds": 10,
        "maxScaleUpPerMinute": 10,
        "maxScaleDownPerMinute": 10,
    }
    pool = cpu_encoder_pool("eyes", checkpoint, autoscaling=scaling)
    del pool["spec"]["replicas"]
    view.create(pool)
    view.wait_settled(1, seconds=SLOW)
    view.wait_condition("AutoscalingActive", "True", "Active", seconds=SLOW)
    queued = f'sum(ve_patches_queued{{namespace="{view.namespace}",pool="{view.name}"}})'
    with Load(view, Pictures()) as load, ReadyWatch(view) as watch:
        begin = time.monotonic()
        load.keep(IMAGES_FOR_THREE)
        until("patches in Prometheus", lambda: expect(prometheus.value(queued) > 0, queued), seconds=SLOW)
        wait_replicas(view, 3, name="keda-hpa-eyes-ve")
        figure(
            f"{IMAGES_FOR_THREE} images of {PATCHES} patches in flight: 3 encoders asked for after "
            f"{time.monotonic() - begin:.0f} s, {prometheus.value(queued):.0f} patches waiting"
        )
        view.wait_settled(3, seconds=SLOW)
        figure(f"3 encoders ready after {time.monotonic() - begin:.0f} s")
        # All three work before they go, so that drains have something to lose.
        before = load.outcome.completed
        view.wait(
            "images from three", lambda: expect(load.outcome.completed > before + 100, load.outcome), seconds=SLOW
        )
        begin = time.monotonic()
        load.keep(2)
        wait_replicas(view, 1, name="keda-hpa-eyes-ve")
        view.wait_settled(1, seconds=SLOW)
        figure(f"back at one encoder {time.monotonic() - begin:.0f} s after the load was cut to 2 images")
        assert watch.lowest >= 1
    outcome = load.outcome
    figure(f"{outcome.completed} images encoded, {outcome.moved} sent back by draining encoders and taken by others")
    assert not outcome.lost, outcome.lost
    assert outcome.completed > IMAGES_FOR_THREE

"""spec.vision of a PrefillPool: what the engine is told, what is counted for it, and who may pass."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from prefill_operator.__main__ import main
from prefill_operator.api import Pool
from prefill_operator.engine_config import engine_json
from prefill_operator.errors import PoolInvalid
from prefill_operator.host_memory import engine_memory_bytes
from prefill_operator.model import ChildKind
from prefill_operator.names import Reason
from prefill_operator.plan import plan_pool, plan_settings, planner_inputs_hash
from prefill_operator.pool_api import PrefillPoolSpec
from prefill_operator.pool_vision import canvas_bytes
from prefill_operator.quantity import quantity_bytes
from prefill_operator.render_objects import render_object
from prefill_plan.config import VisionConfig
from prefill_plan.model_spec import released_model_spec
from prefill_testing.pools import (
    CPU_BODY,
    OPEN_POLICY,
    PREFILL_BODY,
    VE_BODY,
    container_of,
    plan_of,
    pod_of,
    pool_of,
    volume_of,
)

MODEL = released_model_spec()
MIB = 1 << 20
REMOTE: Mapping[str, Any] = {"mode": "Remote", "vePoolRef": {"name": "eyes"}}
IN_ENGINE: Mapping[str, Any] = {"mode": "InEngine"}
CANVASES = 65_536 * 1_176


def told(pool: Pool) -> Any:
    """The part of the EngineConfig; None = absent."""
    assert isinstance(pool.spec, PrefillPoolSpec)
    return json.loads(engine_json(pool.spec, plan_of(pool), model=MODEL)).get("vision")


def spec_of(body: Mapping[str, Any], vision: Mapping[str, Any]) -> PrefillPoolSpec:
    spec = pool_of(body, {"vision": vision}).spec
    assert isinstance(spec, PrefillPoolSpec)
    return spec


@pytest.mark.parametrize(
    ("vision", "expected"),
    [
        ({}, None),
        ({"rowsPool": "1Gi"}, None),
        (
            REMOTE,
            {"mode": "remote", "endpoints": ["eyes-ve:50051"], "rows_bytes": 512 * MIB, "image_seconds": 10},
        ),
        (
            {"mode": "Remote", "endpoints": ["a.vision:50051", "b:1"], "rowsPool": "64Mi", "imageSeconds": 20},
            {"mode": "remote", "endpoints": ["a.vision:50051", "b:1"], "rows_bytes": 64 * MIB, "image_seconds": 20},
        ),
        (
            {**REMOTE, "numericsClass": "gpu-x"},
            {
                "mode": "remote",
                "endpoints": ["eyes-ve:50051"],
                "numerics_class": "gpu-x",
                "rows_bytes": 512 * MIB,
                "image_seconds": 10,
            },
        ),
        (IN_ENGINE, {"mode": "in-engine", "endpoints": [], "rows_bytes": 512 * MIB, "image_seconds": 10}),
    ],
    ids=["default", "none", "pool", "endpoints", "class", "in-engine"],
)
def test_engine_is_told_whom_to_ask(vision: Mapping[str, Any], expected: Any) -> None:
    assert told(pool_of(PREFILL_BODY, {"vision": vision})) == expected


@pytest.mark.parametrize(
    ("vision", "more"),
    [
        ({}, 0),
        ({"rowsPool": "1Gi"}, 0),
        ({**REMOTE, "rowsPool": "1Gi"}, 1024 * MIB),
        (IN_ENGINE, 1024 * MIB + CANVASES),
    ],
    ids=["default", "none", "remote", "in-engine"],
)
@pytest.mark.parametrize("kvd", [{}, {"kvd": {"enabled": True, "image": "kvd:1"}}], ids=["alone", "kvd"])
def test_rows_are_counted_wherever_they_lie(vision: Mapping[str, Any], more: int, kvd: Mapping[str, Any]) -> None:
    """In the size of /dev/shm, in the engine's memory request, and in the sum per node of the plan."""
    before, after = pool_of(PREFILL_BODY, kvd), pool_of(PREFILL_BODY, {**kvd, "vision": vision})
    sizes = [quantity_bytes(volume_of(pod_of(pool), "shm")["emptyDir"]["sizeLimit"]) for pool in (before, after)]
    limits = [
        quantity_bytes(container_of(pod_of(pool), "engine")["resources"]["limits"]["memory"])
        for pool in (before, after)
    ]
    plans = plan_of(before), plan_of(after)
    assert isinstance(before.spec, PrefillPoolSpec)
    assert isinstance(after.spec, PrefillPoolSpec)

    assert 0 <= sizes[1] - sizes[0] - more < MIB
    assert abs(limits[1] - limits[0] - more) < MIB
    requested = [
        engine_memory_bytes(pool.spec, ep=plan.ep, engram_bytes=plan.engram_host_bytes)
        for pool, plan in zip((before, after), plans, strict=True)
    ]
    assert requested[1] - requested[0] == more
    assert plans[1].host_bytes_per_pod - plans[0].host_bytes_per_pod == more


def test_rows_can_make_a_node_too_small() -> None:
    node = f"{plan_of(pool_of(PREFILL_BODY)).host_bytes_per_pod * 2 // MIB + 1}Mi"
    gpu = {"hostMemoryPerNode": node}
    fits = plan_pool(pool_of(PREFILL_BODY, {"gpu": gpu}), floor=None, nodes=None, model=MODEL)
    larger = pool_of(PREFILL_BODY, {"gpu": gpu, "expertParallel": {"size": 4}, "vision": REMOTE})
    refused = plan_pool(larger, floor=None, nodes=None, model=MODEL)

    assert (fits.feasible, fits.ep) == (True, 4)
    assert (refused.feasible, refused.reason) == (False, Reason.HOST_MEMORY_SHORT)


def test_an_in_engine_encoder_is_counted_on_the_gpu() -> None:
    reserved = [
        plan_settings(spec_of(PREFILL_BODY, vision), MODEL).reserved_bytes for vision in ({}, REMOTE, IN_ENGINE)
    ]

    assert reserved[0] == reserved[1]
    # Weights, a full batch of 16,384 patches and a CUDA context.
    assert reserved[2] - reserved[0] == 970_536_960 + 16_384 * 14_336 + 500_000_000


def test_rows_of_a_cpu_engine_stay_inside_its_limit() -> None:
    """An eighth of 2 GiB; of a small pool, what is asked for."""
    assert told(pool_of(CPU_BODY, {"vision": {**REMOTE, "rowsPool": "1Gi"}}))["rows_bytes"] == 256 * MIB
    assert told(pool_of(CPU_BODY, {"vision": {**REMOTE, "rowsPool": "64Mi"}}))["rows_bytes"] == 64 * MIB
    assert plan_settings(spec_of(CPU_BODY, IN_ENGINE), MODEL).reserved_bytes == 2_500_000_000


def test_plan_inputs_are_as_before_where_nobody_encodes() -> None:
    """Else an operator upgrade would void every escalated EP floor."""
    hashes = [
        planner_inputs_hash(spec_of(PREFILL_BODY, vision))
        for vision in ({}, {"rowsPool": "1Gi"}, REMOTE, {**REMOTE, "rowsPool": "1Gi"}, IN_ENGINE)
    ]

    assert hashes[0] == hashes[1] == "b39ff86f"
    assert len(set(hashes[1:])) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"mode": "Remote", "vePoolRef": {"name": "other"}},
        {"mode": "Remote", "endpoints": ["a:1"]},
        {**REMOTE, "rowsPool": "1Gi"},
        {**REMOTE, "imageSeconds": 11},
        {**REMOTE, "numericsClass": "gpu-x"},
        IN_ENGINE,
        {},
    ],
    ids=["other", "endpoints", "rows", "seconds", "class", "in-engine", "none"],
)
def test_a_change_replaces_engines(change: Mapping[str, Any]) -> None:
    assert plan_of(pool_of(PREFILL_BODY, {"vision": change})).revision != (
        plan_of(pool_of(PREFILL_BODY, {"vision": REMOTE})).revision
    )


def test_two_spellings_of_one_size_are_one_revision() -> None:
    one, other = ({**REMOTE, "rowsPool": size} for size in ("1Gi", "1024Mi"))

    assert plan_of(pool_of(PREFILL_BODY, {"vision": one})).revision == (
        plan_of(pool_of(PREFILL_BODY, {"vision": other})).revision
    )


@pytest.mark.parametrize("setting", ["vision.mode=remote", 'vision.endpoints=["a:1"]', "vision.rows_bytes=1"])
def test_arguments_cannot_say_it_a_second_time(setting: str) -> None:
    with pytest.raises(PoolInvalid, match=r"is set by the operator, from spec\.vision"):
        pod_of(pool_of(PREFILL_BODY, {"engine": {"args": ["--set", setting]}}))


@pytest.mark.parametrize(
    ("setting", "field"),
    [
        ("batching.max_patches_per_batch=1", "batching.maxPatchesPerBatch"),
        ("queue.max_patches=99999999", "balancing.maxPendingPatchesPerVE"),
        ("device=cpu", "encoder.device"),
    ],
)
def test_arguments_of_an_encoder_cannot_undo_its_fields(setting: str, field: str) -> None:
    with pytest.raises(PoolInvalid, match=rf"is set by the operator, from spec\.{field}"):
        pod_of(pool_of(VE_BODY, {"encoder": {"args": ["--set", setting]}}))


@pytest.mark.parametrize(
    ("spec", "shm"),
    [
        ({}, "4096Mi"),
        ({"encoder": {"memory": "3Gi"}}, "4096Mi"),
        ({"balancing": {"maxPendingPatchesPerVE": 4_000_000}}, "6599Mi"),
    ],
    ids=["default", "small", "queue"],
)
def test_shared_memory_of_an_encoder_holds_its_queue(spec: Mapping[str, Any], shm: str) -> None:
    assert volume_of(pod_of(pool_of(VE_BODY, spec)), "shm")["emptyDir"]["sizeLimit"] == shm


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (
            {"balancing": {"maxPendingPatchesPerVE": 2_000_000}, "encoder": {"memory": "8Gi"}},
            "spec.balancing.maxPendingPatchesPerVE is 2000000: 2000000 waiting patches take 2.35 GB",
        ),
        (
            {"batching": {"maxPatchesPerBatch": 1_000_000}, "encoder": {"memory": "8Gi"}},
            "spec.batching.maxPatchesPerBatch is 1000000: 4000000 waiting patches take 4.70 GB",
        ),
    ],
    ids=["pending", "batch"],
)
def test_a_queue_beyond_the_memory_is_refused(spec: Mapping[str, Any], field: str) -> None:
    with pytest.raises(PoolInvalid, match=field):
        pod_of(pool_of(VE_BODY, spec))


def test_canvases_are_counted_as_an_encoder_allocates_them() -> None:
    assert canvas_bytes(65_536) == CANVASES
    assert MODEL.vision is not None
    assert MODEL.vision.patch_size == 14


def test_network_policies_let_engines_pass_to_encoders() -> None:
    """Engines may open any connection, and encoders take gRPC from pods of every namespace."""
    asking, asked = pool_of(PREFILL_BODY, {"vision": REMOTE}), pool_of(VE_BODY)
    ours, theirs = (
        render_object(ChildKind.NETWORK_POLICY, pool, plan_of(pool), OPEN_POLICY, model=MODEL, freeze_scale_down=False)[
            "spec"
        ]
        for pool in (asking, asked)
    )
    (rule,) = [rule for rule in theirs["ingress"] if any(port["port"] == "grpc" for port in rule["ports"])]

    assert ours["policyTypes"] == ["Ingress"]
    assert rule["from"] == [{"namespaceSelector": {}}]
    assert theirs["podSelector"]["matchLabels"] == {"prefill.dev/kind": "VEPool", "prefill.dev/pool": "flash"}


@pytest.mark.parametrize(
    ("vision", "row"),
    [
        ({}, ""),
        (REMOTE, "VEPool eyes (eyes-ve:50051); rows 512Mi of /dev/shm; 10 s each"),
        ({"mode": "Remote", "endpoints": ["a:1", "b:2"]}, "a:1, b:2; rows 512Mi"),
        (IN_ENGINE, "an encoder inside each PE; rows 512Mi of /dev/shm; 10 s each; 1.7 GB per GPU"),
    ],
    ids=["none", "pool", "endpoints", "in-engine"],
)
def test_plan_shows_who_encodes(
    vision: Mapping[str, Any], row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(json.dumps({**PREFILL_BODY, "spec": {**PREFILL_BODY["spec"], "vision": vision}}))
    assert main(["plan", "-f", str(file)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  images")]
    assert main(["plan", "-f", str(file), "--json"]) == 0
    told_to_machines = json.loads(capsys.readouterr().out)["vision"]

    assert len(rows) == bool(row)
    assert row in "".join(rows)
    assert told_to_machines == told(pool_of(PREFILL_BODY, {"vision": vision}))


def test_every_setting_of_vision_has_its_field() -> None:
    """Arguments may not say them, so the spec must."""
    full = {**REMOTE, "numericsClass": "gpu-x", "rowsPool": "1Gi", "imageSeconds": 11}

    assert set(told(pool_of(PREFILL_BODY, {"vision": full}))) == set(VisionConfig.__struct_fields__)

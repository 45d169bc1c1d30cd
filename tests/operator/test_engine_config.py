"""EngineConfig as the operator writes it: from the spec and the plan, accepted by the engine, bound to the revision."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefill_operator.engine_config import balancing_json, encoder_config, engine_config, engine_json, num_ranks
from prefill_operator.pool_api import PrefillPoolSpec
from prefill_operator.render_objects import render_config_map
from prefill_operator.render_pod import render_pod
from prefill_operator.ve_api import VEPoolSpec
from prefill_plan.config import Device, EngineConfig, RecordFormat, StoreKind
from prefill_plan.kv_layout import state_layout
from prefill_plan.model_spec import released_model_spec
from prefill_testing.pools import (
    CPU_BODY,
    OPEN_POLICY,
    PREFILL_BODY,
    VE_BODY,
    container_of,
    create_of,
    example_pools,
    plan_of,
    pool_of,
)

MODEL = released_model_spec()
GIB = 1 << 30
ENGINE_PROFILES = ("h200", "b200", "gb300", "h20", "laptop")

# The engine's own reader, in a process of its own: the operator and its tests never import the engine.
READER = """
import json, sys
from pathlib import Path
from prefill_engine.settings import load_config
for line in sys.stdin:
    path, overrides = json.loads(line)
    config = load_config(Path(path), overrides)
    print(config.server.port, config.server.load_timeout_seconds, config.server.drain_seconds)
"""


ENCODER_READER = """
import json, sys
from pathlib import Path
from prefill_engine.settings import load_encoder_config
from prefill_plan.encoder_config import check_encoder_config
for line in sys.stdin:
    path, overrides = json.loads(line)
    config = load_encoder_config(Path(path), overrides)
    check_encoder_config(config)
    rows, server = config.rows, config.server
    print(json.dumps([
        config.device, config.ops, rows.memory_bytes, rows.cache_bytes, config.decode.workers,
        server.load_timeout_seconds, server.drain_seconds,
    ]))
"""


def _config(body: Any, spec: dict[str, Any] | None = None) -> EngineConfig:
    pool = pool_of(body, spec)
    assert isinstance(pool.spec, PrefillPoolSpec)
    return engine_config(pool.spec, plan_of(pool), model=MODEL)


def test_the_engine_reads_every_example(tmp_path: Path) -> None:
    lines = []
    for profile in ENGINE_PROFILES:
        (pool,) = example_pools(profile)
        plan = plan_of(pool)
        data = render_config_map(pool, plan, model=MODEL)["data"]["engine.json"]
        path = tmp_path / f"{profile}.json"
        path.write_text(data)
        args = container_of(render_pod(pool, plan, create_of(pool, plan), OPEN_POLICY), "engine")["args"]
        overrides = [value for option, value in itertools.pairwise(args) if option == "--set"]
        lines.append(json.dumps([str(path), overrides]))

    done = subprocess.run(
        [sys.executable, "-c", READER], input="\n".join(lines), capture_output=True, text=True, check=False
    )

    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "50051 1800.0 120.0",
        "50051 1800.0 120.0",
        "50051 1800.0 120.0",
        "50051 3600.0 120.0",
        "50051 120.0 30.0",
    ]


@pytest.mark.parametrize("profile", ENGINE_PROFILES)
def test_text_and_struct_say_the_same(profile: str) -> None:
    (pool,) = example_pools(profile)
    assert isinstance(pool.spec, PrefillPoolSpec)
    plan = plan_of(pool)
    text = engine_json(pool.spec, plan, model=MODEL)

    assert msgspec.json.decode(text, type=EngineConfig) == engine_config(pool.spec, plan, model=MODEL)


def test_gpu_engine_follows_the_plan() -> None:
    pool = pool_of(PREFILL_BODY)
    plan = plan_of(pool)
    config = _config(PREFILL_BODY)

    assert (config.device, config.ops) == (Device.GPU, "triton")
    assert (config.parallel.dp_size, config.parallel.ep_size) == (4, 4)
    assert config.model.path == "/models/flash"
    assert config.max_context_tokens == 131_072
    assert config.kv.pool_tokens == plan.kv_tokens_per_gpu
    assert config.kv.record_format is RecordFormat.FP4
    assert config.scheduler.chunk_cap_tokens == 32_768
    assert (config.replay.keep_tokens, config.replay.max_rollback_tokens) == (140, 6)
    assert config.server.host == "0.0.0.0"


def test_state_slots_take_the_bytes_that_the_plan_counts() -> None:
    plan = plan_of(pool_of(PREFILL_BODY))
    assert plan.memory is not None
    state = state_layout(MODEL, keep_tokens=140, rollback_tokens=6)

    assert _config(PREFILL_BODY).kv.state_slots * state.gpu_slot_bytes == plan.memory.state_bytes


def test_pools_are_split_over_the_ranks() -> None:
    config = _config(PREFILL_BODY, {"kvCache": {"hostPool": "64Gi", "swaPool": "16Gi"}})

    assert (config.store.kind, config.store.max_bytes) == (StoreKind.MEMORY, 16 * GIB)
    assert config.kv.snapshot_bytes == 4 * GIB


def test_pools_are_kvds_where_it_runs() -> None:
    config = _config(PREFILL_BODY, {"kvd": {"enabled": True, "image": "kvd:1", "required": True}})

    assert (config.store.max_bytes, config.kv.snapshot_bytes, config.store.required) == (0, 0, True)


def test_a_degraded_plan_shrinks_the_engine() -> None:
    spec = {"gpu": {"product": "NVIDIA-H20"}, "expertParallel": {"max": 4, "allowDegraded": True}}
    pool = pool_of(PREFILL_BODY, spec)

    assert plan_of(pool).degraded == "C8k"
    assert _config(PREFILL_BODY, spec).scheduler.chunk_cap_tokens == 8192


def test_fill_spare_off_keeps_to_what_was_asked_for() -> None:
    spec = {"kvCache": {"fillSpare": False, "tokensPerGPU": 2_097_152}}

    assert _config(PREFILL_BODY, spec).kv.pool_tokens == 2_097_152


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_cpu_engine_is_one_rank_whatever_the_ep(ep: int) -> None:
    spec = {"expertParallel": {"size": ep}, "cpu": {"pretendGPUs": True}}
    pool = pool_of(CPU_BODY, spec)
    config = _config(CPU_BODY, spec)

    assert (plan_of(pool).ep, num_ranks(plan_of(pool))) == (ep, 1)
    assert (config.device, config.ops) == (Device.CPU, "ref")
    assert (config.parallel.dp_size, config.parallel.ep_size) == (1, 1)


@pytest.mark.parametrize(
    ("resources", "store", "snapshots"),
    [
        ({"requests": {"memory": "1Gi"}, "limits": {"memory": "2Gi"}}, GIB // 2, GIB // 4),
        ({"requests": {"memory": "1Gi"}}, GIB // 4, GIB // 8),
        ({"requests": {"cpu": 1}}, 64 * GIB, 16 * GIB),
    ],
    ids=["limit", "request", "neither"],
)
def test_cpu_pools_stay_within_the_container(resources: dict[str, Any], store: int, snapshots: int) -> None:
    body = {**CPU_BODY, "spec": {**CPU_BODY["spec"], "engine": {**CPU_BODY["spec"]["engine"], "resources": resources}}}
    config = _config(body)

    assert (config.store.max_bytes, config.kv.snapshot_bytes) == (store, snapshots)


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ({"pvc": {"claimName": "ckpt"}}, "/models"),
        ({"pvc": {"claimName": "ckpt", "path": "/a/b/"}}, "/models/a/b"),
        ({"pvc": None, "hostPath": {"path": "/mnt/models/flash"}}, "/models"),
        ({"pvc": None, "threeFS": {"path": "/models/flash", "mountPath": "/mnt/3fs"}}, "/mnt/3fs/models/flash"),
    ],
    ids=["pvc", "pvc-path", "hostPath", "threeFS"],
)
def test_model_path_is_where_the_source_is_mounted(source: dict[str, Any], path: str) -> None:
    body = {**PREFILL_BODY, "spec": {**PREFILL_BODY["spec"], "model": {"name": "f", "revision": "r", "source": {}}}}

    assert _config(body, {"model": {"source": source}}).model.path == path


@pytest.mark.parametrize(
    "changes",
    [
        {"replicas": 7},
        {"lifecycle": {"loadTimeoutSeconds": 99, "drainTimeoutSeconds": 7}},
        {"scheduling": {"placement": "Spread", "nodeSelector": {"a": "b"}}},
        {"rollout": {"maxSurge": 3}},
        {"monitoring": {"podMonitor": True}},
        {"quota": {"maxPEs": 9, "redundancy": {"spares": 3}}},
        {"autoscaling": {"maxReplicas": 4}},
        {"paused": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_config_map_depends_on_nothing_that_does_not_roll(changes: dict[str, Any]) -> None:
    """It is immutable and named by the revision, so equal names must mean equal content."""
    before, after = pool_of(PREFILL_BODY), pool_of(PREFILL_BODY, changes)

    assert render_config_map(after, plan_of(after), model=MODEL) == render_config_map(
        before, plan_of(before), model=MODEL
    )


def test_kvd_and_3fs_files_are_in_the_config_map() -> None:
    kvd = {
        "enabled": True,
        "image": "kvd:1",
        "store": "usrbio",
        "path": "/3fs/kv",
        "clusterID": 'pr"od',
        "mgmtdAddresses": ["RDMA://10.1.0.1:8000", "RDMA://10.1.0.2:8000"],
        "tokenSecretRef": {"name": "t"},
    }
    pool = pool_of(PREFILL_BODY, {"kvd": kvd})
    data = render_config_map(pool, plan_of(pool), model=MODEL)["data"]

    assert sorted(data) == ["engine.json", "kvd-3fs.toml", "kvd.json"]
    assert json.loads(data["kvd.json"])["store"] == {"kind": "usrbio", "path": "/3fs/kv"}
    assert json.loads(data["kvd.json"])["pool_bytes"] == 80 * GIB
    assert 'cluster_id = "pr\\"od"' in data["kvd-3fs.toml"]
    assert 'mgmtd_server_addresses = ["RDMA://10.1.0.1:8000", "RDMA://10.1.0.2:8000"]' in data["kvd-3fs.toml"]
    assert 'token_file = "/run/secrets/kvd/token"' in data["kvd-3fs.toml"]


def test_encoder_config_says_how_to_batch() -> None:
    pool = pool_of(VE_BODY, {"batching": {"maxPatchesPerBatch": 20_000}, "balancing": {"policy": "RoundRobin"}})
    assert isinstance(pool.spec, VEPoolSpec)
    config = encoder_config(pool.spec)

    assert config.batching.max_patches_per_batch == 20_000
    assert config.max_queued_patches == 80_000
    assert json.loads(balancing_json(pool.spec)) == {"policy": "RoundRobin", "max_pending_patches_per_ve": 80_000}


def test_encoder_reads_what_we_write_with_the_arguments_we_give(tmp_path: Path) -> None:
    lines = []
    for name, encoder in (("gpu", {}), ("cpu", {"device": "cpu", "memory": "2Gi", "cpu": "500m"})):
        pool = pool_of(VE_BODY, {"encoder": encoder})
        assert isinstance(pool.spec, VEPoolSpec)
        plan = plan_of(pool)
        path = tmp_path / f"{name}.json"
        path.write_text(render_config_map(pool, plan, model=MODEL)["data"]["encoder.json"])
        args = container_of(render_pod(pool, plan, create_of(pool, plan), OPEN_POLICY), "encoder")["args"]
        overrides = [value for option, value in itertools.pairwise(args) if option == "--set"]
        lines.append(json.dumps([str(path), overrides]))
    done = subprocess.run(
        [sys.executable, "-c", ENCODER_READER], input="\n".join(lines), capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    gpu, cpu = map(json.loads, done.stdout.splitlines())
    assert gpu == ["gpu", "triton", 2 * GIB, GIB, 4, 300.0, 60.0]
    assert cpu == ["cpu", "ref", GIB // 4, GIB // 8, 1, 300.0, 60.0]

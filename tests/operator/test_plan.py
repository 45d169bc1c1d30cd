import pytest
from msgspec.structs import replace

from prefill_operator.api_parts import Resources
from prefill_operator.api_status import PlannedEngram, PlanSource
from prefill_operator.gpu_products import gpu_bytes
from prefill_operator.model import ObservedNode
from prefill_operator.names import Reason
from prefill_operator.plan import EPFloor, PoolPlan, next_ep, parse_floor, plan_pool, planner_inputs_hash
from prefill_operator.pool_api import (
    Architecture,
    ContextSpec,
    CpuProfile,
    EngineSpec,
    EngramBlock,
    EngramPlacement,
    ExpertParallelSpec,
    GpuSpec,
    KvCacheSpec,
    KvdSpec,
    ModelBlock,
    PrefillPoolSpec,
)
from prefill_plan.config import Device
from prefill_plan.memory import GPU_BYTES
from prefill_plan.model_spec import released_model_spec
from prefill_testing.planner_pools import make_pool, make_spec, make_ve_spec

MODEL = released_model_spec()
H200 = GpuSpec(product="NVIDIA-H200")
CPU_ENGINE = EngineSpec(image="engine:1", device=Device.CPU, resources=Resources(requests={"cpu": "1"}))


def flash(**changes: object) -> PrefillPoolSpec:
    return replace(make_spec(architecture=Architecture.FLASH, gpu=H200), **changes)


def plan(spec: object, *, floor: EPFloor | None = None, nodes: tuple[ObservedNode, ...] | None = None) -> PoolPlan:
    return plan_pool(make_pool(spec), floor=floor, nodes=nodes, model=MODEL)


@pytest.mark.parametrize(
    ("product", "per_node", "ep", "engram", "spare"),
    [
        ("NVIDIA-H100-80GB-HBM3", 8, 8, PlannedEngram.HOST, 17.4),
        ("NVIDIA-H20", 8, 8, PlannedEngram.GPU, 9.2),
        ("NVIDIA-H200", 8, 4, PlannedEngram.HOST, 41.6),
        ("NVIDIA-B200", 8, 2, PlannedEngram.HOST, 3.5),
        ("NVIDIA-GB300", 4, 2, PlannedEngram.HOST, 97.5),
    ],
)
def test_plan_takes_the_smallest_ep_of_the_table(
    product: str, per_node: int, ep: int, engram: PlannedEngram, spare: float
) -> None:
    """k8s.md 4.3."""
    limit = ExpertParallelSpec(max=min(8, per_node))
    found = plan(flash(gpu=GpuSpec(product=product, per_node=per_node), expert_parallel=limit))
    assert (found.feasible, found.ep, found.gpus, found.engram) == (True, ep, ep, engram)
    assert found.memory is not None
    assert found.memory.spare_bytes / 1e9 == pytest.approx(spare, abs=0.05)
    assert (found.reason, found.source) == (Reason.MINIMUM_EP, PlanSource.PLANNER)


@pytest.mark.parametrize(
    ("product", "key"),
    [
        ("NVIDIA-H100-PCIe", "H100-80"),
        ("NVIDIA-A100-SXM4-80GB", "A100-80"),
        ("NVIDIA-H20-3e", "H20-141"),
        ("NVIDIA-H200-NVL", "H200-141"),
        ("NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition", "RTXPRO6000-96"),
        ("AMD_Instinct_MI300X_OAM", "MI300X-192"),
        ("B200-180/192", "B200-180/192"),
    ],
)
def test_gpu_product_names_its_row(product: str, key: str) -> None:
    assert gpu_bytes(product) == GPU_BYTES[key]


@pytest.mark.parametrize(
    "product",
    [
        "NVIDIA-H100-NVL",
        "NVIDIA-H200-MIG-1g.18gb",
        "NVIDIA-H200-SHARED",
        "NVIDIA-A100-SXM4-40GB",
        "NVIDIA-GB200",
        "H2000",
        "",
    ],
)
def test_gpu_product_that_only_looks_alike_is_unknown(product: str) -> None:
    assert gpu_bytes(product) is None


def test_plan_refuses_an_unknown_gpu_and_says_what_to_set() -> None:
    found = plan(flash(gpu=GpuSpec(product="NVIDIA-H100-NVL")))
    assert (found.feasible, found.reason, found.ep, found.revision) == (False, Reason.UNKNOWN_GPU, 0, "")
    assert "NVIDIA-H100-NVL" in found.message
    assert "gpu.memory" in found.message


def test_plan_memory_override_wins_over_the_product() -> None:
    assert plan(flash(gpu=GpuSpec(product="NVIDIA-H100-NVL", memory=150_100_000_000))).ep == 4
    assert plan(flash(gpu=GpuSpec(product="NVIDIA-H200", memory="84900M"))).ep == 8


def test_plan_refusal_shows_the_sum_of_every_option() -> None:
    found = plan(flash(gpu=GpuSpec(memory="40G")))
    assert (found.feasible, found.reason) == (False, Reason.NO_EP_FITS)
    for option in ("EP2, Engram on gpu", "EP4, Engram on host", "EP8, Engram on host"):
        assert option in found.message
    assert "limit 38.80 GB" in found.message
    assert "GB short" in found.message


def test_plan_degrades_only_when_allowed_and_says_that_it_could() -> None:
    gpu, only_8 = GpuSpec(memory="84900M"), ExpertParallelSpec(min=8)
    on_gpu = EngramBlock(placement=EngramPlacement.GPU)
    refused = plan(flash(gpu=gpu, expert_parallel=only_8, engram=on_gpu))
    assert refused.reason is Reason.NO_EP_FITS
    assert "R0,C8k,sub4k,16seq with expertParallel.allowDegraded" in refused.message
    degraded = plan(flash(gpu=gpu, expert_parallel=replace(only_8, allow_degraded=True), engram=on_gpu))
    assert (degraded.feasible, degraded.reason, degraded.degraded) == (True, Reason.DEGRADED, "R0,C8k,sub4k,16seq")
    assert degraded.memory is not None
    assert degraded.memory.settings.chunk_tokens == 8192


@pytest.mark.parametrize(
    ("limits", "ep"),
    [
        (ExpertParallelSpec(min=8), 8),
        (ExpertParallelSpec(max=4), 4),
        (ExpertParallelSpec(size=8), 8),
        (ExpertParallelSpec(size="4"), 4),
    ],
)
def test_plan_respects_the_users_limits(limits: ExpertParallelSpec, ep: int) -> None:
    found = plan(flash(expert_parallel=limits))
    assert found.ep == ep
    assert (found.source is PlanSource.FIXED) == (limits.fixed_size is not None)


def test_plan_fixed_size_that_does_not_fit_is_refused() -> None:
    found = plan(flash(expert_parallel=ExpertParallelSpec(size=2)))
    assert (found.feasible, found.reason) == (False, Reason.NO_EP_FITS)


def test_plan_host_memory_decides_where_the_gpu_does_not() -> None:
    """A B200 fits EP 2 with Engram on the host, but four copies per node need 1,447 GB."""
    gpu = GpuSpec(product="NVIDIA-B200", host_memory_per_node="900G")
    found = plan(flash(gpu=gpu))
    assert (found.feasible, found.ep, found.engram) == (True, 4, PlannedEngram.GPU)
    assert "limit 900.0 GB" in found.message


def test_plan_refuses_when_host_memory_is_short_everywhere() -> None:
    gpu = GpuSpec(product="NVIDIA-H100-80GB-HBM3", host_memory_per_node="300G")
    found = plan(flash(gpu=gpu))
    assert (found.feasible, found.reason) == (False, Reason.HOST_MEMORY_SHORT)
    assert "1 PEs x 567.8 = 567.8 GB per node, limit 300.0 GB" in found.message


def test_plan_counts_host_memory_of_one_pe() -> None:
    found = plan(flash())
    pools = (64 + 16 + 4 + 4 * 32) * 2**30
    assert found.host_bytes_per_pod == 768_022_850 * 264 + pools


@pytest.mark.parametrize(
    ("kvd", "more"),
    [
        (KvdSpec(), 0),
        (KvdSpec(memory="1Gi", pool_size="2Gi"), 0),
        (KvdSpec(enabled=True, image="kvd:1"), 16),
        (KvdSpec(enabled=True, image="kvd:1", memory="1Gi"), 1),
        (KvdSpec(enabled=True, image="kvd:1", pool_size="100Gi"), 16 + 20),
    ],
    ids=["none", "not enabled", "enabled", "memory", "poolSize"],
)
def test_plan_counts_host_memory_of_the_sidecar(kvd: KvdSpec, more: int) -> None:
    """Beside the pools, which move from the engine to kvd: kvd.memory, and what kvd.poolSize has more."""
    assert plan(flash(kvd=kvd)).host_bytes_per_pod - plan(flash()).host_bytes_per_pod == more * 2**30


def test_plan_refuses_a_pool_of_kvd_that_no_node_holds() -> None:
    gpu = GpuSpec(product="NVIDIA-B200", host_memory_per_node="1160G")
    kvd = KvdSpec(enabled=True, image="kvd:1", pool_size="900Gi")
    found = plan(flash(gpu=gpu, kvd=kvd))
    assert (found.feasible, found.reason) == (False, Reason.HOST_MEMORY_SHORT)
    assert "host memory 4 PEs x (275.8 engine + 983.5 kvd) = 5037.3 GB per node, limit 1160.0 GB" in found.message
    roomy = plan(flash(gpu=replace(gpu, host_memory_per_node="6T"), kvd=kvd))
    assert (roomy.feasible, roomy.ep) == (True, 2)
    assert "4 PEs x (275.8 engine + 983.5 kvd)" in roomy.message


def test_plan_inputs_are_as_before_where_no_kvd_runs() -> None:
    """Else an operator upgrade would void escalated EP floors; with kvd its bytes are an input of the host sum."""
    sizes = KvdSpec(memory="1Gi", pool_size="2Gi")
    assert planner_inputs_hash(flash(kvd=sizes)) == planner_inputs_hash(flash()) == "3b74d320"
    enabled = [replace(sizes, enabled=True), replace(sizes, enabled=True, pool_size="4Gi"), KvdSpec(enabled=True)]
    assert len({planner_inputs_hash(flash(kvd=kvd)) for kvd in (KvdSpec(), *enabled)}) == 4


def test_plan_pool_tokens_follow_budget_fill_and_context() -> None:
    tokens = plan(flash(kv_cache=KvCacheSpec(tokens_per_gpu=500_000, fill_spare=False)))
    budget = plan(flash(kv_cache=KvCacheSpec(budget_per_gpu="10G", fill_spare=False)))
    long = plan(
        flash(context=ContextSpec(max_tokens=1_048_576), kv_cache=KvCacheSpec(tokens_per_gpu=4096, fill_spare=False))
    )
    filled = plan(flash())
    assert tokens.kv_tokens_per_gpu == 500_000
    assert budget.kv_tokens_per_gpu == 10**10 // 114_048 * 128
    assert long.kv_tokens_per_gpu == 1_048_576
    assert filled.memory is not None
    assert filled.kv_tokens_per_gpu == filled.memory.max_pool_tokens > 40_000_000


def test_plan_reserved_memory_enters_the_sum() -> None:
    roomy, tight = plan(flash(gpu=GpuSpec(product="NVIDIA-H200"))), plan(flash(gpu=replace(H200, reserved="20G")))
    assert roomy.memory is not None
    assert tight.memory is not None
    assert tight.memory.need_bytes - roomy.memory.need_bytes == 17_500_000_000


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"context": ContextSpec(max_tokens=4_194_304)}, "context = 4194304"),
        ({"context": ContextSpec(keep_tokens=100)}, "100"),
        ({"expert_parallel": ExpertParallelSpec(redundancy_slots=30)}, "414 slots"),
    ],
    ids=["beyond the model", "keep below the window", "slots that do not divide"],
)
def test_plan_refuses_what_no_engine_can_have(change: dict[str, object], word: str) -> None:
    found = plan(flash(**change))
    assert (found.feasible, found.reason) == (False, Reason.SPEC_INVALID)
    assert word in found.message


def test_plan_floor_raises_the_ep_and_is_named() -> None:
    spec = flash()
    found = plan(spec, floor=EPFloor(ep=8, inputs=planner_inputs_hash(spec)))
    assert (found.ep, found.source, found.reason) == (8, PlanSource.ESCALATED, Reason.ESCALATED)
    assert "floor 8" in found.message


@pytest.mark.parametrize(
    "change",
    [
        {"model": replace(flash().model, revision="2")},
        {"gpu": GpuSpec(product="NVIDIA-H20-3e")},
        {"context": ContextSpec(max_tokens=65_536)},
        {"context": ContextSpec(chunk_tokens_per_gpu=16_384)},
        {"kv_cache": KvCacheSpec(sequences_per_gpu=32)},
        {"expert_parallel": ExpertParallelSpec(redundancy_slots=0)},
    ],
    ids=["revision", "gpu", "context", "chunk", "sequences", "slots"],
)
def test_plan_floor_is_void_as_soon_as_inputs_change(change: dict[str, object]) -> None:
    floor = EPFloor(ep=8, inputs=planner_inputs_hash(flash()))
    assert plan(flash(**change), floor=floor).source is PlanSource.PLANNER


@pytest.mark.parametrize(
    "change", [{"replicas": 9}, {"engine": EngineSpec(image="engine:2")}], ids=["replicas", "image"]
)
def test_plan_floor_holds_over_changes_that_are_no_inputs(change: dict[str, object]) -> None:
    floor = EPFloor(ep=8, inputs=planner_inputs_hash(flash()))
    assert plan(flash(**change), floor=floor).ep == 8


def test_plan_floor_below_the_minimum_changes_nothing() -> None:
    spec = flash(expert_parallel=ExpertParallelSpec(min=4))
    found = plan(spec, floor=EPFloor(ep=2, inputs=planner_inputs_hash(spec)))
    assert (found.ep, found.source) == (4, PlanSource.PLANNER)


@pytest.mark.parametrize("text", [None, "", "4", "4@", "3@abc", "x@abc", "16@abc"])
def test_parse_floor_reads_foreign_text_as_none(text: str | None) -> None:
    assert parse_floor(text) is None


def test_parse_floor_reads_its_own_text() -> None:
    assert parse_floor(EPFloor(ep=4, inputs="1f2e3d4c").text()) == EPFloor(ep=4, inputs="1f2e3d4c")


@pytest.mark.parametrize(
    ("limits", "ep", "expected"),
    [
        (ExpertParallelSpec(), 2, 4),
        (ExpertParallelSpec(), 4, 8),
        (ExpertParallelSpec(), 8, None),
        (ExpertParallelSpec(max=4), 4, None),
        (ExpertParallelSpec(size=2), 2, None),
    ],
)
def test_next_ep(limits: ExpertParallelSpec, ep: int, expected: int | None) -> None:
    assert next_ep(flash(expert_parallel=limits), ep) == expected


@pytest.mark.parametrize(("pretend", "gpus"), [(False, 0), (True, 2)])
def test_plan_cpu_profile_needs_no_gpu_and_no_sum(pretend: bool, gpus: int) -> None:
    """C27."""
    tiny = ModelBlock(name="tiny", revision="1", source=flash().model.source, architecture=Architecture.TEST_TINY)
    found = plan(PrefillPoolSpec(model=tiny, engine=CPU_ENGINE, cpu=CpuProfile(pretend_gpus=pretend), gpu=GpuSpec()))
    assert (found.feasible, found.ep, found.gpus, found.device, found.memory) == (True, 2, gpus, Device.CPU, None)
    assert "CPU profile" in found.message


def test_plan_cpu_profile_escalates_too() -> None:
    spec = make_spec(engine=CPU_ENGINE)
    found = plan(spec, floor=EPFloor(ep=4, inputs=planner_inputs_hash(spec)))
    assert (found.ep, found.source) == (4, PlanSource.ESCALATED)


def test_plan_encoder_is_one_gpu_and_fixed() -> None:
    """C39."""
    found = plan(make_ve_spec())
    assert (found.feasible, found.ep, found.gpus, found.reason, found.source) == (
        True,
        1,
        1,
        Reason.FIXED,
        PlanSource.FIXED,
    )


def test_plan_hash_names_the_plan_and_nothing_else() -> None:
    spec = flash()
    base = plan(spec)
    raised = plan(spec, floor=EPFloor(ep=8, inputs=planner_inputs_hash(spec)))
    assert plan(flash(replicas=9)).hash == base.hash
    assert raised.hash != base.hash
    assert len(base.hash) == 12


@pytest.mark.parametrize(
    ("nodes", "note"),
    [
        ((ObservedNode(name="a", gpu_product="NVIDIA-H20", gpu_capacity=8),), "no node has gpu.product NVIDIA-H200"),
        ((ObservedNode(name="a", gpu_product="NVIDIA-H200", gpu_capacity=2),), "the largest node has 2"),
        ((ObservedNode(name="a", gpu_product="NVIDIA-H200", gpu_capacity=8),), ""),
        (None, ""),
    ],
)
def test_plan_remarks_on_what_the_cluster_lacks_but_does_not_refuse(
    nodes: tuple[ObservedNode, ...] | None, note: str
) -> None:
    found = plan(flash(), nodes=nodes)
    assert found.feasible
    assert note in " ".join(found.notes)
    assert bool(found.notes) == bool(note)

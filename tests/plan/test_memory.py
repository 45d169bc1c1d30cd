import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from prefill_plan.errors import ConfigError, PlanError
from prefill_plan.memory import (
    GPU_BYTES,
    EngramPlace,
    MemoryChoice,
    MemoryPlan,
    PlanSettings,
    minimum_ep,
    plan_memory,
    plan_tiers,
)
from prefill_plan.model_spec import load_model_spec, released_model_spec

GOLDEN = Path(__file__).parents[1] / "golden"
VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "planner_vectors.json").read_bytes())
RELEASED = released_model_spec()
GPU, HOST = EngramPlace.GPU, EngramPlace.HOST


def plan_of(ep_size: int, engram: EngramPlace = HOST, *, usable_bytes: int = 10**12, **settings: Any) -> MemoryPlan:
    return plan_memory(
        RELEASED, usable_bytes=usable_bytes, ep_size=ep_size, engram=engram, settings=PlanSettings(**settings)
    )


def choice_of(gpu: str, *engram_places: EngramPlace, **settings: Any) -> MemoryChoice:
    return minimum_ep(
        RELEASED,
        usable_bytes=GPU_BYTES[gpu],
        settings=PlanSettings(**settings),
        engram_places=engram_places or (GPU, HOST),
    )


def test_gpus_are_those_of_the_vectors() -> None:
    assert dict(GPU_BYTES) == VECTORS["gpus"]


def test_there_are_54_vectors() -> None:
    assert len(VECTORS["vectors"]) == 54


@pytest.mark.parametrize("vector", VECTORS["vectors"], ids=lambda v: f"{v['gpu']}-EP{v['ep']}-{v['engram']}")
def test_planner_vector_reproduces_exactly(vector: dict[str, Any]) -> None:
    choice = minimum_ep(
        RELEASED,
        usable_bytes=vector["device_bytes"],
        settings=PlanSettings(),
        engram_places=(EngramPlace(vector["engram"]),),
        ep_sizes=(vector["ep"],),
    )
    (option,) = choice.options
    full = option.full
    work = full.workspace

    assert {
        "need_full": full.need_bytes,
        "budget": full.budget_bytes,
        "fits_full": full.fits,
        "parts_full": {
            "weights": full.weights.total,
            "kv": full.kv_bytes,
            "state": full.state_bytes,
            "act": work.total,
            "ctx": full.context_bytes,
        },
        "weights": {"experts": full.weights.experts, "dense": full.weights.dense, "engram": full.weights.engram},
        "act": {
            "residual": work.residual,
            "phase": work.phase,
            "index_logits": work.index_logits,
            "kv_gather": work.kv_gather,
            "engram_stage": work.engram_staging,
            "a2a": work.all_to_all,
        },
        "tier": option.tier,
        "kv_tokens_max_tier": option.plan.max_pool_tokens,
    } == {key: value for key, value in vector.items() if key not in ("gpu", "device_bytes", "ep", "engram")}


# perf.md 4.2, table "Minimum EP": smallest at full configuration, smallest in any tier, tier of the latter.
MINIMUM_EP = [
    ("H100-80", GPU, None, 8, "R0,C8k,sub4k,16seq"),
    ("H100-80", HOST, 8, 8, "full"),
    ("A100-80", GPU, None, 8, "R0,C8k,sub4k,16seq"),
    ("A100-80", HOST, 8, 8, "full"),
    ("H20-96", GPU, 8, 8, "full"),
    ("H20-96", HOST, 8, 4, "C8k"),
    ("RTXPRO6000-96", GPU, 8, 8, "full"),
    ("RTXPRO6000-96", HOST, 8, 4, "C8k,sub4k,16seq"),
    ("H200-141", GPU, 8, 4, "R0,C8k,sub4k,16seq"),
    ("H200-141", HOST, 4, 4, "full"),
    ("H20-141", GPU, 8, 4, "R0,C8k,sub4k,16seq"),
    ("H20-141", HOST, 4, 4, "full"),
    ("B200-180/192", GPU, 4, 4, "full"),
    ("B200-180/192", HOST, 2, 2, "full"),
    ("MI300X-192", GPU, 4, 4, "full"),
    ("MI300X-192", HOST, 2, 2, "full"),
    ("GB300-288", GPU, 4, 2, "C8k"),
    ("GB300-288", HOST, 2, 2, "full"),
]


@pytest.mark.parametrize(("gpu", "engram", "full_ep", "any_ep", "tier"), MINIMUM_EP)
def test_minimum_ep_is_the_table_of_perf_md_4_2(
    gpu: str, engram: EngramPlace, full_ep: int | None, any_ep: int, tier: str
) -> None:
    choice = choice_of(gpu, engram)

    assert (choice.full_ep, choice.any_ep) == (full_ep, any_ep)
    assert choice.chosen is not None
    assert (choice.chosen.ep_size, choice.chosen.tier) == (any_ep, tier)


def test_minimum_ep_table_has_every_gpu() -> None:
    assert {row[0] for row in MINIMUM_EP} == set(GPU_BYTES)


@pytest.mark.parametrize(
    ("gpu", "ep_size", "engram", "tier"),
    [
        ("GB300-288", 2, GPU, "C8k"),
        ("B200-180/192", 2, HOST, "full"),
        ("H200-141", 4, GPU, "R0,C8k,sub4k,16seq"),
        ("H20-96", 4, HOST, "C8k"),
        ("H100-80", 8, GPU, "R0,C8k,sub4k,16seq"),
    ],
)
def test_auto_orders_by_ep_then_engram_on_gpu_then_full(gpu: str, ep_size: int, engram: EngramPlace, tier: str) -> None:
    chosen = choice_of(gpu).chosen

    assert chosen is not None
    assert (chosen.ep_size, chosen.engram, chosen.tier) == (ep_size, engram, tier)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkedVector:
    plan: MemoryPlan
    weights: int
    need: int
    budget: int
    spare: int


@pytest.mark.parametrize(
    "case",
    [
        WorkedVector(
            plan=plan_of(8, HOST, usable_bytes=GPU_BYTES["H200-141"]),
            weights=48_952_079_808,
            need=64_940_608_256,
            budget=145_597_000_000,
            spare=80_656_391_744,
        ),
        WorkedVector(
            plan=plan_of(4, GPU, usable_bytes=GPU_BYTES["B200-180/192"]),
            weights=138_746_919_240,
            need=154_735_447_688,
            budget=185_755_000_000,
            spare=31_019_552_312,
        ),
        WorkedVector(
            plan=plan_of(2, HOST, usable_bytes=GPU_BYTES["GB300-288"]),
            weights=166_268_073_408,
            need=182_256_601_856,
            budget=279_748_000_000,
            spare=97_491_398_144,
        ),
    ],
    ids=["H200 EP8 host", "B200 EP4 gpu", "GB300 EP2 host"],
)
def test_worked_vector_of_perf_md_4_3(case: WorkedVector) -> None:
    plan = case.plan

    assert (plan.weights.total, plan.kv_bytes, plan.state_bytes) == (case.weights, 934_281_216, 1_418_894_400)
    assert (plan.workspace.total, plan.context_bytes) == (11_135_352_832, 2_500_000_000)
    assert (plan.need_bytes, plan.budget_bytes, plan.spare_bytes) == (case.need, case.budget, case.spare)


@pytest.mark.parametrize(
    ("redundant", "ep_size", "experts"),
    [
        (32, 1, 312_842_649_600),
        (32, 2, 156_421_324_800),
        (32, 4, 78_210_662_400),
        (32, 8, 39_105_331_200),
        (0, 1, 288_777_830_400),
        (0, 2, 144_388_915_200),
        (0, 4, 72_194_457_600),
        (0, 8, 36_097_228_800),
    ],
)
def test_expert_bytes_by_ep(redundant: int, ep_size: int, experts: int) -> None:
    assert plan_of(ep_size, redundant_experts=redundant).weights.experts == experts


@pytest.mark.parametrize(("ep_size", "shard"), [(2, 101_379_016_200), (4, 50_689_508_232), (8, 25_344_754_248)])
def test_engram_shard_by_ep(ep_size: int, shard: int) -> None:
    on_gpu, on_host = plan_of(ep_size, GPU), plan_of(ep_size, HOST)

    assert (on_gpu.weights.engram, on_gpu.host_bytes) == (shard, 0)
    assert (on_host.weights.engram, on_host.host_bytes) == (0, 202_758_032_400)


@pytest.mark.parametrize(("tokens", "num_bytes"), [(131_072, 116_785_152), (1, 114_048)])
def test_kv_pool_bytes(tokens: int, num_bytes: int) -> None:
    assert plan_of(8, pool_tokens=tokens, context_tokens=tokens).kv_bytes == num_bytes


def test_state_of_16_sequences() -> None:
    assert plan_of(8, max_sequences=16).state_bytes == 368_544_000


@pytest.mark.parametrize(
    ("chunk", "gigabytes"),
    [(2_048, 1.951), (4_096, 3.365), (8_192, 6.193), (16_384, 7.283), (32_768, 11.135), (65_536, 19.567)],
)
def test_workspace_by_chunk(chunk: int, gigabytes: float) -> None:
    assert round(plan_of(8, chunk_tokens=chunk).workspace.total / 1e9, 3) == gigabytes


@pytest.mark.parametrize(("chunk", "gigabytes"), [(32_768, 19.9), (65_536, 38.3)])
def test_workspace_without_sub_chunks(chunk: int, gigabytes: float) -> None:
    plan = plan_of(8, chunk_tokens=chunk, moe_sub_tokens=chunk)

    assert round(plan.workspace.total / 1e9, 1) == gigabytes


@pytest.mark.parametrize(("ep_size", "gigabytes"), [(2, 6.2), (4, 3.9), (8, 2.8)])
def test_draft_and_vision_weights(ep_size: int, gigabytes: float) -> None:
    weights = plan_of(ep_size, holds_draft=True, holds_vision=True).weights

    assert round((weights.draft + weights.vision) / 1e9, 1) == gigabytes


def test_dense_expansion_is_6473871360_bytes() -> None:
    assert plan_of(8, expands_dense=True).weights.expansion == 6_473_871_360


@pytest.mark.parametrize(
    ("ep_size", "settings", "message"),
    [
        (4, {"redundant_experts": 30}, "384 experts + 30 redundant = 414 slots do not divide by EP = 4 (remainder 2)"),
        (3, {}, "EP = 3, expected one of 1, 2, 4, 8"),
        (0, {}, "EP = 0, expected one of 1, 2, 4, 8"),
        (8, {"redundant_experts": -8}, "redundant >= 0"),
        (8, {"context_tokens": 1_048_577}, "context = 1048577 tokens, expected 1..1048576"),
        (8, {"context_tokens": 0}, "context = 0 tokens, expected 1..1048576"),
        (8, {"pool_tokens": 131_071}, "KV pool of 131071 tokens, expected >= 131072"),
        (8, {"chunk_tokens": 0}, "chunk_tokens = 0, expected >= 1"),
        (8, {"moe_sub_tokens": 0}, "moe_sub_tokens = 0, expected >= 1"),
        (8, {"max_sequences": 0}, "max_sequences = 0, expected >= 1"),
        (8, {"gather_sequences": 0}, "gather_sequences = 0, expected >= 1"),
        (8, {"usable_bytes": 0}, "GPU memory = 0 bytes, expected >= 1"),
    ],
)
def test_impossible_settings_are_refused(ep_size: int, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as error:
        plan_of(ep_size, HOST, **settings)

    assert message in error.value.message


def test_keep_below_window_and_rollback_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"keep_tokens = 133, expected >= 134"):
        plan_of(8, keep_tokens=133)


def test_refusal_shows_every_term_the_sum_and_the_limit() -> None:
    plan = plan_of(8, GPU, usable_bytes=GPU_BYTES["H100-80"])

    assert plan.explain() == (
        "experts 39.11 + dense 9.85 + Engram 25.34 + KV pool 0.93 + state 1.42 + workspace 11.14 + CUDA context 2.50 "
        "= 90.29 GB per GPU, limit 82.35 GB (84.90 usable less 3 %): 7.93 GB short"
    )
    assert not plan.fits
    assert plan.max_pool_tokens == 0


def test_choice_explains_what_was_tried_before_it() -> None:
    lines = choice_of("H100-80", HOST).explain().splitlines()

    assert [line.split(";")[0].split(",")[0] for line in lines] == ["EP2", "EP4", "EP8"]
    assert "EP4, Engram on host does not fit in any tier; the smallest: experts 72.19" in lines[1]
    assert lines[2].startswith("EP8, Engram on host fits, tier full: experts 39.11")


def test_gpu_that_is_too_small_is_explained_for_every_option() -> None:
    choice = minimum_ep(RELEASED, usable_bytes=40_000_000_000, settings=PlanSettings())

    assert (choice.chosen, choice.full_ep, choice.any_ep) == (None, None, None)
    assert len(choice.explain().splitlines()) == 6
    assert "= 51.35 GB per GPU, limit 38.80 GB" in choice.explain()


def test_tiers_only_ever_reduce_and_keep_room_for_one_prompt() -> None:
    settings = PlanSettings(context_tokens=1_000_000)
    tiers = [reduced for _, reduced in plan_tiers(settings)]

    needs = [
        plan_memory(RELEASED, usable_bytes=10**12, ep_size=8, engram=HOST, settings=tier).need_bytes for tier in tiers
    ]
    assert needs == sorted(needs, reverse=True)
    assert all(tier.pool_tokens >= 1_000_000 for tier in tiers)
    assert {tier.context_tokens for tier in tiers} == {1_000_000}


@given(context=st.integers(1, 1_048_576), chunk=st.integers(1, 131_072), pool=st.integers(0, 10**7))
def test_fitting_plan_still_fits_with_its_largest_pool(context: int, chunk: int, pool: int) -> None:
    settings = PlanSettings(context_tokens=context, chunk_tokens=chunk, pool_tokens=context + pool)
    plan = plan_memory(RELEASED, usable_bytes=150_100_000_000, ep_size=8, engram=HOST, settings=settings)
    assert plan.fits

    def plan_with_pool(tokens: int) -> MemoryPlan:
        larger = replace(settings, pool_tokens=tokens)
        return plan_memory(RELEASED, usable_bytes=150_100_000_000, ep_size=8, engram=HOST, settings=larger)

    assert plan_with_pool(plan.max_pool_tokens).fits
    assert not plan_with_pool(plan.max_pool_tokens + 1).fits


def test_longer_context_needs_more_workspace() -> None:
    assert plan_of(8, context_tokens=1_048_576).workspace.total > plan_of(8).workspace.total


@pytest.mark.parametrize("model", ["tiny_dense", "tiny_quant"])
def test_tiny_model_can_be_planned_on_one_gpu(model: str) -> None:
    spec = load_model_spec(GOLDEN / model)
    settings = PlanSettings(
        context_tokens=4_096, chunk_tokens=1_024, pool_tokens=65_536, redundant_experts=0, keep_tokens=24
    )

    choice = minimum_ep(spec, usable_bytes=4_000_000_000, settings=settings, ep_sizes=(1, 2))

    assert choice.full_ep == 1

"""Small parts of a rank: sampling, component ranges, exports, exit codes, store threads."""

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeVar
from unittest.mock import Mock

import crc32c
import msgspec
import pytest
import torch

from prefill_engine.kv.store import StoredBlock
from prefill_engine.messages import ReadRange, Sampling
from prefill_engine.rank.block_source import Load, LoadDone, LookUp, LookupDone, SourceFailed, WriteDone, WriteItem
from prefill_engine.rank.build import build_rank
from prefill_engine.rank.engine import RankEngine
from prefill_engine.rank.errors_at_exit import InjectedFault, describe_failure, parse_fault
from prefill_engine.rank.payloads import Part
from prefill_engine.rank.read_server import Component, ReadServer
from prefill_engine.rank.sampling import sample_token
from prefill_engine.rank.store_worker import StoreWorker
from prefill_plan.block_keys import BlockKey
from prefill_plan.config import EngineConfig, ParallelConfig, ReplayConfig
from prefill_plan.errors import CheckpointError, ConfigError, GpuFault, PlanError, StoreUnavailable
from prefill_testing.rank_harness import ListMailbox, tiny_engine_config

T = TypeVar("T")


def replace_part(**parts: object) -> EngineConfig:
    return msgspec.structs.replace(tiny_engine_config(), **parts)


LOGITS = torch.tensor([0.5, 3.0, 3.0, -1.0, 2.9])


# --- sampling
@pytest.mark.parametrize(
    ("sampling", "token"),
    [
        pytest.param(Sampling(sample=True, temperature=0.0), 1, id="greedy-tie-takes-lowest-id"),
        pytest.param(Sampling(sample=True, temperature=0.7, forced_token=3), 3, id="forced-token-wins"),
        pytest.param(Sampling(sample=True, temperature=1.0, top_p=1e-6, seed=5), 1, id="tiny-top-p-is-the-best-token"),
    ],
)
def test_sample_token_choice(sampling: Sampling, token: int) -> None:
    sampled = sample_token(LOGITS, sampling)
    assert sampled.token == token
    assert sampled.logprob == pytest.approx(float(torch.log_softmax(LOGITS.double(), -1)[token]))


def test_sample_token_repeats_with_a_seed_and_follows_the_distribution() -> None:
    draws = [sample_token(LOGITS, Sampling(sample=True, temperature=1.0, seed=s)).token for s in range(400)]
    again = [sample_token(LOGITS, Sampling(sample=True, temperature=1.0, seed=s)).token for s in range(400)]
    assert draws == again
    shares = torch.bincount(torch.tensor(draws), minlength=5) / 400
    assert torch.allclose(shares.double(), torch.softmax(LOGITS.double(), -1), atol=0.08)


def test_top_p_zero_means_one() -> None:
    draws = {sample_token(LOGITS, Sampling(sample=True, temperature=3.0, top_p=0.0, seed=s)).token for s in range(200)}
    assert draws == {0, 1, 2, 3, 4}


def test_sample_token_lists_best_alternatives() -> None:
    sampled = sample_token(LOGITS, Sampling(sample=True, top_logprobs=3))
    assert set(sampled.alt_tokens) == {1, 2, 4}
    assert list(sampled.alt_logprobs) == sorted(sampled.alt_logprobs, reverse=True)


# --- hand-over reads
@pytest.mark.parametrize(
    ("offset", "length"), [(0, 1), (0, 25), (9, 2), (10, 10), (19, 6), (24, 1), (24, 99), (25, 1), (400, 3), (3, 0)]
)
def test_component_reads_any_range_across_pieces(offset: int, length: int) -> None:
    whole = bytes(range(25))
    component = Component(kind=1, pieces=[whole[:10], memoryview(whole)[10:20], whole[20:]])
    assert component.read(offset, length) == whole[offset : offset + length]


def test_read_server_serves_open_exports_only() -> None:
    server = ReadServer()
    regions = server.open(b"a", [Component(kind=1, pieces=[b"hello"]), Component(kind=5, pieces=[])])
    assert [(region.kind, region.num_bytes) for region in regions] == [(1, 5)]
    request = ReadRange(read_id=7, attempt_id=b"a", kind=1, offset=1, length=3)
    reply = server.read(request)
    assert (reply.read_id, reply.data, reply.crc32c, reply.error) == (7, b"ell", crc32c.crc32c(b"ell"), "")
    server.close(b"a")
    assert "not readable" in server.read(request).error


# --- exit codes
@pytest.mark.parametrize(
    ("error", "phase", "exit_code", "code"),
    [
        (ConfigError("x"), "start", 10, "ConfigError"),
        (PlanError("x"), "warmup", 10, "PlanError"),
        (CheckpointError("x"), "load", 11, "CheckpointError"),
        (torch.OutOfMemoryError("x"), "load", 12, "CudaOom"),
        (torch.AcceleratorError("x"), "serve", 14, "AcceleratorError"),
        (GpuFault("x"), "serve", 14, "GpuFault"),
        (torch.OutOfMemoryError("x"), "serve", 13, "CudaOom"),
        (MemoryError(), "warmup", 12, "HostOom"),
        (StoreUnavailable("x"), "serve", 17, "StoreUnavailable"),
        (InjectedFault(14), "serve", 14, "InjectedFault"),
        (RuntimeError("x"), "serve", 1, "RuntimeError"),
    ],
)
def test_failure_has_the_exit_code_of_its_cause(error: Exception, phase: str, exit_code: int, code: str) -> None:
    failure = describe_failure(error, rank=3, phase=phase)
    assert (failure.rank, failure.exit_code, failure.code, failure.phase) == (3, exit_code, code, phase)
    assert failure.detail


@pytest.mark.parametrize(
    ("text", "fault"),
    [("", None), ("exit=12", (12, "serve")), ("exit=13@load", (13, "load")), ("exit=1@", (1, "serve"))],
)
def test_parse_fault(text: str, fault: tuple[int, str] | None) -> None:
    assert parse_fault(text) == fault


def test_parse_fault_refuses_other_forms() -> None:
    with pytest.raises(ConfigError, match="exit=CODE"):
        parse_fault("panic")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        pytest.param(replace_part(parallel=ParallelConfig(dp_size=2, ep_size=2)), "parallel.ep_size = 2", id="ep"),
        pytest.param(replace_part(ops="triton"), "ops = triton", id="kernel-set"),
        pytest.param(replace_part(replay=ReplayConfig(keep_tokens=20)), "keep_tokens = 20", id="keep"),
    ],
)
def test_rank_refuses_what_it_cannot_serve_before_it_serves(config: EngineConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_rank(config, rank=0, mailbox=ListMailbox(), reads=ReadServer(), enter=lambda _phase: None)


# --- store threads
class FailingStore:
    """A store whose medium is gone."""

    def count_present(self, keys: object) -> int:
        raise StoreUnavailable("no medium")

    def read(self, key: BlockKey, out: memoryview) -> StoredBlock | None:
        raise StoreUnavailable("no medium")

    def write(self, key: BlockKey, payload: object, *, block_index: int, provenance: int) -> bool:
        raise StoreUnavailable("no medium")

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


class FourBytes:
    """Payloads of four bytes."""

    num_bytes = 4

    def parts(self, slots: Sequence[int]) -> list[Part]:
        return [bytes(4) for _ in slots]

    def fill(self, slot: int, read: Callable[[memoryview], T | None]) -> T | None:
        return read(memoryview(bytearray(4)))


def test_store_worker_turns_every_failure_into_a_miss_and_says_so() -> None:
    worker = StoreWorker(FailingStore(), payloads=FourBytes(), wake=lambda: None)
    assert worker.is_ok
    key = BlockKey(b"k" * 32)
    assert worker.look_up(LookUp(attempt_id=b"a", keys=(key,), resident_blocks=0, tenant="t"))
    assert worker.completions.get(timeout=10) == LookupDone(attempt_id=b"a", present=0)
    assert worker.load(Load(attempt_id=b"a", keys=(key,), first_block=0, slots=(0,), tenant="t"))
    loaded = worker.completions.get(timeout=10)
    assert isinstance(loaded, LoadDone)
    assert loaded.provenances == ()
    worker.write(b"a", [WriteItem(key=key, slot=s, block_index=s, provenance=0) for s in (4, 5)], tenant="t")
    assert worker.completions.get(timeout=10) == WriteDone(attempt_id=b"a", committed=0, failed=2, slots=(4, 5))
    assert worker.is_lost
    worker.stop()


class BrokenStore(FailingStore):
    """A store with a bug in it."""

    def count_present(self, keys: object) -> int:
        raise KeyError("a bug")


def test_fault_of_a_store_thread_is_told_instead_of_leaving_attempts_to_wait() -> None:
    worker = StoreWorker(BrokenStore(), payloads=FourBytes(), wake=lambda: None)
    worker.look_up(LookUp(attempt_id=b"a", keys=(BlockKey(b"k" * 32),), resident_blocks=0, tenant="t"))
    told = worker.completions.get(timeout=10)
    assert isinstance(told, SourceFailed)
    assert isinstance(told.error, KeyError)
    engine = RankEngine(
        kv=Mock(),
        planner=Mock(),
        pushes=Mock(collect=lambda: ()),
        source=Mock(completions=SimpleQueue()),
        digests=Mock(),
        images=Mock(),
        num_sources=1,
        send=lambda _message: None,
    )
    engine._source.completions.put(told)
    with pytest.raises(KeyError):
        engine.collect()

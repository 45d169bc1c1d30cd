"""Events of `pe.v1.Prefill` as the records of `timeline.py`: the client's reverse of rpc/convert.py, for client.py."""

from google.protobuf.duration_pb2 import Duration

from prefill_engine import timeline
from prefill_engine.rpc import common_pb2, prefill_pb2


def to_seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos * 1e-9


def to_duration(seconds: float) -> Duration:
    return Duration(seconds=int(seconds), nanos=int(seconds % 1.0 * 1e9))


def component_name(kind: int) -> str:
    """pe.v1.ComponentKind without its prefix."""
    return common_pb2.ComponentKind.Name(kind).removeprefix("COMPONENT_KIND_")


def event_body(message: prefill_pb2.PrefillEvent) -> timeline.EventBody | None:
    """Our record of one event; None for arms that this client does not know: they are skipped (serving.md 1.1)."""
    match message.WhichOneof("body"):
        case "accepted":
            return _accepted(message.accepted)
        case "queued":
            queued = message.queued
            return timeline.Queued(
                ahead_requests=queued.ahead_requests,
                ahead_rows=queued.ahead_rows,
                waiting_for=_phase_name(queued.waiting_for),
            )
        case "image":
            image = message.image
            return timeline.ImageReady(
                index=image.index, ready=image.ready, rows=image.rows, took_seconds=to_seconds(image.took)
            )
        case "swap_in":
            swap = message.swap_in
            return timeline.SwapIn(
                layers_ready=swap.layers_ready,
                layers_total=swap.layers_total,
                num_bytes=swap.bytes,
                hit_shrunk_to=swap.hit_shrunk_to,
            )
        case "chunk":
            chunk = message.chunk
            return timeline.ChunkDone(
                rows_done=chunk.rows_done,
                rows_total=chunk.rows_total,
                chunk_rows=chunk.chunk_rows,
                step_seconds=to_seconds(chunk.step),
                step_id=chunk.step_id,
            )
        case "first_token":
            return timeline.FirstToken(token=message.first_token.token, logprob=message.first_token.logprob)
        case "ticket":
            return _ticket_offered(message.ticket)
        case "store":
            return _store_state(message.store)
        case "handoff":
            return _handoff_state(message.handoff)
        case "completed":
            return _completed(message.completed)
        case _:
            return None


def _accepted(accepted: prefill_pb2.Accepted) -> timeline.Accepted:
    return timeline.Accepted(
        dp_rank=accepted.dp_rank,
        effective_hit=accepted.effective_hit,
        replay_rows=accepted.replay_rows,
        compute_rows=accepted.compute_rows,
        predicted_wait_seconds=to_seconds(accepted.predicted_wait),
        predicted_finish_seconds=to_seconds(accepted.predicted_finish),
        deduplicated=accepted.deduplicated,
    )


def _ticket_offered(ticket: prefill_pb2.Ticket) -> timeline.TicketOffered:
    return timeline.TicketOffered(
        kv_tokens=ticket.kv_tokens,
        lease_seconds=to_seconds(ticket.lease.ttl),
        components=tuple(
            (component_name(part.kind), sum(extent.length for extent in part.region.extents)) for part in ticket.regions
        ),
    )


def _store_state(store: prefill_pb2.StoreState) -> timeline.StoreState:
    return timeline.StoreState(
        blocks_committed=store.blocks_committed,
        blocks_total=store.blocks_total,
        blocks_failed=store.blocks_failed,
        snapshots=tuple(store.swa_published),
    )


def _handoff_state(handoff: prefill_pb2.HandoffState) -> timeline.HandoffState:
    name = prefill_pb2.HandoffState.S.Name(handoff.state)
    return timeline.HandoffState(
        state="" if name == "S_UNSPECIFIED" else name, bytes_done=handoff.bytes_done, bytes_total=handoff.bytes_total
    )


def _completed(completed: prefill_pb2.Completed) -> timeline.Completed:
    usage = completed.usage
    return timeline.Completed(
        usage=timeline.Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            computed_tokens=usage.computed_tokens,
            replayed_tokens=usage.replayed_tokens,
            image_tokens=usage.image_tokens,
            kv_bytes_moved=usage.kv_bytes_moved,
            already_cached_tokens=usage.already_cached_tokens,
        ),
        stages=tuple(
            timeline.Stage(
                phase=_phase_name(stage.phase),
                start_seconds=to_seconds(stage.start),
                length_seconds=to_seconds(stage.length),
                note=stage.note,
            )
            for stage in completed.timeline
        ),
        handoff=_handoff_state(completed.handoff) if completed.HasField("handoff") else None,
        store=_store_state(completed.store) if completed.HasField("store") else None,
    )


def _phase_name(phase: int) -> str:
    return common_pb2.Phase.Name(phase).removeprefix("PHASE_")

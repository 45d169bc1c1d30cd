"""Plain values -> protobuf messages of pe.v1 for everything the servicers answer."""

from collections.abc import Sequence

from google.protobuf import duration_pb2

from prefill_engine.front.events import (
    Accepted,
    Body,
    ChunkDone,
    Completed,
    Event,
    FirstToken,
    HandoffState,
    ImageState,
    Queued,
    Stage,
    StoreState,
    SwapIn,
    TicketOffer,
)
from prefill_engine.front.load import LoadView
from prefill_engine.front.served_model import PROTOCOL_MAX, PROTOCOL_MIN, HandoverFormat, ServedModel
from prefill_engine.messages import RankLoad, StepModelReport
from prefill_engine.rpc import common_pb2, prefill_pb2

TRANSPORT = "stream"


def to_duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(max(0, round(seconds * 1e9)))
    return duration


def event_message(event: Event, *, served: ServedModel, deduplicated: bool) -> prefill_pb2.PrefillEvent:
    """Wire form of one event. deduplicated: this stream joined an attempt that was already there."""
    message = prefill_pb2.PrefillEvent(
        seq=event.seq, since_accept=to_duration(event.since_accept_seconds), pe_epoch=served.identity.epoch
    )
    body = event.body
    match body:
        case Accepted():
            accepted = prefill_pb2.Accepted(
                dp_rank=body.dp_rank,
                effective_hit=body.effective_hit,
                replay_rows=body.replay_rows,
                compute_rows=body.compute_rows,
                predicted_wait=to_duration(body.predicted_wait_seconds),
                predicted_finish=to_duration(body.predicted_finish_seconds),
                deduplicated=deduplicated,
            )
            message.accepted.CopyFrom(accepted)
        case FirstToken():
            message.first_token.CopyFrom(first_token_message(body))
        case TicketOffer():
            message.ticket.CopyFrom(ticket_message(body, served=served))
        case StoreState():
            message.store.CopyFrom(_store_message(body))
        case HandoffState():
            message.handoff.CopyFrom(_handoff_message(body))
        case Completed():
            message.completed.CopyFrom(_completed_message(body))
        case _:
            _fill_progress(message, body)
    return message


def first_token_message(body: FirstToken) -> prefill_pb2.FirstToken:
    return prefill_pb2.FirstToken(
        token=body.token, logprob=body.logprob, alt_tokens=body.alt_tokens, alt_logprobs=body.alt_logprobs
    )


def ticket_message(offer: TicketOffer, *, served: ServedModel) -> prefill_pb2.Ticket:
    """A ticket with its format, its lease and where its components are read through gRPC."""
    identity = served.identity
    regions = [
        prefill_pb2.ComponentRegions(
            kind=common_pb2.ComponentKind.Name(region.kind),
            region=common_pb2.RegionRef(
                stream=common_pb2.StreamRegion(endpoint=identity.endpoint),
                extents=[common_pb2.Extent(offset=region.offset, length=region.num_bytes)],
            ),
        )
        for region in offer.regions
    ]
    lease = common_pb2.Lease(
        lease_id=offer.lease_id, owner_epoch=identity.epoch, fence=offer.fence, ttl=to_duration(offer.ttl_seconds)
    )
    return prefill_pb2.Ticket(
        ticket_id=offer.ticket_id,
        lease=lease,
        format=format_message(served.format),
        kv_tokens=offer.kv_tokens,
        regions=regions,
        source_endpoint=identity.endpoint,
        source_engine_id=identity.engine_id,
        mode=offer.mode.upper(),
    )


def format_message(handover: HandoverFormat) -> common_pb2.KvFormat:
    components = [
        common_pb2.ComponentFormat(
            kind=common_pb2.ComponentKind.Name(part.kind),
            layout="RECORD_LAYOUT_" + (part.layout or "UNSPECIFIED"),
            bytes_per_token=part.bytes_per_token,
            bytes_fixed=part.bytes_fixed,
            positions=part.positions,
            unit_align=part.unit_align,
            layers=part.layers,
        )
        for part in handover.components
    ]
    return common_pb2.KvFormat(
        block_tokens=handover.block_tokens, components=components, fingerprint=handover.fingerprint
    )


def server_info_message(served: ServedModel) -> prefill_pb2.ServerInfo:
    return prefill_pb2.ServerInfo(
        protocol_min=PROTOCOL_MIN,
        protocol_max=PROTOCOL_MAX,
        build=served.identity.build,
        model=common_pb2.ModelBinding(
            model_id=served.model_id,
            weights_digest=served.weights_digest,
            tokenizer_digest=served.tokenizer_digest,
            vision_digest=served.vision_digest,
        ),
        formats=[format_message(served.format)],
        epoch=served.identity.epoch,
        engine_id=served.identity.engine_id,
        zone=served.identity.zone,
        ep_size=served.ep_size,
        dp_ranks=served.dp_size,
        chunk_cap_per_gpu=served.chunk_cap_tokens,
        max_context=served.max_context_tokens,
        handoff_modes=served_modes(served),
        transports=[served.data_transport, TRANSPORT] if served.data_transport else [TRANSPORT],
        features=["attach", "estimate", "cancel_wait_drained", *(["images"] if served.vision_digest else [])],
        layout_digest=served.layout_digest,
        numerics_class=served.numerics_class,
        keep_tokens=served.keep_tokens,
        device=served.device,
    )


def served_modes(served: ServedModel) -> list[str]:
    """Names of HandoffPlan.Mode that this engine can serve."""
    push = ["PUSH"] if served.data_transport else []
    store_only = ["STORE_ONLY"] if served.store_kind != "memory" else []
    return ["PULL", *push, *store_only, "NONE"]


def load_message(view: LoadView, *, seq: int, known_attempts: Sequence[bytes]) -> prefill_pb2.LoadReport:
    """seq counts the reports of one stream."""
    return prefill_pb2.LoadReport(
        epoch=view.epoch,
        seq=seq,
        state=view.state.value,
        step=_step_model_message(view.step_model),
        ranks=[_rank_message(rank, tickets_open=view.tickets_open.get(rank.rank, 0)) for rank in view.ranks],
        step_counter=view.step_counter,
        last_step_age=to_duration(view.last_step_age_seconds),
        acked_attempts=view.acked_attempts,
        uptime=to_duration(view.uptime_seconds),
        known_attempts=known_attempts,
        backlog=to_duration(view.backlog_seconds),
        weight_bytes_loaded=view.weight_bytes_loaded,
        weight_bytes_total=view.weight_bytes_total,
    )


def _fill_progress(message: prefill_pb2.PrefillEvent, body: Body) -> None:
    match body:
        case Queued():
            message.queued.CopyFrom(
                prefill_pb2.Queued(
                    ahead_requests=body.ahead_requests,
                    ahead_rows=body.ahead_rows,
                    waiting_for="PHASE_" + body.waiting_for,
                )
            )
        case ImageState():
            message.image.CopyFrom(
                prefill_pb2.ImageState(
                    index=body.index, ready=body.ready, rows=body.rows, took=to_duration(body.took_seconds)
                )
            )
        case SwapIn():
            message.swap_in.CopyFrom(
                prefill_pb2.SwapIn(
                    layers_ready=body.layers_ready,
                    layers_total=body.layers_total,
                    bytes=body.num_bytes,
                    hit_shrunk_to=body.hit_shrunk_to,
                )
            )
        case ChunkDone():
            message.chunk.CopyFrom(
                prefill_pb2.ChunkDone(
                    rows_done=body.rows_done,
                    rows_total=body.rows_total,
                    chunk_rows=body.chunk_rows,
                    step=to_duration(body.step_seconds),
                    step_id=body.step_id,
                )
            )


def _store_message(body: StoreState) -> prefill_pb2.StoreState:
    return prefill_pb2.StoreState(
        blocks_committed=body.blocks_committed,
        blocks_total=body.blocks_total,
        swa_published=body.swa_published,
        blocks_failed=body.blocks_failed,
    )


def _handoff_message(body: HandoffState) -> prefill_pb2.HandoffState:
    return prefill_pb2.HandoffState(state=body.state, bytes_done=body.bytes_done, bytes_total=body.bytes_total)


def _completed_message(body: Completed) -> prefill_pb2.Completed:
    usage = prefill_pb2.Usage(
        prompt_tokens=body.usage.prompt_tokens,
        cached_tokens=body.usage.cached_tokens,
        computed_tokens=body.usage.computed_tokens,
        replayed_tokens=body.usage.replayed_tokens,
        image_tokens=body.usage.image_tokens,
        kv_bytes_moved=body.usage.kv_bytes_moved,
        already_cached_tokens=body.usage.already_cached_tokens,
    )
    return prefill_pb2.Completed(
        usage=usage,
        timeline=[_stage_message(stage) for stage in body.timeline],
        handoff=None if body.handoff is None else _handoff_message(body.handoff),
        store=_store_message(body.store),
    )


def _stage_message(stage: Stage) -> prefill_pb2.Stage:
    return prefill_pb2.Stage(
        phase="PHASE_" + stage.phase, start=to_duration(stage.start_seconds), length=to_duration(stage.length_seconds)
    )


def _step_model_message(model: StepModelReport) -> prefill_pb2.StepModel:
    return prefill_pb2.StepModel(
        a_ms=model.a_ms,
        enc_ms_per_row=model.enc_ms_per_row,
        dec_ms_per_row=model.dec_ms_per_row,
        ctx_ms_per_mega=model.ctx_ms_per_mega,
        residual_p95_ms=model.residual_p95_ms,
        samples=model.samples,
    )


def _rank_message(rank: RankLoad, *, tickets_open: int) -> prefill_pb2.RankLoad:
    return prefill_pb2.RankLoad(
        rank=rank.rank,
        running=rank.running,
        waiting=rank.waiting,
        waiting_rows=rank.waiting_rows,
        running_rows_left=rank.running_rows_left,
        kv_tokens_total=rank.kv_tokens_total,
        kv_tokens_free=rank.kv_tokens_free,
        kv_tokens_held_by_tickets=rank.kv_tokens_held_by_tickets,
        state_slots_free=rank.state_slots_free,
        tickets_open=tickets_open,
    )

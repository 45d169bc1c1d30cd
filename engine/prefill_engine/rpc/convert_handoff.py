"""Messages of pe.v1.HandoffSource answers and of our calls to a decode peer's HandoffSink, from plain values.

The trap: keys and grant ids in them open memory; none of them is ever logged.
"""

from prefill_engine.front.grants import Grant, SinkAnswer, SinkCall
from prefill_engine.front.served_model import ServedModel
from prefill_engine.front.tickets import Ticket
from prefill_engine.handoff_pieces import PIECE_BYTES
from prefill_engine.rpc import common_pb2, handoff_pb2, prefill_pb2
from prefill_engine.rpc.convert import first_token_message, ticket_message, to_duration


def claimed_ticket_message(ticket: Ticket, *, now: float, served: ServedModel) -> prefill_pb2.Ticket:
    """What the winner of a claim gets: the ticket, with its components on the data transport and the blocks in the store."""
    message = ticket_message(ticket.offer(now), served=served)
    message.stored_block_keys = ticket.stored_block_keys
    keys = {named.kind: named.key for named in ticket.keys}
    for part in message.regions:
        if part.kind in keys:
            peer = common_pb2.PeerRegion(
                kind=served.data_transport,
                endpoint=served.data_endpoints[ticket.rank],
                key=keys[part.kind],
                piece_bytes=PIECE_BYTES,
            )
            part.alternatives.add(peer=peer, extents=part.region.extents)
    return message


def renew_message(grant: Grant, *, served: ServedModel) -> handoff_pb2.ReserveRequest:
    return handoff_pb2.ReserveRequest(
        key=_attempt_key(grant),
        kv_tokens=grant.kv_tokens,
        format_fingerprint=served.format.fingerprint,
        ttl=to_duration(grant.plan.lease_seconds),
        grant_id=grant.plan.grant_id,
    )


def offer_message(call: SinkCall, ticket: Ticket, *, served: ServedModel) -> handoff_pb2.OfferRequest:
    """Everything has landed: ticket, first token and checksums of the pieces."""
    grant = call.grant
    first = ticket.first_token
    return handoff_pb2.OfferRequest(
        key=_attempt_key(grant),
        grant_id=grant.plan.grant_id,
        ticket=ticket_message(ticket.offer(call.sent_at), served=served),
        first_token=None if first is None else first_token_message(first),
        data_landed=True,
        checksums=[
            handoff_pb2.ComponentChecksum(kind=common_pb2.ComponentKind.Name(part.kind), value=part.checks)
            for part in grant.checks
        ],
    )


def abandon_message(call: SinkCall) -> handoff_pb2.AbandonRequest:
    grant = call.grant
    return handoff_pb2.AbandonRequest(
        grant_id=grant.plan.grant_id,
        generation=call.generation,
        writes_drained=call.writes_drained,
        why=common_pb2.ServingError(
            reason="DECODE_ABORTED", phase="PHASE_HANDOFF", public_message="the hand-off has ended"
        ),
    )


def offer_answer(reply: handoff_pb2.OfferResponse) -> SinkAnswer:
    """A verdict that we do not know counts as a refusal."""
    known = reply.verdict in handoff_pb2.OfferResponse.Verdict.values()
    name = handoff_pb2.OfferResponse.Verdict.Name(reply.verdict) if known else f"verdict {reply.verdict}"
    return SinkAnswer(answered=True, verdict=name)


def _attempt_key(grant: Grant) -> common_pb2.AttemptKey:
    return common_pb2.AttemptKey(request_id=grant.request_id, attempt=grant.attempt, attempt_id=grant.attempt_id)

"""PrefillClient: one attempt on an engine as a stream of typed events. No torch.

Used by `prefill-engine request`, the demo and the end-to-end tests. With `handoff_client.py` the client side's border
between protobuf and our records: nothing behind it sees a protobuf message. The trap: RESOURCE_EXHAUSTED alone means a
message over the size limit; only one that carries a ServingError is back-pressure (serving.md 0, fact 8).
"""

import secrets
import struct
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf.message import Message

from prefill_engine import timeline
from prefill_engine.client_events import event_body, to_duration, to_seconds
from prefill_engine.client_images import PromptImage, image_spans
from prefill_engine.client_ticket import MODE_NUMBERS, Ticket, ticket_from_proto
from prefill_engine.rpc import common_pb2, prefill_pb2, prefill_pb2_grpc
from prefill_engine.rpc.status import DETAILS_KEY, Failure, decode_failure
from prefill_plan.block_keys import block_keys, chain_root
from prefill_plan.errors import CallFailed
from prefill_plan.kv_layout import BLOCK_TOKENS

PROTOCOL = 1
"""Contract minor that this client speaks."""
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""serving.md 1.1: a prompt of 1,048,576 tokens is 3.3 MB on the wire; gRPC's default of 4 MiB is too near."""
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
STORE_MODES = ("best-effort", "required", "skip")
PRIORITIES = ("interactive", "standard", "sheddable")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOptions:
    """How a prompt is to be prefilled. store: one of STORE_MODES; handoff: False = no ticket (C41, NONE); mode: one of
    HANDOFF_MODES ("push" needs PrefillAttempt.push_to as well).

    hit_keys: block keys of the largest hit allowed (block_keys_of), () = none, None = what the engine finds (C6).
    cache_scope: tenant salt of the block keys, 32 bytes or empty. step_cap_seconds, max_queue_wait_seconds: None = no
    limit. temperature 0 = greedy, top_p 0 = 1 (C50). seed: None = the engine's choice. images: of the prompt, in order
    (client_images.place_images).
    """

    store: str = "best-effort"
    handoff: bool = True
    mode: str = "pull"
    hit_keys: tuple[bytes, ...] | None = None
    cache_scope: bytes = b""
    tenant: str = ""
    priority: str = "standard"
    step_cap_seconds: float | None = None
    max_queue_wait_seconds: float | None = None
    temperature: float = 0.0
    top_p: float = 0.0
    seed: int | None = None
    images: tuple[PromptImage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What a client needs to know of an engine; digests are 32 bytes (C6). format: of its hand-overs, as it sent it."""

    engine_id: str
    epoch: int
    protocol_min: int
    protocol_max: int
    model_id: str
    device: str
    dp_ranks: int
    max_context_tokens: int
    keep_tokens: int
    numerics_class: str
    weights_digest: bytes
    tokenizer_digest: bytes
    layout_digest: bytes
    vision_digest: bytes
    """Of the tower whose rows it takes; b"" = it takes no images."""
    handoff_modes: tuple[str, ...]
    transports: tuple[str, ...]
    format: common_pb2.KvFormat = field(repr=False)


def build_request(
    token_ids: Sequence[int], options: PrefillOptions, *, request_id: str, attempt: int = 1
) -> prefill_pb2.PrefillRequest:
    """A request for one attempt under a fresh 128-bit attempt id (serving.md 0, fact 6)."""
    handoff = prefill_pb2.HandoffPlan
    request = prefill_pb2.PrefillRequest(
        protocol=PROTOCOL,
        key=common_pb2.AttemptKey(request_id=request_id, attempt=attempt, attempt_id=secrets.token_bytes(16)),
        tenant=common_pb2.TenantContext(
            tenant=options.tenant,
            cache_scope=options.cache_scope,
            priority=f"PRIORITY_CLASS_{options.priority.upper()}",
        ),
        tokens=token_ids,
        images=image_spans(options.images),
        first_token=prefill_pb2.FirstTokenPlan(
            mode=prefill_pb2.FirstTokenPlan.SAMPLE,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
        ),
        handoff=prefill_pb2.HandoffPlan(mode=MODE_NUMBERS[options.mode] if options.handoff else handoff.NONE),
        store=prefill_pb2.StorePlan(durability=options.store.upper().replace("-", "_")),
        events=prefill_pb2.EventOptions(timeline=True),
    )
    if options.hit_keys is not None:
        num_tokens = len(options.hit_keys) * BLOCK_TOKENS
        request.hit.CopyFrom(prefill_pb2.HitPlan(tokens=num_tokens, block_keys=options.hit_keys, allow_shrink=True))
    if options.step_cap_seconds is not None:
        request.budget.step_cap.CopyFrom(to_duration(options.step_cap_seconds))
    if options.max_queue_wait_seconds is not None:
        request.budget.max_queue_wait.CopyFrom(to_duration(options.max_queue_wait_seconds))
    return request


class PrefillAttempt:
    """One attempt: iterate it, once, for its events. Leaving the loop early cancels it (a lost stream cancels, C41)."""

    def __init__(
        self, client: "PrefillClient", request: prefill_pb2.PrefillRequest, timeout_seconds: float | None
    ) -> None:
        self.attempt_id: bytes = request.key.attempt_id
        self.request_id: str = request.key.request_id
        self.num_tokens = len(request.tokens)
        self.ticket: Ticket | None = None
        self.sent_at_seconds = 0.0
        self.events: list[timeline.RecordedEvent] = []
        self._client = client
        self._request = request
        self._timeout_seconds = timeout_seconds

    async def __aiter__(self) -> AsyncIterator[timeline.RecordedEvent]:
        """Sends the request and yields events until Completed.

        Raises:
            CallFailed: the engine refused or lost the attempt, the deadline passed, or no Completed came.
        """
        self.sent_at_seconds = time.monotonic()
        call = self._client.stub.Prefill(self._request, timeout=self._timeout_seconds)
        try:
            async for message in call:
                event = self._receive(message)
                if event is not None:
                    yield event
        except grpc.aio.AioRpcError as error:
            raise call_failed(self._client.endpoint, error) from error
        finally:
            call.cancel()
        if not self.events or not isinstance(self.events[-1].body, timeline.Completed):
            raise CallFailed(
                f"{self._client.endpoint} ended the stream after {len(self.events)} events without Completed;"
                " the outcome of the attempt is unknown",
                status="OK",
            )

    @property
    def key(self) -> common_pb2.AttemptKey:
        """For a decode peer's Reserve."""
        return self._request.key

    def push_to(
        self, target: prefill_pb2.PushTarget, *, endpoint: str, engine_id: str, early_send: bool = True
    ) -> None:
        """Before it is sent: the engine pushes into what this decode peer granted. endpoint: of its HandoffSink."""
        plan = self._request.handoff
        plan.push.CopyFrom(target)
        plan.decode_endpoint, plan.decode_engine_id, plan.early_send = endpoint, engine_id, early_send

    async def finish(self) -> timeline.Completed:
        """Reads the rest of the stream. Raises CallFailed as iteration does."""
        async for _ in self:
            pass
        last = self.events[-1].body
        assert isinstance(last, timeline.Completed)
        return last

    def record(
        self, label: str, *, own_stages: Sequence[timeline.Stage] = (), error: str = ""
    ) -> timeline.AttemptRecord:
        """Everything seen so far, for rendering."""
        return timeline.AttemptRecord(
            label=label,
            request_id=self.request_id,
            prompt_tokens=self.num_tokens,
            sent_at_seconds=self.sent_at_seconds,
            events=tuple(self.events),
            own_stages=tuple(own_stages),
            error=error,
        )

    def _receive(self, message: prefill_pb2.PrefillEvent) -> timeline.RecordedEvent | None:
        if message.HasField("ticket"):
            self.ticket = ticket_from_proto(message.ticket)
        body = event_body(message)
        if body is None:
            return None
        event = timeline.RecordedEvent(
            seq=message.seq,
            since_accept_seconds=to_seconds(message.since_accept),
            received_seconds=time.monotonic() - self.sent_at_seconds,
            body=body,
        )
        self.events.append(event)
        return event


class PrefillClient:
    """Calls one engine's `pe.v1.PrefillEngine`. Use as `async with PrefillClient("host:port") as client`."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._channel = open_channel(endpoint)
        self.stub: Any = prefill_pb2_grpc.PrefillEngineStub(self._channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._channel.close(None)

    def prefill(
        self,
        token_ids: Sequence[int],
        options: PrefillOptions,
        *,
        request_id: str = "",
        timeout_seconds: float | None = None,
    ) -> PrefillAttempt:
        """Prepares one attempt; iterating it sends it. timeout_seconds is the request's deadline (C41), None = none."""
        request = build_request(token_ids, options, request_id=request_id or f"cli-{secrets.token_hex(8)}")
        return PrefillAttempt(self, request, timeout_seconds)

    async def cancel(self, attempt_id: bytes, *, wait_drained: bool, timeout_seconds: float = 10.0) -> str:
        """Cancels an attempt; CANCELLED, ALREADY_FINISHED, UNKNOWN or TOO_LATE_TICKET_CLAIMED.

        Raises:
            CallFailed: the call itself failed.
        """
        request = prefill_pb2.CancelRequest(attempt_id=attempt_id, reason="client", wait_drained=wait_drained)
        reply = await call_unary(self.stub.Cancel, request, endpoint=self.endpoint, timeout_seconds=timeout_seconds)
        return prefill_pb2.CancelResponse.Result.Name(reply.result)

    async def server_info(self, *, timeout_seconds: float = 10.0) -> ServerInfo:
        """Identity, limits and digests of the engine. Raises CallFailed."""
        request = prefill_pb2.GetServerInfoRequest()
        info = await call_unary(
            self.stub.GetServerInfo, request, endpoint=self.endpoint, timeout_seconds=timeout_seconds
        )
        return ServerInfo(
            engine_id=info.engine_id,
            epoch=info.epoch,
            protocol_min=info.protocol_min,
            protocol_max=info.protocol_max,
            model_id=info.model.model_id,
            device=info.device,
            dp_ranks=info.dp_ranks,
            max_context_tokens=info.max_context,
            keep_tokens=info.keep_tokens,
            numerics_class=info.numerics_class,
            weights_digest=info.model.weights_digest,
            tokenizer_digest=info.model.tokenizer_digest,
            layout_digest=info.layout_digest,
            vision_digest=info.model.vision_digest,
            handoff_modes=tuple(info.handoff_modes),
            transports=tuple(info.transports),
            format=info.formats[0] if info.formats else common_pb2.KvFormat(),
        )


def block_keys_of(
    info: ServerInfo, token_ids: Sequence[int], *, cache_scope: bytes, images: Sequence[PromptImage] = ()
) -> tuple[bytes, ...]:
    """Keys of the prompt's complete blocks as that engine computes them (kv.md 2.2)."""
    root = chain_root(
        weights_digest=info.weights_digest,
        tokenizer_digest=info.tokenizer_digest,
        layout_digest=info.layout_digest,
        numerics_class=info.numerics_class,
        tenant_salt=cache_scope,
    )
    digests = [image.digest for image in images]
    return tuple(block_keys(root, struct.pack(f"<{len(token_ids)}i", *token_ids), images=digests))


def open_channel(endpoint: str) -> grpc.aio.Channel:
    """Plaintext channel with the limits and keepalive of serving.md 1.1; connects at the first call."""
    return grpc.aio.insecure_channel(endpoint, options=_CHANNEL_OPTIONS)


async def call_unary(method: Any, request: Message, *, endpoint: str, timeout_seconds: float) -> Any:
    """One unary call through a generated stub's method (which is untyped), its failure as CallFailed."""
    try:
        return await method(request, timeout=timeout_seconds)
    except grpc.aio.AioRpcError as error:
        raise call_failed(endpoint, error) from error


def call_failed(endpoint: str, error: grpc.aio.AioRpcError) -> CallFailed:
    """What the engine said, readable: its ServingError if it sent one, else the status and what that alone means."""
    status = error.code().name
    failure = _serving_error(error)
    if failure is None:
        text = error.details() or "no details"
        meaning = {
            "RESOURCE_EXHAUSTED": "; no ServingError came with it, so a message was over the size limit",
            "UNAVAILABLE": "; no engine answers there, or it went away",
            "DEADLINE_EXCEEDED": "; our own deadline passed first",
        }.get(status, "")
        return CallFailed(f"{endpoint}: {status}: {text}{meaning}", status=status)
    operator = f" ({failure.operator_detail})" if failure.operator_detail else ""
    after = f" after {failure.retry_after_seconds:.3g} s" if failure.retry_after_seconds else ""
    return CallFailed(
        f"{endpoint}: {failure.reason} in phase {failure.phase}: {failure.public_message}{operator}"
        f"; retry: {failure.retry_scope}{after}",
        status=status,
        reason=failure.reason,
        retry=failure.retry_scope,
        phase=failure.phase,
        retry_after_seconds=failure.retry_after_seconds,
        rows_computed=failure.rows_computed,
    )


def _serving_error(error: grpc.aio.AioRpcError) -> Failure | None:
    # The stubs know a type of metadata that the library does not have.
    metadata: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()  # type: ignore[assignment]
    for key, value in metadata:
        if key == DETAILS_KEY and isinstance(value, bytes):
            return decode_failure(value)
    return None

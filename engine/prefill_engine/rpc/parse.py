"""PrefillRequest -> PrefillCall: every check of a request that needs no rank (serving.md 1.1, 1.3 "Field notes", C45, C49-C52).

The trap: protobuf bytes are not canonical, so the digest is taken over parsed values, never over the message.
"""

import array
import dataclasses
import math
import re
import sys

import msgspec
from google.protobuf import duration_pb2

from prefill_engine.front.call import PrefillCall, digest_content
from prefill_engine.front.served_model import PROTOCOL_MIN, ServedModel
from prefill_engine.messages import ImageItem, Sampling
from prefill_engine.rpc import common_pb2, prefill_pb2
from prefill_engine.rpc.parse_handoff import parse_handoff, plan_digest_parts
from prefill_engine.rpc.parse_images import parse_images
from prefill_engine.rpc.status import refuse
from prefill_plan.block_keys import ImageDigest, block_keys

ATTEMPT_ID_BYTES = 16
_MAX_TOP_LOGPROBS = 20
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_STORE = {0: "best_effort", 1: "best_effort", 2: "required", 3: "skip"}


def parse_call(request: prefill_pb2.PrefillRequest, served: ServedModel) -> PrefillCall:
    """Checks a request against what this engine serves.

    Raises:
        ServingFailure: the reason and a message with the values found and expected.
    """
    if request.protocol < PROTOCOL_MIN:
        refuse("PROTOCOL_TOO_OLD", f"protocol {request.protocol}, this engine needs at least {PROTOCOL_MIN}")
    _check_key(request.key)
    check_model(request.model, served, has_images=bool(request.images))
    tokens = _parse_tokens(request, served)
    images, sources = parse_images(request.images, tokens, served)
    offered_hit = _parse_hit(request, tokens, images, served)
    handoff = parse_handoff(request, served)
    if request.store.durability not in _STORE:
        refuse("PROTOCOL_TOO_OLD", f"store durability {request.store.durability} is unknown to this engine; refused")
    tenant = request.tenant
    budget = request.budget
    call = PrefillCall(
        request_id=request.key.request_id,
        attempt=request.key.attempt,
        attempt_id=request.key.attempt_id,
        digest=b"",
        tokens=tokens.tobytes(),
        num_tokens=len(tokens),
        images=images,
        sources=sources,
        cache_scope=tenant.cache_scope,
        priority=tenant.priority if tenant.priority in (1, 2, 3) else common_pb2.PRIORITY_CLASS_STANDARD,
        fairness_key=tenant.fairness_key or tenant.tenant,
        weight=tenant.weight or 1,
        offered_hit=offered_hit,
        step_cap_ms=_milliseconds(budget, "step_cap"),
        ttft_target_seconds=_optional_seconds(budget, "ttft_target"),
        max_queue_wait_seconds=_optional_seconds(budget, "max_queue_wait"),
        max_compute_rows=budget.max_compute_rows or None,
        sampling=_parse_sampling(request, served),
        handoff=handoff.mode != "none",
        mode=handoff.mode,
        push=handoff.push,
        ticket_ttl_seconds=_optional_seconds(request.handoff, "ticket_ttl"),
        store=_STORE[request.store.durability],
        progress_gap_seconds=max(0.0, _seconds(request.events.min_progress_gap)),
        wants_timeline=request.events.timeline,
    )
    return _with_digest(call, request)


def check_model(model: common_pb2.ModelBinding, served: ServedModel, *, has_images: bool) -> None:
    """Refuses a request for another model; an empty field is not checked."""
    pairs = (
        ("model_id", model.model_id, served.model_id),
        ("weights_digest", model.weights_digest, served.weights_digest),
        ("tokenizer_digest", model.tokenizer_digest, served.tokenizer_digest),
    )
    for name, asked, ours in pairs:
        if asked and asked != ours:
            refuse("MODEL_MISMATCH", f"{name} {_show(asked)}, this engine serves {_show(ours)}")
    if model.vision_digest and has_images and model.vision_digest != served.vision_digest:
        if not served.vision_digest:
            refuse("MODEL_MISMATCH", "vision_digest is set, this engine has no vision tower to compare it with")
        text = f"vision_digest {_show(model.vision_digest)}, this engine serves {_show(served.vision_digest)}"
        refuse("MODEL_MISMATCH", text)


def _check_key(key: common_pb2.AttemptKey) -> None:
    if not _REQUEST_ID.fullmatch(key.request_id):
        refuse(
            "TOKENS_INVALID", f"request_id of {len(key.request_id)} characters, expected 1 to 128 of [A-Za-z0-9._:-]"
        )
    if len(key.attempt_id) != ATTEMPT_ID_BYTES:
        refuse(
            "TOKENS_INVALID", f"attempt_id has {len(key.attempt_id)} bytes, expected {ATTEMPT_ID_BYTES} random bytes"
        )
    if key.attempt < 1:
        refuse("TOKENS_INVALID", "attempt 0, expected 1 or more")


def _parse_tokens(request: prefill_pb2.PrefillRequest, served: ServedModel) -> "array.array[int]":
    tokens = array.array("I", request.tokens)
    if not tokens:
        refuse("TOKENS_INVALID", "the prompt is empty, expected at least 1 token")
    if len(tokens) > served.max_context_tokens:
        refuse(
            "PROMPT_TOO_LONG", f"the prompt has {len(tokens)} tokens, this engine accepts {served.max_context_tokens}"
        )
    if max(tokens) >= served.vocab_size:
        position = next(i for i, token in enumerate(tokens) if token >= served.vocab_size)
        text = f"token id {tokens[position]} at position {position}, expected 0 to {served.vocab_size - 1}"
        refuse("TOKENS_INVALID", text)
    if len(tokens) > served.kv_tokens:
        refuse("KV_MEMORY", f"the prompt has {len(tokens)} tokens, KV memory of a rank holds {served.kv_tokens}")
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def _parse_hit(
    request: prefill_pb2.PrefillRequest, tokens: "array.array[int]", images: tuple[ImageItem, ...], served: ServedModel
) -> int | None:
    if not request.HasField("hit"):
        return None
    hit = request.hit
    block_tokens = served.format.block_tokens
    if hit.tokens % block_tokens:
        refuse("TOKENS_INVALID", f"hit of {hit.tokens} tokens, expected a multiple of {block_tokens}")
    num_blocks = hit.tokens // block_tokens
    if len(hit.block_keys) != num_blocks:
        refuse(
            "TOKENS_INVALID",
            f"{len(hit.block_keys)} block keys for a hit of {hit.tokens} tokens, expected {num_blocks}",
        )
    if hit.tokens > len(tokens):
        refuse("TOKENS_INVALID", f"hit of {hit.tokens} tokens, but the prompt has {len(tokens)}")
    digests = tuple(ImageDigest(start=i.start, length=i.length, content_key=i.content_key) for i in images)
    prefix = tokens[: hit.tokens].tobytes()
    inside = tuple(item for item in digests if item.start < hit.tokens)
    own = block_keys(served.make_root(request.tenant.cache_scope), prefix, images=inside)
    wrong = next((i for i, key in enumerate(hit.block_keys) if key != own[i]), None)
    if wrong is not None:
        refuse("TOKENS_INVALID", f"block key {wrong} of {num_blocks} is not the key of this prompt's tokens")
    return int(hit.tokens)


def _parse_sampling(request: prefill_pb2.PrefillRequest, served: ServedModel) -> Sampling:
    plan = request.first_token
    modes = prefill_pb2.FirstTokenPlan
    if plan.mode not in (modes.MODE_UNSPECIFIED, modes.SAMPLE, modes.NONE):
        refuse("SAMPLING_INVALID", f"first token mode {plan.mode} is unknown to this engine")
    if plan.constraint_kind or plan.constraint:
        refuse(
            "SAMPLING_INVALID", f"constraint of kind {plan.constraint_kind!r}: constrained sampling is not served here"
        )
    if not (math.isfinite(plan.temperature) and plan.temperature >= 0):
        refuse("SAMPLING_INVALID", f"temperature {plan.temperature}, expected a finite number >= 0")
    if not 0 <= plan.top_p <= 1:
        refuse("SAMPLING_INVALID", f"top_p {plan.top_p}, expected 0 to 1")
    if plan.top_logprobs > _MAX_TOP_LOGPROBS:
        refuse("SAMPLING_INVALID", f"top_logprobs {plan.top_logprobs}, expected at most {_MAX_TOP_LOGPROBS}")
    forced = -1
    if request.resume.first_token_already_shown:
        forced = request.resume.first_token
        if request.key.attempt < 2:
            refuse("SAMPLING_INVALID", "resume with attempt 1: only a later attempt can repeat a shown token")
        if forced >= served.vocab_size:
            refuse("SAMPLING_INVALID", f"resume.first_token {forced}, expected 0 to {served.vocab_size - 1}")
    return Sampling(
        sample=plan.mode != modes.NONE,
        temperature=plan.temperature,
        top_p=plan.top_p or 1.0,
        seed=plan.seed if plan.HasField("seed") else None,
        top_logprobs=plan.top_logprobs,
        forced_token=forced,
    )


def _with_digest(call: PrefillCall, request: prefill_pb2.PrefillRequest) -> PrefillCall:
    hit, handoff, resume = request.hit, request.handoff, request.resume
    plain = (
        call.request_id,
        call.attempt,
        [(item.start, item.length, item.content_key) for item in call.images],
        (call.offered_hit, list(hit.block_keys)),
        msgspec.json.encode(call.sampling),
        (*plan_digest_parts(handoff, call.push), call.ticket_ttl_seconds),
        (request.tenant.tenant, call.cache_scope, call.priority, call.fairness_key, call.weight),
        (resume.first_token_already_shown, resume.first_token),
        (call.store, list(request.store.swa_checkpoints)),
    )
    digest = digest_content((call.tokens, repr(plain).encode()))
    return dataclasses.replace(call, digest=digest)


def _seconds(duration: duration_pb2.Duration) -> float:
    return duration.ToNanoseconds() / 1e9


def _optional_seconds(message: object, name: str) -> float | None:
    """A duration field in seconds; None when unset."""
    if not message.HasField(name):  # type: ignore[attr-defined]
        return None
    seconds = _seconds(getattr(message, name))
    if seconds <= 0:
        refuse("BUDGET_IMPOSSIBLE", f"{name} of {seconds} s, expected more than 0")
    return seconds


def _milliseconds(message: object, name: str) -> float | None:
    seconds = _optional_seconds(message, name)
    return None if seconds is None else seconds * 1e3


def _show(value: str | bytes) -> str:
    return value.hex()[:16] if isinstance(value, bytes) else repr(value)

"""EncodeRequest -> EncodeCall: every check of a request for an image that needs no pixels (serving.md 1.1, 4)."""

from prefill_engine.rpc import vision_pb2
from prefill_engine.rpc.status import refuse
from prefill_engine.vision.encode_call import EncodeCall
from prefill_engine.vision.image_intake import DEFAULT_POLICY, WHITE, PixelPolicy

_ID_BYTES = 16
_KEY_BYTES = 32
_Mode = vision_pb2.Delivery.Mode


def parse_encode(
    request: vision_pb2.EncodeRequest, *, vision_digest: bytes, now: float, seconds: float, time_remaining: float | None
) -> EncodeCall:
    """Checks a request against the tower that is served.

    Args:
        now: of the loop's clock. seconds: that an image may take at most. time_remaining: of the RPC.

    Raises:
        ServingFailure: the reason and a message with the values found and expected.
    """
    if len(request.item_id) != _ID_BYTES:
        refuse("TOKENS_INVALID", f"item_id of {len(request.item_id)} bytes, expected {_ID_BYTES}")
    _check_size("parent.attempt_id", request.parent.attempt_id, _ID_BYTES)
    _check_size("tenant.cache_scope", request.tenant.cache_scope, _KEY_BYTES)
    _check_size("content_key", request.content_key, _KEY_BYTES)
    if request.vision_digest and request.vision_digest != vision_digest:
        found, ours = request.vision_digest.hex()[:16], vision_digest.hex()[:16]
        refuse("MODEL_MISMATCH", f"vision_digest {found}.., this encoder has {ours}..; nothing was encoded")
    source = request.WhichOneof("image")
    if source in ("shm", "object"):
        refuse("TRANSPORT_UNSUPPORTED", f"an image as {source}; this encoder takes its bytes in data only")
    # Read once: protobuf makes a copy each time.
    data = request.data
    if not data:
        refuse("IMAGE_REJECTED", "image of 0 bytes; not decoded")
    if bool(request.width) != bool(request.height):
        refuse("IMAGE_REJECTED", f"final size {request.width}x{request.height}: expected both sides or none")
    left = [seconds]
    if time_remaining is not None:
        left.append(time_remaining)
    if request.HasField("time_left"):
        left.append(request.time_left.ToNanoseconds() / 1e9)
    return EncodeCall(
        item_id=request.item_id,
        parent_attempt_id=request.parent.attempt_id,
        request_id=request.parent.request_id,
        cache_scope=request.tenant.cache_scope,
        data=data,
        policy=parse_policy(request.policy) if request.HasField("policy") else DEFAULT_POLICY,
        final=(request.width, request.height) if request.width else None,
        tokens=request.tokens,
        content_key=request.content_key,
        deadline=now + max(0.0, min(left)),
        hold_seconds=max(0.0, request.delivery.hold.ToNanoseconds() / 1e9),
        inline=_is_inline(request.delivery.mode),
    )


def parse_policy(policy: vision_pb2.PixelPolicy) -> PixelPolicy:
    """What a caller leaves out is as serving.md 4.3 has it."""
    if policy.background_rgb > WHITE:
        refuse("IMAGE_REJECTED", f"policy.background_rgb {policy.background_rgb:#x}, expected at most {WHITE:#x}")
    return PixelPolicy(
        apply_exif_orientation=policy.apply_exif_orientation,
        background_rgb=policy.background_rgb if policy.HasField("background_rgb") else WHITE,
        first_frame_of_animation=(
            policy.first_frame_of_animation if policy.HasField("first_frame_of_animation") else True
        ),
        max_pixels=policy.max_pixels,
        max_side=policy.max_side,
        max_bytes=policy.max_bytes,
    )


def _is_inline(mode: int) -> bool:
    if mode not in (_Mode.MODE_UNSPECIFIED, _Mode.PULL, _Mode.INLINE):
        name = _Mode.Name(mode) if mode in _Mode.values() else str(mode)
        refuse("TRANSPORT_UNSUPPORTED", f"delivery mode {name}; this encoder has PULL and INLINE")
    return mode == _Mode.INLINE


def _check_size(name: str, value: bytes, num_bytes: int) -> None:
    if value and len(value) != num_bytes:
        refuse("TOKENS_INVALID", f"{name} of {len(value)} bytes, expected {num_bytes} or none")

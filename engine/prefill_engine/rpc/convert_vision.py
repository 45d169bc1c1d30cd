"""Plain values of the vision encoder -> protobuf messages of pe.v1."""

from collections.abc import Callable
from dataclasses import dataclass

from prefill_engine.front.health import EngineState
from prefill_engine.rpc import vision_pb2
from prefill_engine.rpc.convert import to_duration
from prefill_engine.rpc.status import Failure, serving_error
from prefill_engine.vision.encode_call import Encoded
from prefill_engine.vision.image_intake import Intake
from prefill_engine.vision.tickets import Ticket
from prefill_plan.model_parts import VisionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTower:
    """What a VE that is ready serves. device: as configured. rows_path, host_id: of the slab that holds the rows."""

    spec: VisionSpec
    vision_digest: bytes
    numerics_class: str
    columns: int
    dtype: str
    device: str
    engine_id: str
    epoch: int
    model_id: str
    build: str
    rows_path: str
    host_id: str
    max_patches_per_image: int
    max_patches_per_batch: int
    max_image_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionLoadView:
    """One load report in plain values. a_ms, b_ms: time of a batch is a + b * patches."""

    epoch: int
    state: EngineState
    patches_queued: int
    patches_limit: int
    images_queued: int
    images_in_cpu: int
    a_ms: float
    b_ms: float
    cache_bytes: int
    tickets_open: int
    step_counter: int
    patches_encoded: int


def result_message(
    item_id: bytes, encoded: Encoded, *, served: ServedTower, seconds_left: Callable[[Ticket], float]
) -> vision_pb2.EncodeResult:
    rows, plan, ticket = encoded.rows, encoded.rows.plan, encoded.ticket
    image = vision_pb2.EncodedImage(
        tokens=plan.tokens,
        columns=served.columns,
        grid_h=plan.grid_h,
        grid_w=plan.grid_w,
        patches=plan.num_patches,
        dtype=served.dtype,
        checksum=rows.crc32c.to_bytes(4, "little"),
        from_cache=encoded.from_cache,
        queued=to_duration(encoded.queued_seconds),
        preprocess=to_duration(encoded.preprocess_seconds),
        gpu=to_duration(encoded.gpu_seconds),
        inline_rows=encoded.inline_rows,
        content_key=rows.key,
        final_width=plan.width,
        final_height=plan.height,
    )
    if ticket is not None:
        image.ticket_id = ticket.ticket_id
        image.region.shm.handle = served.rows_path
        image.region.shm.host_id = served.host_id
        image.region.extents.add(offset=rows.region.offset, length=rows.region.length)
        image.lease.owner_epoch = served.epoch
        image.lease.ttl.CopyFrom(to_duration(seconds_left(ticket)))
    return vision_pb2.EncodeResult(item_id=item_id, image=image)


def error_message(item_id: bytes, failure: Failure) -> vision_pb2.EncodeResult:
    return vision_pb2.EncodeResult(item_id=item_id, error=serving_error(failure))


def inspect_message(intake: Intake) -> vision_pb2.InspectResult:
    header, plan = intake.header, intake.plan
    return vision_pb2.InspectResult(
        format=header.format,
        width=header.width,
        height=header.height,
        final_width=plan.width,
        final_height=plan.height,
        tokens=plan.tokens,
        patches=plan.num_patches,
        animated=header.is_animated,
        exif_orientation=header.exif_orientation,
    )


def vision_info_message(served: ServedTower) -> vision_pb2.VisionInfo:
    spec = served.spec
    return vision_pb2.VisionInfo(
        vision_digest=served.vision_digest,
        patch=spec.patch_size,
        downsample=spec.downsample_ratio,
        min_pixels=spec.min_pixels,
        max_tokens=spec.max_image_tokens,
        columns=served.columns,
        max_patches_per_image=served.max_patches_per_image,
        max_patches_per_step=served.max_patches_per_batch,
        epoch=served.epoch,
        dtype=served.dtype,
        device=served.device,
        engine_id=served.engine_id,
        host_id=served.host_id,
        max_image_bytes=served.max_image_bytes,
        model_id=served.model_id,
        build=served.build,
        numerics_class=served.numerics_class,
    )


def vision_load_message(view: VisionLoadView, *, seq: int) -> vision_pb2.VisionLoad:
    return vision_pb2.VisionLoad(
        epoch=view.epoch,
        seq=seq,
        state=view.state.value,
        patches_queued=view.patches_queued,
        patches_limit=view.patches_limit,
        images_queued=view.images_queued,
        images_in_cpu=view.images_in_cpu,
        a_ms=view.a_ms,
        b_ms_per_patch=view.b_ms,
        cache_bytes=view.cache_bytes,
        tickets_open=view.tickets_open,
        step_counter=view.step_counter,
        patches_encoded=view.patches_encoded,
    )

"""Image spans of a request: what is refused before anything is queued, and what rank and front get of the rest."""

from pathlib import Path

import pytest

from prefill_engine.front.served_model import EngineIdentity, ServedModel, build_served_model
from prefill_engine.rpc import prefill_pb2
from prefill_engine.rpc.parse import parse_call
from prefill_engine.rpc.parse_images import MAX_PIXEL_BYTES, MAX_REQUEST_IMAGES, MAX_REQUEST_PIXEL_BYTES
from prefill_engine.rpc.status import Failure, ServingFailure
from prefill_engine.vision.plan import plan_image
from prefill_plan.config import VisionConfig, VisionMode
from prefill_plan.model_spec import load_model_spec
from prefill_testing.engine_rig import IDENTITY, TINY_MODEL, prefill_request, tiny_config
from prefill_testing.fake_rank import VISION_DIGEST, ready_message

SPEC = load_model_spec(Path(TINY_MODEL))
CONFIG = tiny_config(vision=VisionConfig(mode=VisionMode.REMOTE, endpoints=("ve:1",)))
ENGINE = EngineIdentity(engine_id=IDENTITY.engine_id, epoch=5, endpoint="127.0.0.1:1", zone="z", build="b")
WIDTH, HEIGHT = 154, 126
TICKET = b"t" * 16


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return build_served_model(CONFIG, SPEC, identity=ENGINE, ranks=[ready_message(0, SPEC, CONFIG)])


@pytest.fixture(scope="module")
def served_without() -> ServedModel:
    config = tiny_config()
    return build_served_model(config, SPEC, identity=ENGINE, ranks=[ready_message(0, SPEC, config)])


def num_tokens() -> int:
    assert SPEC.vision is not None
    return plan_image(WIDTH, HEIGHT, SPEC.vision).tokens


def request_with(**fields: object) -> prefill_pb2.PrefillRequest:
    """One image at token 10, in order but for the fields."""
    request = prefill_request(300)
    request.tokens[10 : 10 + num_tokens()] = [SPEC.image_token_id] * num_tokens()
    span = {"start": 10, "length": num_tokens(), "width": WIDTH, "height": HEIGHT, "content_key": b"k" * 32}
    request.images.add(**{**span, "pixels": b"pixels", **fields})
    return request


def refused(request: prefill_pb2.PrefillRequest, served: ServedModel) -> Failure:
    with pytest.raises(ServingFailure) as error:
        parse_call(request, served)
    return error.value.failure


def test_pixels_stay_in_the_front_and_the_rank_knows_that_there_are_some(served: ServedModel) -> None:
    call = parse_call(request_with(), served)
    (source,) = call.sources
    (item,) = call.images
    assert (source.pixels, source.width, source.height, source.tokens) == (b"pixels", WIDTH, HEIGHT, num_tokens())
    assert source.patches == (WIDTH // 14) * (HEIGHT // 14)
    assert item.has_source
    submit = call.submit_message(arrival_ns=1)
    assert b"pixels" not in repr(submit).encode()


def test_image_without_a_source_is_taken_for_one_inside_the_hit(served: ServedModel) -> None:
    request = request_with()
    request.images[0].ClearField("pixels")
    assert not parse_call(request, served).images[0].has_source


def test_engine_without_vision_says_so_to_the_rank_too(served_without: ServedModel) -> None:
    assert not parse_call(request_with(), served_without).images[0].has_source


def test_sources_are_no_content(served: ServedModel) -> None:
    """A retry with a ticket joins the attempt that came with pixels."""
    first = request_with()
    second = prefill_pb2.PrefillRequest()
    second.CopyFrom(first)
    second.images[0].ticket.ticket_id = TICKET
    assert parse_call(first, served).digest == parse_call(second, served).digest


def test_ticket_with_shared_memory(served: ServedModel) -> None:
    request = request_with()
    ticket = request.images[0].ticket
    ticket.ticket_id, ticket.ve_endpoint, ticket.checksum = TICKET, "10.0.0.1:50051", b"\1\2\3\4"
    ticket.region.shm.handle, ticket.region.shm.host_id = "/dev/shm/x", "host"
    ticket.region.extents.add(offset=4096, length=100)
    (source,) = parse_call(request, served).sources
    assert source.ticket is not None
    found = (source.ticket.address, source.ticket.path, source.ticket.host_id, source.ticket.offset)
    assert found == ("10.0.0.1:50051", "/dev/shm/x", "host", 4096)
    assert source.ticket.checksum == 0x04030201
    assert source.pixels == b""


def bad_ticket(**fields: object) -> prefill_pb2.PrefillRequest:
    request = request_with()
    request.images[0].ticket.ticket_id = TICKET
    for name, value in fields.items():
        setattr(request.images[0].ticket, name, value)
    return request


@pytest.mark.parametrize(
    ("request_", "reason", "words"),
    [
        # The span is of another size: every position behind it would be wrong (C53).
        (request_with(width=280, height=210), "IMAGE_TOKEN_MISMATCH", "final size 280x210 has"),
        (request_with(height=0), "IMAGE_REJECTED", "expected both sides or none"),
        (request_with(pixels=bytes(MAX_PIXEL_BYTES + 1)), "IMAGE_REJECTED", "limit 4194304 inside a request"),
        (bad_ticket(ticket_id=b"short"), "IMAGE_REJECTED", "ticket_id has 5 bytes"),
        (bad_ticket(checksum=b"\1"), "IMAGE_REJECTED", "checksum has 1 bytes"),
        (bad_ticket(columns=7), "MODEL_MISMATCH", "rows of 7 values"),
    ],
    ids=["size", "one-side", "too-large", "ticket-id", "checksum", "columns"],
)
def test_image_that_does_not_fit_is_refused_with_its_index(
    served: ServedModel, request_: prefill_pb2.PrefillRequest, reason: str, words: str
) -> None:
    failure = refused(request_, served)
    assert (failure.reason, failure.image_index) == (reason, 0)
    assert words in failure.public_message


def request_of(num_images: int, *, pixels: bytes) -> prefill_pb2.PrefillRequest:
    """Images of one token each, without a declared size, back to back."""
    request = prefill_request(num_images)
    request.tokens[:] = [SPEC.image_token_id] * num_images
    for start in range(num_images):
        request.images.add(start=start, length=1, content_key=b"k" * 32, pixels=pixels)
    return request


def test_a_request_takes_600_images_and_refuses_one_more(served: ServedModel) -> None:
    assert len(parse_call(request_of(MAX_REQUEST_IMAGES, pixels=b"p"), served).sources) == 600
    failure = refused(request_of(MAX_REQUEST_IMAGES + 1, pixels=b"p"), served)
    assert (failure.reason, failure.image_index) == ("IMAGE_REJECTED", 600)
    assert failure.public_message == "601 images in one request, limit 600; nothing was computed"


def test_images_of_a_request_are_limited_in_all(served: ServedModel) -> None:
    """Each is within its own limit."""
    whole, rest = divmod(MAX_REQUEST_PIXEL_BYTES, 4_000_000)
    assert (whole, rest) == (16, 0)
    assert len(parse_call(request_of(16, pixels=bytes(4_000_000)), served).sources) == 16
    request = request_of(17, pixels=bytes(4_000_000))
    request.images[16].pixels = b"p"
    failure = refused(request, served)
    assert (failure.reason, failure.image_index) == ("IMAGE_REJECTED", 16)
    assert "image 16: 64000001 bytes of images up to it, limit 64000000 in one request" in failure.public_message


def test_request_for_another_tower_is_refused(served: ServedModel) -> None:
    request = request_with()
    request.model.vision_digest = VISION_DIGEST
    parse_call(request, served)
    request.model.vision_digest = b"o" * 32
    failure = refused(request, served)
    assert (failure.reason, failure.retry_scope) == ("MODEL_MISMATCH", "OTHER_PE")
    assert VISION_DIGEST.hex()[:16] in failure.public_message

"""`prefill-engine ve serve|drain|info|encode`: a vision encoder and its tools. Exit codes of serve are those of k8s.md 4.6."""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

import grpc.aio

from prefill_engine.cli.serving import add_serve_arguments, announce, serve_until_end
from prefill_engine.client import call_failed
from prefill_engine.front.exits import Ending
from prefill_engine.rpc import vision_pb2, vision_pb2_grpc
from prefill_engine.rpc.convert import to_duration
from prefill_engine.settings import HostIdentity, load_encoder_config
from prefill_engine.vision.encoder_client import EncodedRows, EncoderClient, open_encoder_channel
from prefill_engine.vision.encoder_link import ENCODER_ENTRY
from prefill_engine.vision.process import VeOptions, run_ve
from prefill_plan.encoder_config import EncoderConfig
from prefill_plan.errors import CallFailed

_ENDPOINT = "127.0.0.1:50051"
_USER_STATUS = ("INVALID_ARGUMENT", "OUT_OF_RANGE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    serve = actions.add_parser(
        "serve", help="run a vision encoder", description="Serves until SIGTERM.", allow_abbrev=False
    )
    add_serve_arguments(serve, config_name="EncoderConfig", entry_option="--encoder-entry", entry=ENCODER_ENTRY)
    drain = actions.add_parser(
        "drain",
        help="ask an encoder to take no new images and wait until it is empty",
        description="Returns when all images are encoded and their rows fetched or given up. What preStop calls.",
        allow_abbrev=False,
    )
    drain.add_argument("--endpoint", default=_ENDPOINT, metavar="HOST:PORT", help="default: %(default)s")
    drain.add_argument("--deadline-seconds", type=float, help="default: the encoder's server.drain_seconds")
    drain.add_argument("--json", action="store_true", help="one JSON object per status")
    info = actions.add_parser(
        "info",
        help="what an encoder serves, and its load now",
        description="Model, limits, digest and load.",
        allow_abbrev=False,
    )
    info.add_argument("--endpoint", default=_ENDPOINT, metavar="HOST:PORT", help="default: %(default)s")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    _add_encode(
        actions.add_parser(
            "encode",
            help="have one image encoded and say what it cost",
            description="Sends an image file, fetches its rows and checks them.",
            allow_abbrev=False,
        )
    )


def _add_encode(encode: argparse.ArgumentParser) -> None:
    encode.add_argument("file", type=Path, metavar="FILE", help="png, jpeg, webp or gif")
    encode.add_argument("--endpoint", default=_ENDPOINT, metavar="HOST:PORT", help="default: %(default)s")
    encode.add_argument("--timeout-seconds", type=float, default=30.0, metavar="N", help="deadline (default: 30)")
    encode.add_argument("--no-shm", action="store_true", help="fetch rows through gRPC even on the encoder's own host")
    encode.add_argument("--output", type=Path, metavar="FILE", help="write the rows, row-major, as they came")
    encode.add_argument("--json", action="store_true", help="print one JSON object")


def cmd_ve(args: argparse.Namespace) -> int:
    """Exit codes: serve: ExitCode; the others 0 ok, 1 failed, 2 usage or an image that is refused."""
    actions = {"serve": _serve, "drain": _drain, "info": _info, "encode": _encode}
    try:
        return actions[args.action](args)
    except CallFailed as error:
        print(f"prefill-engine ve {args.action}: {error}", file=sys.stderr)
        return 2 if error.status in _USER_STATUS else 1


def _serve(args: argparse.Namespace) -> int:
    def run(config: EncoderConfig, identity: HostIdentity) -> Ending:
        options = VeOptions(
            termination_log=args.termination_log,
            ready_file=args.ready_file,
            encoder_entry=args.encoder_entry,
            fault=args.fault,
            announce=announce,
        )
        return run_ve(config, identity, options)

    return serve_until_end(args, verb="ve serve", constants={"service": "ve"}, load=load_encoder_config, run=run)


def _drain(args: argparse.Namespace) -> int:
    return 0 if asyncio.run(_watch_drain(args)) else 1


async def _watch_drain(args: argparse.Namespace) -> bool:
    request = vision_pb2.VisionDrainRequest()
    if args.deadline_seconds is not None:
        request.deadline.CopyFrom(to_duration(args.deadline_seconds))
    done = False
    async with open_encoder_channel(args.endpoint) as channel:
        stub = vision_pb2_grpc.VisionEncoderStub(channel)  # type: ignore[no-untyped-call]
        try:
            async for status in stub.Drain(request):
                done = status.done
                values = {name: getattr(status, name) for name in ("patches_left", "tickets_open", "done")}
                text = "{patches_left} patches left, {tickets_open} tickets open".format(**values)
                print(json.dumps(values) if args.json else text + (": drained" if done else ""), flush=True)
        except grpc.aio.AioRpcError as error:
            raise call_failed(args.endpoint, error) from error
    return done


def _info(args: argparse.Namespace) -> int:
    info, load = asyncio.run(_ask(args))
    state = vision_pb2.VisionLoad.State.Name(load.state)
    if args.json:
        print(json.dumps(_info_json(info, load, state)))
        return 0
    per_patch = (
        f"{load.a_ms:.2f} ms + {load.b_ms_per_patch * 1e3:.3f} us per patch" if load.step_counter else "no batch yet"
    )
    lines = (
        ("encoder", f"{info.engine_id}, {info.build}, on {info.device}, {state}"),
        ("model", f"{info.model_id}, vision digest {info.vision_digest.hex()[:16]}.., numerics {info.numerics_class}"),
        ("rows", f"{info.columns} columns {info.dtype}, at most {info.max_tokens} an image"),
        (
            "patches",
            f"{info.patch} pixels a side, {info.max_patches_per_image} an image, {info.max_patches_per_step} a batch",
        ),
        ("images", f"at most {info.max_image_bytes / 1e6:g} MB each"),
        ("load", f"{load.patches_queued} of {load.patches_limit} patches queued, {load.images_queued} images"),
        ("batches", f"{load.step_counter} done, {per_patch}"),
        ("memory", f"{load.tickets_open} tickets open, {load.cache_bytes / 2**20:.1f} MiB cached"),
    )
    for name, text in lines:
        print(f"{name:<9} {text}")
    return 0


async def _ask(args: argparse.Namespace) -> tuple[vision_pb2.VisionInfo, vision_pb2.VisionLoad]:
    async with EncoderClient(args.endpoint) as client:
        return await client.info(), await client.load()


def _info_json(info: vision_pb2.VisionInfo, load: vision_pb2.VisionLoad, state: str) -> dict[str, object]:
    facts = {field.name: getattr(info, field.name) for field in info.DESCRIPTOR.fields}
    loads = {field.name: getattr(load, field.name) for field in load.DESCRIPTOR.fields}
    return {**facts, "vision_digest": info.vision_digest.hex(), "load": {**loads, "state": state}}


def _encode(args: argparse.Namespace) -> int:
    try:
        data = args.file.read_bytes()
    except OSError as error:
        print(
            f"prefill-engine ve encode: {args.file}: cannot be read: {error.strerror}; nothing was sent",
            file=sys.stderr,
        )
        return 2
    started = time.monotonic()
    encoded = asyncio.run(_send(args, data))
    seconds = time.monotonic() - started
    if args.output is not None:
        args.output.write_bytes(encoded.rows)
    print(_report(args, encoded, seconds))
    return 0


async def _send(args: argparse.Namespace, data: bytes) -> EncodedRows:
    async with EncoderClient(args.endpoint) as client:
        return await client.encode(data, timeout_seconds=args.timeout_seconds, use_shared_memory=not args.no_shm)


def _report(args: argparse.Namespace, encoded: EncodedRows, seconds: float) -> str:
    image = encoded.image
    ms = {name: getattr(image, name).ToNanoseconds() / 1e6 for name in ("queued", "preprocess", "gpu")}
    if args.json:
        names = (
            "tokens",
            "columns",
            "dtype",
            "patches",
            "grid_w",
            "grid_h",
            "final_width",
            "final_height",
            "from_cache",
        )
        values = {name: getattr(image, name) for name in names}
        times = {f"{name}_ms": round(value, 3) for name, value in ms.items()}
        more = {"num_bytes": len(encoded.rows), "transport": encoded.transport, "total_ms": round(seconds * 1e3, 3)}
        return json.dumps({"file": str(args.file), **values, **times, **more})
    size = f"{image.final_width}x{image.final_height}, {image.patches} patches, {image.grid_w}x{image.grid_h} cells"
    how = (
        "from the cache"
        if image.from_cache
        else "queue {queued:.1f} ms, decode {preprocess:.1f}, tower {gpu:.1f}".format(**ms)
    )
    lines = [
        f"image     {size}: {image.tokens} tokens",
        f"rows      {image.tokens} x {image.columns} {image.dtype}, {len(encoded.rows)} bytes by {encoded.transport}, "
        "checksum right",
        f"time      {seconds * 1e3:.1f} ms ({how})",
    ]
    if args.output is not None:
        lines.append(f"written   {args.output}")
    return "\n".join(lines)

"""A decode worker that went bad: it answers each image with what the image's bytes say. Started by WorkerProcess in tests."""

import os
import socket
import sys

import msgspec

from prefill_engine.vision.decode_messages import (
    MAX_MESSAGE_BYTES,
    CanvasReady,
    WorkerArgs,
    WorkerReady,
    decode_job,
    encode,
)


def main(args_json: str) -> None:
    args = msgspec.json.decode(args_json, type=WorkerArgs)
    control = socket.socket(fileno=args.control_fd)
    ready = encode(WorkerReady(pillow="0", enforced=()))
    control.send(ready)
    while packet := control.recv(MAX_MESSAGE_BYTES):
        match os.pread(args.data_fd, decode_job(packet).num_bytes, 0):
            case b"garbage":
                control.send(b"\xff\x00 no message")
            case b"ready again":
                control.send(ready)
            case b"no canvas":
                os.ftruncate(args.data_fd, 0)
                control.send(encode(CanvasReady(width=1, height=1, cpu_seconds=0.0, rss_bytes=0)))
            case b"hang up":
                control.close()
                sys.stdin.close()
                while True:
                    os.read(os.pipe()[0], 1)


if __name__ == "__main__":
    main(sys.argv[1])

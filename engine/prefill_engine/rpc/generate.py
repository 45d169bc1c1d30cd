"""Regenerates the *_pb2* files beside the .proto files: `python -m prefill_engine.rpc.generate` (make protos).

The protos import each other as `prefill_engine/rpc/<name>.proto`, so the generated imports are right as they come
(C14). Needs the dev extra.
"""

import sys
from pathlib import Path

import grpc_tools  # type: ignore[import-untyped]
from grpc_tools import protoc

from prefill_plan.errors import PrefillError

SOURCE_ROOT = Path(__file__).parents[2]
PROTOS = ("common", "prefill", "handoff", "kv", "directory", "vision")
_OUTPUTS = ("--python_out", "--pyi_out", "--grpc_python_out")
_SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def generate(out_root: Path) -> list[Path]:
    """Writes the modules under out_root/prefill_engine/rpc; returns their paths.

    Raises:
        PrefillError: protoc refused a file (it has said why on stderr).
    """
    include = Path(grpc_tools.__file__).parent / "_proto"
    outputs = [f"{option}={out_root}" for option in _OUTPUTS]
    written = []
    for name in PROTOS:
        path = f"prefill_engine/rpc/{name}.proto"
        if protoc.main(["protoc", f"-I{SOURCE_ROOT}", f"-I{include}", *outputs, path]) != 0:
            raise PrefillError(f"protoc failed on {path}")
        written += [out_root / "prefill_engine" / "rpc" / (name + suffix) for suffix in _SUFFIXES]
    return written


if __name__ == "__main__":
    for target in generate(SOURCE_ROOT):
        sys.stdout.write(f"{target.relative_to(SOURCE_ROOT)}\n")

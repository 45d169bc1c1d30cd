"""The committed protobuf modules are what their .proto files generate (C14)."""

from pathlib import Path

import pytest

from prefill_engine.rpc.generate import PROTOS, SOURCE_ROOT, generate


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in generate(tmp_path_factory.mktemp("protos"))}


@pytest.mark.parametrize("suffix", ["_pb2.py", "_pb2.pyi", "_pb2_grpc.py"])
@pytest.mark.parametrize("name", PROTOS)
def test_committed_module_equals_generated(generated: dict[str, bytes], name: str, suffix: str):
    committed: Path = SOURCE_ROOT / "prefill_engine" / "rpc" / (name + suffix)
    assert committed.read_bytes() == generated[name + suffix]

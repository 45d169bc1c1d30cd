"""What UCX is left to choose from, and what is said of it: require_rdma must not mean a device that nobody uses (kv.md 0.10)."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from prefill_engine.kv.transport import choose
from prefill_engine.kv.transport.loop import LoopHub, LoopTransport
from prefill_engine.kv.transport.nixl import NixlTransport
from prefill_engine.kv.transport.nixl_agent import load_library
from prefill_engine.kv.transport.rdma import RDMA_ONLY, Fabric, plan_fabric, rdma_label
from prefill_engine.kv.transport.tcp import TcpTransport
from prefill_plan.config import TransportKind
from prefill_plan.errors import ConfigError
from prefill_plan.kvd_config import TransportConfig
from prefill_testing.in_loop import in_loop

_NIC = ("mlx5_0",)


@pytest.mark.parametrize(
    ("require_rdma", "devices", "tls", "expected"),
    [
        (False, (), None, (Fabric.TCP, {})),
        (False, _NIC, None, (Fabric.ANY, {})),
        (False, _NIC, "rc,tcp", (Fabric.ANY, {})),
        (False, _NIC, "^tcp", (Fabric.ANY, {})),
        (False, _NIC, "rc,ud", (Fabric.RDMA, {})),
        (True, _NIC, None, (Fabric.RDMA, {"UCX_TLS": "rc,ud,dc"})),
        (True, _NIC, "rc_x,ud_x:aux, self,cuda_copy", (Fabric.RDMA, {})),
    ],
)
def test_ucx_is_left_rdma_alone_where_it_is_required(
    require_rdma: bool, devices: tuple[str, ...], tls: str | None, expected: tuple[Fabric, dict[str, str]]
) -> None:
    environ = {} if tls is None else {"UCX_TLS": tls}
    assert plan_fabric(require_rdma=require_rdma, devices=devices, environ=environ) == expected


@pytest.mark.parametrize("tls", ["tcp", "rc,tcp", "all", "^tcp", "", "sm,self", "rc,ud,brand_new"])
def test_a_choice_of_the_pod_that_leaves_more_is_an_error(tls: str) -> None:
    with pytest.raises(ConfigError, match=f"UCX_TLS={tls.replace('^', '.')} leaves UCX other transports than RDMA"):
        plan_fabric(require_rdma=True, devices=_NIC, environ={"UCX_TLS": tls})


def test_ucx_is_told_before_its_library_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    environ: dict[str, str] = {}

    def load() -> object:
        seen.append(environ["UCX_TLS"])
        return SimpleNamespace()

    monkeypatch.setattr(choose, "load_library", load)
    config = TransportConfig(kind=TransportKind.NIXL, host="127.0.0.1", require_rdma=True)

    transport = choose.build_transport(config, device_root=active_device(tmp_path), environ=environ)

    assert seen == [RDMA_ONLY]
    assert (transport.kind, rdma_label(transport.kind)) == ("nixl-ucx-rdma", "true")


def test_labels_say_what_is_proven() -> None:
    config = TransportConfig(kind=TransportKind.NIXL, host="127.0.0.1")
    transports = [NixlTransport(config, library=None, fabric=fabric) for fabric in Fabric]
    assert [(one.kind, rdma_label(one.kind)) for one in transports] == [
        ("nixl-ucx-rdma", "true"),
        ("nixl-ucx-any", "unproven"),
        ("nixl-ucx-tcp", "false"),
    ]
    assert rdma_label(TcpTransport(TransportConfig(host="127.0.0.1")).kind) == "false"
    assert rdma_label(LoopTransport(LoopHub()).kind) == "false"


@pytest.mark.parametrize("fabric", [Fabric.ANY, Fabric.TCP])
def test_a_transport_that_must_be_rdma_is_not_built_on_anything_else(fabric: Fabric) -> None:
    config = TransportConfig(kind=TransportKind.NIXL, host="127.0.0.1", require_rdma=True)
    with pytest.raises(ConfigError, match="not falling back to TCP"):
        NixlTransport(config, library=None, fabric=fabric)


@in_loop
async def test_ucx_without_its_rdma_is_our_error_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel lists a device that UCX can't use: no agent, and no tcp instead."""
    try:
        load_library()
    except ConfigError as error:
        pytest.skip(error.message)
    if Path("/sys/class/infiniband").exists():
        pytest.skip("this machine has RDMA devices: UCX may succeed")
    monkeypatch.setenv("UCX_TLS", RDMA_ONLY)
    config = TransportConfig(kind=TransportKind.NIXL, host="127.0.0.1", require_rdma=True)
    transport = choose.build_transport(config, device_root=active_device(tmp_path))
    with pytest.raises(ConfigError, match="no UCX agent could be made"):
        await transport.listen(lambda _key: None)
    await transport.close()


def active_device(root: Path) -> Path:
    port = root / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    return root

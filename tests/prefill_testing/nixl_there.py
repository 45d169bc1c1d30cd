"""Tests that run on real NIXL where it is installed: `make test-nixl` has it."""

import pytest

from prefill_engine.kv.transport.nixl_agent import load_library
from prefill_plan.config import TransportKind
from prefill_plan.errors import ConfigError


def need_transport(kind: TransportKind, patch: pytest.MonkeyPatch) -> None:
    """Skips, with the reason, if there is no such transport here; UCX is held to tcp, as between nodes, children's too."""
    if kind is not TransportKind.NIXL:
        return
    try:
        load_library()
    except ConfigError as error:
        pytest.skip(error.message)
    patch.setenv("UCX_TLS", "tcp,self")

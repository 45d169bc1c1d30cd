"""The op set as a whole: load_ops and the protocol's completeness."""

import inspect

import pytest

from prefill_kernels.op_sets import load_ops
from prefill_kernels.ops import Ops

NAMES = sorted(name for name in vars(Ops) if not name.startswith("_"))


@pytest.mark.parametrize("name", NAMES)
def test_ref_has_the_signature_of_the_protocol_and_a_contract(name: str) -> None:
    function = getattr(load_ops("ref"), name)
    expected = list(inspect.signature(getattr(Ops, name)).parameters.values())[1:]
    assert [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()] == [
        (p.name, p.kind, p.default) for p in expected
    ]
    assert function.__doc__


def test_ref_exports_the_protocol_and_nothing_else() -> None:
    import prefill_kernels.ref as ref

    assert sorted(ref.__all__) == NAMES


def test_unknown_op_set_is_refused() -> None:
    with pytest.raises(ValueError, match="ops 'cuda' is not available: expected 'ref' or 'triton'"):
        load_ops("cuda")

"""What a step of the released model launches against the AOT cases, on "meta": the gate compiles what runs, as it runs.

The traps: an integer that a launcher passes is compiled in as "divisible by 16" or as 1 when it happens to be so, unless the
kernel says do_not_specialize. So a case may only claim what every launch keeps, and a number that changes from step to step must
not be specialised: the first step with another divisibility would wait for a compiler.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import mangle_type

from prefill_kernels.aot.cases import load_cases
from prefill_kernels.aot_case import AotCase
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.triton_ops import triton_ops
from prefill_testing.launch_recorder import Launch, recorded_launches
from prefill_testing.released_step import (
    StepShape,
    released_batch,
    released_cache,
    released_model,
    released_parameters,
    released_spec,
)

META = torch.device("meta")
DEFAULTS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True, "maxnreg": None}
"""Triton's, where a launch says nothing."""
WHOLE = StepShape(rows=32768, context=131072, is_last=True)
ODD = StepShape(rows=1003, context=70_001, is_last=True)
"""No count of rows or entries is a multiple of 16; 1,003 rows see up to 70,001 entries."""
Key = tuple[Any, ...]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=list(Chip), ids=lambda chip: chip.name)
def chip(request: pytest.FixtureRequest) -> Chip:
    return request.param


@pytest.fixture(scope="module")
def steps(chip: Chip) -> tuple[list[Launch], list[Launch]]:
    """Launches of a whole step and of an odd one."""
    spec = released_spec()
    model = released_model(spec, released_parameters(spec, META), triton_ops(chip))
    found = []
    for shape in (WHOLE, ODD):
        cache = released_cache(spec, shape, META)
        batch = released_batch(spec, cache, shape, META)
        with recorded_launches() as launches, torch.inference_mode():
            model.forward(batch, cache, on_layer=lambda _layer: None)
        found.append(launches)
    return found[0], found[1]


def _compiled_as(launch: Launch) -> Key:
    """Kernel, argument types, constexprs, launch options."""
    names = launch.function.arg_names
    types = {name: mangle_type(value) for name, value in zip(names, launch.arguments, strict=False)}
    options = {name: launch.options.get(name, default) for name, default in DEFAULTS.items()}
    constexprs = {name: value for name, value in launch.options.items() if name not in DEFAULTS}
    return _key(launch.kernel, types, constexprs, options)


def _compiled_by(case: AotCase) -> Key:
    types = {name: kind for name, kind in case.signature.items() if kind != "constexpr"}
    options = {name: case.options.get(name, default) for name, default in DEFAULTS.items()}
    options |= {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": case.enable_fp_fusion}
    return _key(case.kernel.__name__, types, case.constexprs, options)


def _key(kernel: str, *parts: dict[str, Any]) -> Key:
    return kernel, *(tuple(sorted(part.items())) for part in parts)


def _specialised(launch: Launch) -> dict[str, str]:
    """Integer arguments that triton compiles in as "1" or "divisible by 16"; others don't change the kernel."""
    found = {}
    for parameter, value in zip(launch.function.params, launch.arguments, strict=False):
        if isinstance(value, int) and not parameter.do_not_specialize and (value == 1 or value % 16 == 0):
            found[parameter.name] = "1" if value == 1 else "16"
    return found


def test_every_launch_of_a_step_is_compiled_by_the_gate(chip: Chip, steps: tuple[list[Launch], list[Launch]]) -> None:
    compiled = {_compiled_by(case) for _, case in load_cases([chip]).cases if case.default}
    missing = {_compiled_as(launch) for step in steps for launch in step} - compiled
    assert missing == set()


def test_cases_claim_no_alignment_that_a_launch_does_not_keep(
    chip: Chip, steps: tuple[list[Launch], list[Launch]]
) -> None:
    cases: dict[Key, list[AotCase]] = {}
    for _, case in load_cases([chip]).cases:
        cases.setdefault(_compiled_by(case), []).append(case)
    for launch in [launch for step in steps for launch in step]:
        pointers = {
            name
            for name, value in zip(launch.function.arg_names, launch.arguments, strict=False)
            if isinstance(value, Tensor)
        }
        kept = pointers | {name for name, what in _specialised(launch).items() if what == "16"}
        claims = [set(case.aligned) - kept for case in cases.get(_compiled_as(launch), [])]
        assert set() in claims or not claims, f"{launch.kernel}: {claims}"


def test_no_integer_is_compiled_in_that_varies_from_launch_to_launch(
    steps: tuple[list[Launch], list[Launch]],
) -> None:
    """One kernel per key, whatever the sizes of the step."""
    forms: dict[tuple[Key, str], set[str]] = {}
    for launch in [launch for step in steps for launch in step]:
        special = _specialised(launch)
        for name in launch.function.arg_names:
            forms.setdefault((_compiled_as(launch), name), set()).add(special.get(name, "any"))
    varying = {(key[0], name): sorted(found) for (key, name), found in forms.items() if len(found) > 1}
    assert varying == {}

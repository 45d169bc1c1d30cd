"""Compiles one AotCase for one chip with the ptxas inside the triton wheel; needs no GPU.

Called by `__main__`, in worker processes. The trap: in a process whose kernels are interpreted (TRITON_INTERPRET) nothing
can be compiled; `require_compiler` says so before any work starts.
"""

import io
import resource
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import triton  # type: ignore[import-untyped]
from triton import knobs
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.compiler import ASTSource  # type: ignore[import-untyped]

from prefill_kernels.aot import figures
from prefill_kernels.aot.figures import Figures
from prefill_kernels.aot_case import AotCase
from prefill_kernels.gpu.chip import Chip

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_ALIGNMENT = 16


def require_compiler() -> None:
    """Raises RuntimeError if this process interprets kernels or the wheel lacks its binary tools."""
    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set, so kernels are interpreted: unset it to compile them")
    missing = [name for name in ("ptxas", "cuobjdump", "nvdisasm") if not (_TOOLS / name).exists()]
    if missing:
        raise RuntimeError(
            f"triton {triton.__version__} has no {', '.join(missing)} in {_TOOLS}: expected its CUDA wheel"
        )


@contextmanager
def empty_cache() -> Iterator[None]:
    """Compiles everything anew, so that compile times mean something; for this process and those it starts meanwhile."""
    with tempfile.TemporaryDirectory(prefix="prefill-aot-") as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        yield


def compile_case(case: AotCase, chip: Chip) -> Figures:
    """Raises whatever the compiler raises."""
    names = list(case.kernel.arg_names)
    if set(names) != set(case.signature) or not set(case.aligned) <= set(names):
        raise ValueError(
            f"signature {sorted(case.signature)}, aligned {sorted(case.aligned)}: expected the kernel's arguments {names}"
        )
    signature = {name: case.signature[name] for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", _ALIGNMENT]] for name in case.aligned}
    source = ASTSource(case.kernel, signature, case.constexprs, attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": case.enable_fp_fusion}
    before = _cpu_seconds()
    # On a ptxas error triton prints the whole PTX; the exception says what matters.
    with redirect_stdout(io.StringIO()):
        kernel = triton.compile(source, target=GPUTarget("cuda", chip.value, 32), options=options | case.options)
    seconds = _cpu_seconds() - before
    ptx = kernel.asm["ptx"]
    registers, stack, spills = _resources(kernel.asm["cubin"])
    return Figures(
        registers=registers,
        stack_bytes=stack,
        spills=spills,
        shared_bytes=kernel.metadata.shared,
        tensor_memory_columns=getattr(kernel.metadata, "tmem_size", 0) or 0,
        num_warps=kernel.metadata.num_warps,
        mma=figures.matrix_instructions(ptx),
        is_trap_stub=figures.is_trap_stub(ptx),
        compile_cpu_s=round(seconds, 2),
    )


def _resources(cubin: bytes) -> tuple[int, int, int]:
    """(registers per thread, stack bytes, spill instructions)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        registers, stack = figures.registers_and_stack(_tool("cuobjdump", "-res-usage", file.name))
        # Spilled registers lie on the stack; without one there is nothing to look for in the machine code, the slow part.
        spills = figures.count_spills(_tool("nvdisasm", "-c", file.name)) if stack else 0
        return registers, stack, spills


def _tool(name: str, *args: str) -> str:
    return subprocess.run([str(_TOOLS / name), *args], check=True, capture_output=True, text=True).stdout


def _cpu_seconds() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime

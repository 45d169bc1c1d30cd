"""Chooses an op set by name. Imports of torch and of the sets are inside: a process that never calls this stays light."""

from typing import TYPE_CHECKING

from prefill_kernels.ops import Ops

if TYPE_CHECKING:
    from prefill_kernels.gpu.chip import Chip


def load_ops(name: str) -> Ops:
    """The one place that chooses an implementation: "ref" (any machine) or "triton" (a CUDA device of this process).

    "ref" pins torch to one CPU thread, process-wide: with another thread count some GEMM shapes differ in the last bit, and
    all processes that share KV must agree on every bit (decisions 22).

    Raises:
        ValueError: another name, with the choices; or no GPU that the Triton set has configurations for.
    """
    match name:
        case "ref":
            import torch

            import prefill_kernels.ref as ref

            torch.set_num_threads(1)
            return ref
        case "triton":
            from prefill_kernels.gpu.triton_ops import triton_ops

            return triton_ops(cuda_chip())
        case _:
            raise ValueError(f"ops {name!r} is not available: expected 'ref' or 'triton'")


def ops_identity(name: str) -> str:
    """Names the arithmetic of an op set: engines whose identities differ may differ in a byte of KV, so they share none.

    Raises:
        ValueError: as load_ops.
    """
    return f"triton-{cuda_chip().name.lower()}" if name == "triton" else name


def cuda_chip() -> "Chip":
    """The chip of this process's CUDA device, for every Triton set. Raises ValueError if there is none it runs on."""
    import torch

    from prefill_kernels.gpu.chip import chip_of

    if not torch.cuda.is_available():
        raise ValueError(
            "ops 'triton' runs on a CUDA device of compute capability 9.x or 10.x, and torch "
            f"{torch.__version__} finds none here; with device = cpu use ops = ref"
        )
    return chip_of(torch.device("cuda"))

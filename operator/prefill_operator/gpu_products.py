"""Which GPU a node label names, and how many bytes it has.

The trap: product names are close to each other (H20 and H20-3e, H100 and H100-NVL) and differ by tens of gigabytes, so only
names listed here are known; for all others the user gives gpu.memory. A slice of a GPU (MIG, time slicing) is never known.
"""

import re

from prefill_plan.memory import GPU_BYTES

# Value of the node label nvidia.com/gpu.product, without the vendor, in upper case -> key of GPU_BYTES.
_PRODUCTS: tuple[tuple[str, str], ...] = (
    (r"H100-(80GB-HBM3|PCIE|SXM5-80GB)", "H100-80"),
    (r"H800(-PCIE)?", "H100-80"),
    (r"A100-(SXM4|SXM|PCIE)-80GB|A100-80GB-PCIE|A800-SXM4-80GB", "A100-80"),
    (r"H20", "H20-96"),
    (r"H20-3E", "H20-141"),
    (r"RTX-PRO-6000(-BLACKWELL)?(-(SERVER|WORKSTATION|MAX-Q-WORKSTATION)-EDITION)?", "RTXPRO6000-96"),
    (r"H200(-NVL)?", "H200-141"),
    (r"B200", "B200-180/192"),
    (r"(INSTINCT-)?MI300X(-OAM)?", "MI300X-192"),
    (r"GB300", "GB300-288"),
)


def gpu_bytes(product: str) -> int | None:
    """Usable bytes of one GPU of this product; None = not known. Keys of GPU_BYTES are accepted too, for the CLI."""
    if product in GPU_BYTES:
        return GPU_BYTES[product]
    name = re.sub(r"^(NVIDIA|AMD)-", "", product.upper().replace("_", "-").replace(" ", "-"))
    return next((GPU_BYTES[key] for pattern, key in _PRODUCTS if re.fullmatch(pattern, name)), None)

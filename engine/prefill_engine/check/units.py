"""The quantisers against golden vectors (`quant_units.safetensors`): codes, scales and values bit for bit."""

from pathlib import Path

from safetensors.torch import load_file

from prefill_engine.check.compare import Finding, Judge, Limits
from prefill_kernels.number_formats import (
    dequantise_fp4_e4m3,
    dequantise_fp4_ue8m0,
    dequantise_fp8_ue8m0,
    quantise_fp4_e4m3,
    quantise_fp4_ue8m0,
    quantise_fp8_ue8m0,
)

FILE_NAME = "quant_units.safetensors"
_FORMATS = {
    "fp8_ue8m0_g32": (quantise_fp8_ue8m0, dequantise_fp8_ue8m0),
    "nvfp4_e4m3_g16": (quantise_fp4_e4m3, dequantise_fp4_e4m3),
    "mxfp4_ue8m0_g32": (quantise_fp4_ue8m0, dequantise_fp4_ue8m0),
}


def check_quantisers(directory: Path) -> list[Finding]:
    """One finding per format and part; empty when the directory has no such file."""
    file = directory / FILE_NAME
    if not file.exists():
        return []
    tensors = load_file(file)
    judge = Judge(Limits(value=0.0, logits=0.0), regime="units", group="quantisers", case=FILE_NAME)
    for name, (quantise, dequantise) in _FORMATS.items():
        codes, scales = quantise(tensors[f"{name}.input"])
        want = tensors[f"{name}.dequant"]
        judge.exact(f"{name}.codes", codes, tensors[f"{name}.codes"])
        judge.exact(f"{name}.scale_bytes", scales, tensors[f"{name}.scale_bytes"])
        judge.exact(f"{name}.dequant", dequantise(codes, scales).to(want.dtype), want)
    return judge.findings

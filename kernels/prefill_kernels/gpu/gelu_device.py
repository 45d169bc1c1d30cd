"""The exact (erf) GELU inside kernels: vision_linear calls it.

erf is made of two polynomials, fitted here, since triton's own is a library call: below 1 an odd one of degree 13, above it
1 - 2**-q(|x|) with q of degree 7. Their error is below 2e-9, that of the whole in float32 below 2e-7 (absolute, checked on
all bfloat16 inputs of the GELU). The trap: where 1 + erf cancels, from -5.3 down, its last bits show: a few bfloat16 inputs there
give another value than `ref`, less than 2e-7 away from it.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def erf(x):  # type: ignore[no-untyped-def]
    """Of float32 values; NaN gives NaN or 1."""
    a = tl.abs(x)
    u = a * a
    p = u * 7.889119297033176e-05 + -0.0008020841050893068
    p = p * u + 0.005189535208046436
    p = p * u + -0.026854444295167923
    p = p * u + 0.11283600330352783
    p = p * u + -0.3761262595653534
    p = (p * u + 1.1283791065216064) * a
    # From 3.93 on erf is 1 in float32.
    m = tl.minimum(a, 4.0)
    q = m * 3.1287512683775276e-05 + -0.0006367138121277094
    q = q * m + 0.0060659004375338554
    q = q * m + -0.03636782616376877
    q = q * m + 0.1564149409532547
    q = q * m + 0.9135432243347168
    q = q * m + 1.6296372413635254
    q = q * m + -0.0002712847199290991
    p = tl.where(a < 1.0, p, 1.0 - tl.exp2(-q))
    return tl.where(x < 0.0, -p, p)


@triton.jit
def gelu(y):  # type: ignore[no-untyped-def]
    """y / 2 * (1 + erf(y / sqrt 2)), float32."""
    return y * 0.5 * (1.0 + erf(y * 0.7071067811865476))

"""Device functions for the number formats of model.md 3.1; called inside every kernel that quantises or decodes.

All return the bits that `prefill_kernels.number_formats` returns, for finite inputs (tests/kernels/gpu/test_formats.py runs
all float32 boundary cases). No function divides where it can avoid it: the scale rules are decided on the bits of amax, and
x / scale is compared or multiplied exactly. Tiles are [R, C] float32, codes and scale bytes uint8. The trap: e4m3 casts
round to nearest even and saturate, as cvt.rn.satfinite does; the stock interpreter does neither, the tests' repaired one does.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def pow2(byte):  # type: ignore[no-untyped-def]
    """2 ** (byte - 127) as float32 of ue8m0 bytes; 0 gives 2**-127 (a subnormal), 255 NaN."""
    exponent = byte.to(tl.int32)
    bits = tl.where(exponent == 0, 0x400000, tl.where(exponent == 255, 0x7FC00000, exponent << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def inverse_pow2(byte):  # type: ignore[no-untyped-def]
    """2 ** (127 - byte) as float32, for bytes that a quantiser below made of finite values (1..247)."""
    return ((254 - byte.to(tl.int32)) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fp8_scale_byte(amax):  # type: ignore[no-untyped-def]
    """ue8m0 byte of max(amax, 1e-4) / 448 rounded up to a power of two, without the division.

    amax float32 <= 1.75 * 2**(k + 8) is what float32(amax / 448) <= 2**k says: the first float32 above the limit is more
    than half a step away from it after the division. inf and NaN give 255.
    """
    bits = tl.maximum(amax, 1e-4).to(tl.int32, bitcast=True)
    byte = tl.where(bits >= 0x7F800000, 255, ((bits + 0x1FFFFF) >> 23) - 8)
    return byte.to(tl.uint8)


@triton.jit
def fp4_scale_byte(amax):  # type: ignore[no-untyped-def]
    """ue8m0 byte of max(amax, 6 * 2**-126) / 6 rounded up to a power of two; as fp8_scale_byte, with 6 = 1.5 * 2**2."""
    bits = tl.maximum(amax, 7.052966104933725e-38).to(tl.int32, bitcast=True)
    byte = tl.where(bits >= 0x7F800000, 255, ((bits + 0x3FFFFF) >> 23) - 2)
    return byte.to(tl.uint8)


@triton.jit
def e4m3_codes(x):  # type: ignore[no-untyped-def]
    """uint8 e4m3 bits of float32: nearest even, saturating; NaN gives 0x7F."""
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def e4m3_to_float(codes):  # type: ignore[no-untyped-def]
    """float32 values of uint8 e4m3 bits."""
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def e2m1_codes(x):  # type: ignore[no-untyped-def]
    """uint8 e2m1 codes of float32: nearest, ties to the even code, clamped to +-6."""
    return _e2m1_codes(x, 1.0)


@triton.jit
def _e2m1_codes(x, scale):  # type: ignore[no-untyped-def]
    """e2m1 codes of float32(x / scale), without the division: scale has at most 4 significant bits, so every midpoint times
    scale is exact, and no float32 lies between it and what the rounded quotient decides."""
    size = tl.abs(x)
    code = (size > 0.25 * scale).to(tl.int32) + (size >= 0.75 * scale).to(tl.int32)
    code += (size > 1.25 * scale).to(tl.int32) + (size >= 1.75 * scale).to(tl.int32)
    code += (size > 2.5 * scale).to(tl.int32) + (size >= 3.5 * scale).to(tl.int32)
    code += (size > 5.0 * scale).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return (sign | code).to(tl.uint8)


@triton.jit
def e2m1_to_float(codes):  # type: ignore[no-untyped-def]
    """float32 values of e2m1 codes 0..15, one per element."""
    code = codes.to(tl.int32)
    # As float32 bits the three low bits are the value times 2**-126 (a subnormal for 0.5), so one exact product decodes.
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def e2m1_to_e4m3(codes):  # type: ignore[no-untyped-def]
    """uint8 e4m3 bits of the same values as e2m1 codes 0..15; exact."""
    code = codes.to(tl.int32)
    size = code & 7
    bits = tl.where(size <= 1, size * 0x30, (size << 2) + 0x30)
    return (bits | ((code & 8) << 4)).to(tl.uint8)


@triton.jit
def pack_fp4(codes):  # type: ignore[no-untyped-def]
    """[R, C / 2] uint8 from [R, C] codes: low nibble = even channel."""
    even, odd = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2)))
    return even | (odd << 4)


@triton.jit
def unpack_fp4(packed):  # type: ignore[no-untyped-def]
    """[R, C] codes, one per element, from [R, C / 2]."""
    return tl.interleave(packed & 0xF, packed >> 4)


@triton.jit  # type: ignore[untyped-decorator]
def quantise_fp8(x, GROUP: tl.constexpr = 32):  # type: ignore[no-untyped-def]
    """(e4m3 codes [R, C], ue8m0 bytes [R, C / GROUP]) of x [R, C]; number_formats.quantise_fp8_ue8m0."""
    groups = tl.reshape(x, (x.shape[0], x.shape[1] // GROUP, GROUP))
    scale = fp8_scale_byte(tl.max(tl.abs(groups), axis=2))
    codes = e4m3_codes(groups * tl.expand_dims(inverse_pow2(scale), 2))
    return tl.reshape(codes, (x.shape[0], x.shape[1])), scale


@triton.jit  # type: ignore[untyped-decorator]
def quantise_fp4_ue8m0(x, GROUP: tl.constexpr = 32):  # type: ignore[no-untyped-def]
    """(e2m1 codes [R, C], ue8m0 bytes [R, C / GROUP]) of x [R, C]; number_formats.quantise_fp4_ue8m0."""
    groups = tl.reshape(x, (x.shape[0], x.shape[1] // GROUP, GROUP))
    scale = fp4_scale_byte(tl.max(tl.abs(groups), axis=2))
    codes = e2m1_codes(groups * tl.expand_dims(inverse_pow2(scale), 2))
    return tl.reshape(codes, (x.shape[0], x.shape[1])), scale


@triton.jit  # type: ignore[untyped-decorator]
def quantise_fp4_e4m3(x, GROUP: tl.constexpr = 16):  # type: ignore[no-untyped-def]
    """(e2m1 codes [R, C], e4m3 scale bits [R, C / GROUP]) of x [R, C]; number_formats.quantise_fp4_e4m3."""
    groups = tl.reshape(x, (x.shape[0], x.shape[1] // GROUP, GROUP))
    amax = tl.maximum(tl.max(tl.abs(groups), axis=2), 0.01171875)
    # The one true division, one per group: the scale is rounded twice, to float32 and then to e4m3.
    scale = e4m3_codes(tl.div_rn(amax, 6.0))
    codes = _e2m1_codes(groups, tl.expand_dims(e4m3_to_float(scale), 2))
    return tl.reshape(codes, (x.shape[0], x.shape[1])), scale


@triton.jit  # type: ignore[untyped-decorator]
def dequantise_fp8(codes, scale, GROUP: tl.constexpr = 32):  # type: ignore[no-untyped-def]
    """[R, C] float32 from e4m3 codes [R, C] and ue8m0 bytes [R, C / GROUP]; exact in bfloat16 too."""
    return _scaled(e4m3_to_float(codes), pow2(scale), GROUP)


@triton.jit  # type: ignore[untyped-decorator]
def dequantise_fp4_ue8m0(codes, scale, GROUP: tl.constexpr = 32):  # type: ignore[no-untyped-def]
    """[R, C] float32 from e2m1 codes [R, C], one per element, and ue8m0 bytes [R, C / GROUP]; exact in bfloat16 too."""
    return _scaled(e2m1_to_float(codes), pow2(scale), GROUP)


@triton.jit  # type: ignore[untyped-decorator]
def dequantise_fp4_e4m3(codes, scale, GROUP: tl.constexpr = 16):  # type: ignore[no-untyped-def]
    """[R, C] float32 from e2m1 codes [R, C], one per element, and e4m3 bits [R, C / GROUP]; exact in bfloat16 too."""
    return _scaled(e2m1_to_float(codes), e4m3_to_float(scale), GROUP)


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(values, scale, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """values [R, C] times scale [R, C / GROUP] per group."""
    groups = tl.reshape(values, (values.shape[0], values.shape[1] // GROUP, GROUP))
    return tl.reshape(groups * tl.expand_dims(scale, 2), (values.shape[0], values.shape[1]))

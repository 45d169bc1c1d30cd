"""SWA snapshots on the device: rows of the window rings of all layers into ring images and back, in one launch each.

Called by KvCache where rings are in device memory (kv.md 1.4: a ring holds token p at row p % ring_rows, an image at row
p % image rows). Traffic: 1.4 MB read and written for 20 layers x 134 rows x 528 bytes; bound: the launch. Every byte of an image
is written: rows of no token, and the padding behind the rows, are zero. The trap: a restore writes the rows of its tokens only.
"""

# L layers, Z slots, R ring rows, B bytes per row; I bytes per image
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.rows import WORD_DTYPES, plan_words

_BLOCK_W = 1024
_WARPS = 4
_SIZES = ("image_rows", "ring_rows", "end", "first", "image_words", "row_words")


@triton.jit
def _ring_row(row_W, image_rows, ring_rows, end):  # type: ignore[no-untyped-def]
    """(token of each image row, negative if none, its row of the ring): the last image_rows tokens before `end`."""
    token_W = end - 1 - (end + image_rows - 1 - row_W) % image_rows
    return token_W, (token_W + ring_rows) % ring_rows


@triton.jit(do_not_specialize=_SIZES)  # type: ignore[untyped-decorator]
def _take_images_kernel(  # type: ignore[no-untyped-def]
    rings_ptr,
    images_ptr,
    image_rows,
    ring_rows,
    end,
    first,
    image_words,
    row_words,
    stride_layer,
    BLOCK_W: tl.constexpr,
):
    layer = tl.program_id(1).to(tl.int64)
    word_W = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    row_W = word_W // row_words
    token_W, ring_row_W = _ring_row(row_W, image_rows, ring_rows, end)
    # A layer's ring is at most a few hundred KB: 32 bits within it.
    from_W = ring_row_W * row_words + word_W % row_words
    is_held_W = (row_W < image_rows) & (token_W >= first)
    value = tl.load(rings_ptr + layer * stride_layer + from_W, mask=is_held_W, other=0)
    tl.store(images_ptr + layer * image_words + word_W, value, mask=word_W < image_words)


@triton.jit(do_not_specialize=_SIZES)  # type: ignore[untyped-decorator]
def _restore_images_kernel(  # type: ignore[no-untyped-def]
    rings_ptr,
    images_ptr,
    image_rows,
    ring_rows,
    end,
    image_words,
    row_words,
    stride_layer,
    BLOCK_W: tl.constexpr,
):
    layer = tl.program_id(1).to(tl.int64)
    word_W = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    row_W = word_W // row_words
    token_W, ring_row_W = _ring_row(row_W, image_rows, ring_rows, end)
    is_held_W = (row_W < image_rows) & (token_W >= 0)
    value = tl.load(images_ptr + layer * image_words + word_W, mask=is_held_W, other=0)
    tl.store(rings_ptr + layer * stride_layer + ring_row_W * row_words + word_W % row_words, value, mask=is_held_W)


def take_images(
    rings_LZRB: Tensor, slot: int, images_LI: Tensor, *, image_rows: int, end: int, first_valid: int
) -> None:
    """Writes the ring images of one slot: the last image_rows tokens before `end`.

    Args:
        rings_LZRB: [layers, slots, ring rows, row bytes] uint8, each ring contiguous; read only.
        images_LI: [layers, image bytes] uint8, contiguous, on the same device; all of it is written. Rows of tokens below
            first_valid or 0 are zero.

    Raises:
        ValueError: images that hold fewer bytes than image_rows rows, or more rows than the ring.
    """
    rings, images, row_words = _as_words(rings_LZRB, slot, images_LI, image_rows)
    if not images.numel():
        return
    _take_images_kernel[_grid(images.shape[1], images.shape[0])](
        rings,
        images,
        image_rows,
        rings.shape[1],
        end,
        max(0, first_valid),
        images.shape[1],
        row_words,
        rings.stride(0),
        BLOCK_W=_BLOCK_W,
        num_warps=_WARPS,
    )


def restore_images(images_LI: Tensor, rings_LZRB: Tensor, slot: int, *, image_rows: int, end: int) -> None:
    """Counterpart of take_images: writes the rows of the last image_rows tokens before `end`, no other byte of the rings."""
    rings, images, row_words = _as_words(rings_LZRB, slot, images_LI, image_rows)
    if not images.numel() or end == 0:
        return
    _restore_images_kernel[_grid(image_rows * row_words, images.shape[0])](
        rings,
        images,
        image_rows,
        rings.shape[1],
        end,
        images.shape[1],
        row_words,
        rings.stride(0),
        BLOCK_W=_BLOCK_W,
        num_warps=_WARPS,
    )


def _as_words(rings: Tensor, slot: int, images: Tensor, image_rows: int) -> tuple[Tensor, Tensor, int]:
    """(rings of the slot [L, R, words], images [L, words], words per row) in the widest word that fits all."""
    num_layers, num_slots, ring_rows, row_bytes = rings.shape
    fits = 0 < image_rows <= ring_rows and images.shape[1] >= image_rows * row_bytes and 0 <= slot < num_slots
    if not fits or images.shape[0] != num_layers or not images.is_contiguous() or rings.stride()[2:] != (row_bytes, 1):
        raise ValueError(
            f"{image_rows} rows of slot {slot} of rings {tuple(rings.shape)}, images {tuple(images.shape)}: expected one "
            "contiguous image per layer, with room for the rows, and no more rows than a ring has"
        )
    of_slot = rings[:, slot]
    offsets = (int(of_slot.storage_offset()), int(images.storage_offset()), of_slot.data_ptr(), images.data_ptr())
    word = plan_words(row_bytes, of_slot.stride(0), images.shape[1], *offsets)
    return of_slot.view(WORD_DTYPES[word]), images.view(WORD_DTYPES[word]), row_bytes // word


def _grid(num_words: int, num_layers: int) -> tuple[int, int]:
    return triton.cdiv(num_words, _BLOCK_W), num_layers


def aot_cases(chip: Chip) -> tuple[AotCase, ...]:  # noqa: ARG001 - the same launches on both chips
    """A snapshot of the encoder: 20 layers x 134 rows x 528 bytes, rings of 402 rows."""
    return tuple(
        _case(kernel, name) for name, kernel in (("take", _take_images_kernel), ("restore", _restore_images_kernel))
    )


def _case(name_kernel: object, name: str) -> AotCase:
    names = list(name_kernel.arg_names)  # type: ignore[attr-defined]
    pointers = {"rings_ptr": "*i64", "images_ptr": "*i64"}
    num_words = 134 * 528 // 8
    return AotCase(
        op=f"{name}_images",
        name=f"{name}_images",
        shape="20 layers x 134 x 528 B",
        kernel=name_kernel,
        signature={key: pointers.get(key, "constexpr" if key.isupper() else "i32") for key in names},
        constexprs={"BLOCK_W": _BLOCK_W},
        aligned=tuple(pointers),
        num_warps=_WARPS,
        num_stages=3,
        mma=Mma.NONE,
        num_programs=20 * triton.cdiv(num_words, _BLOCK_W),
        bytes_moved=2 * 20 * num_words * 8,
        flops=0,
    )

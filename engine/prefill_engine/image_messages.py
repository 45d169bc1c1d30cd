"""What the front and a rank say to each other about images, beside messages.py; rows travel through shared memory, not here.

    rank -> ImagesWanted -> front -> (a vision encoder) -> ImageRows -> rank -> ImageRowsDone -> front
The trap: a region of ImageRows belongs to the front, which gives it to another image after ImageRowsDone or Released: a rank
that has said either never looks at it again.
"""

from prefill_plan.config import Struct


class ImageRows(Struct, tag=True):
    """front -> rank, control lane: the rows of image `index` lie in shared memory.

    round: of the ImagesWanted that it answers. path: of the file. Bytes [offset, offset + rows * columns * 2) of it are the
    span's rows, bfloat16, one per position of the span.
    """

    attempt_id: bytes
    index: int
    round: int
    path: str
    offset: int
    rows: int
    columns: int


class ImagesWanted(Struct, tag=True):
    """rank -> front: indices of the images that reach into the rows to compute, in order. Sent again when that changes (the hit
    shrank, a snapshot came): always the whole list. The front fetches what it does not have yet and lets go of the rest.
    round: 1, 2, 3, ...: tells the rows of an image that was wanted, let go of and wanted again from those before."""

    attempt_id: bytes
    indices: tuple[int, ...]
    round: int
    at_ns: int


class ImageRowsDone(Struct, tag=True):
    """rank -> front: every row of the image is computed, its region may be reused."""

    attempt_id: bytes
    index: int

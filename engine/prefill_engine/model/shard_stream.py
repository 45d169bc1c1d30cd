"""Streams the bytes of a checkpoint's tensors into allocated tensors, shard by shard, front to back.

Used by weights.py, which has checked the headers. On the CPU bytes are read straight into the tensor; for another
device they pass through one pinned buffer, so host memory stays at one piece whatever the model's size.
"""

import io
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from prefill_engine.model.checkpoint_files import Catalogue, LocatedTensor, Problem
from prefill_engine.model.load_progress import LoadProgress
from prefill_engine.model.safetensors_reader import read_into
from prefill_engine.model.tensor_names import SCALE_DTYPE
from prefill_plan.errors import CheckpointError

_PIECE_BYTES = 64 * 1024 * 1024
_NAN_SCALE = 255
_MAX_SCALE = 246
"""2**(246 - 127) times e4m3's 448 is the last product that is finite in bf16 (model.md 3.3). For e2m1 252 would do; no
sane scale of either comes near."""


class ShardStream:
    """One pass over the shards of a catalogue."""

    def __init__(
        self,
        catalogue: Catalogue,
        targets: Mapping[str, Tensor],
        *,
        device: torch.device,
        progress: Callable[[LoadProgress], None] | None,
    ) -> None:
        """targets: contiguous tensors by official name, as many bytes as stored; the stream fills them."""
        self.done_bytes = 0
        self._targets = targets
        self._progress = progress
        self._total_bytes = sum(target.nbytes for target in targets.values())
        self._staging = None if device.type == "cpu" else torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        self._files: dict[Path, list[tuple[str, LocatedTensor]]] = {file.path: [] for file in catalogue.files}
        for name in targets:
            located = catalogue.tensors[name]
            self._files[located.file.path].append((name, located))

    def run(self) -> list[Problem]:
        """Fills every target.

        Returns:
            Scales that are NaN or would overflow bf16; then the parameters must not be used.

        Raises:
            CheckpointError: a file changed or failed while it was read.
        """
        problems = []
        for shard, (path, entries) in enumerate(self._files.items(), start=1):
            try:
                with path.open("rb", buffering=0) as file:
                    for name, located in sorted(entries, key=lambda entry: entry[1].stored.start):
                        largest = self._read(file, located, self._targets[name], shard=shard)
                        if located.stored.dtype == SCALE_DTYPE and largest > _MAX_SCALE:
                            problems.append(_scale_problem(located, largest))
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read: {error}") from error
            self._report(shard, path, shard_done=True)
        return problems

    def _read(self, file: io.RawIOBase, located: LocatedTensor, target: Tensor, *, shard: int) -> int:
        """Fills one target; returns the largest scale byte, 0 for other dtypes."""
        stored = located.stored
        source = f"{located.file.path.name}: {stored.name}"
        flat = target.view(torch.uint8).flatten()
        if flat.nbytes != stored.end - stored.start:
            raise AssertionError(f"{source}: {flat.nbytes} bytes allocated for {stored.end - stored.start}")
        largest = 0
        for start in range(0, flat.nbytes, _PIECE_BYTES):
            piece = flat[start : start + _PIECE_BYTES]
            host = piece if self._staging is None else self._staging[: piece.nbytes]
            read_into(file, stored.start + start, host.numpy().data, name=source)
            if stored.dtype == SCALE_DTYPE:
                largest = max(largest, int(host.max()))
            if host is not piece:
                piece.copy_(host)
            self.done_bytes += piece.nbytes
            self._report(shard, located.file.path, shard_done=False)
        return largest

    def _report(self, shard: int, path: Path, *, shard_done: bool) -> None:
        if self._progress is not None:
            self._progress(
                LoadProgress(
                    shard=shard,
                    num_shards=len(self._files),
                    name=path.name,
                    shard_done=shard_done,
                    done_bytes=self.done_bytes,
                    total_bytes=self._total_bytes,
                )
            )


def _scale_problem(located: LocatedTensor, largest: int) -> Problem:
    what = "NaN" if largest == _NAN_SCALE else f"2**{largest - 127}, too large for bf16"
    text = f"{located.file.path.name}: {located.stored.name} has a scale of {what} (byte {largest}, limit {_MAX_SCALE})"
    return Problem(kind="bad scale", text=text)

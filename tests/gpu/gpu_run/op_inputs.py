"""Random inputs of every op at given widths: the same for checking against `ref` and for timing.

Values are random bits, never zeros: on an H200 zeros ran 13 % faster (perf.md 7.2).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from prefill_kernels.weights import DenseWeight, EngramTable, ExpertWeights, Fp4Weight, Fp8Weight, MhcWeights


@dataclass(frozen=True, slots=True)
class Maker:
    """Draws tensors on one device from one generator."""

    device: torch.device
    generator: torch.Generator

    @classmethod
    def seeded(cls, device: torch.device, seed: int) -> "Maker":
        return cls(device, torch.Generator(device=device).manual_seed(seed))

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        values = torch.randn(shape, device=self.device, generator=self.generator, dtype=torch.float32)
        return (values * scale).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """In [low, high)."""
        return torch.randint(low, high, shape, device=self.device, generator=self.generator, dtype=dtype)

    def codes(self, *shape: int) -> Tensor:
        """e4m3 codes without NaN."""
        raw = self.integers(0, 256, *shape, dtype=torch.uint8)
        return torch.where((raw & 0x7F) == 0x7F, raw & 0x80 | 0x30, raw)

    def exponents(self, *shape: int) -> Tensor:
        """ue8m0 scales around 2 ** -9: products of them stay near one."""
        return self.integers(116, 120, *shape, dtype=torch.uint8)

    def fp8(self, num_out: int, num_in: int) -> Fp8Weight:
        scale = self.exponents(-(-num_out // 32), -(-num_in // 32))
        return Fp8Weight(data=self.codes(num_out, num_in).view(torch.float8_e4m3fn), scale=scale)

    def fp4(self, *shape: int) -> Fp4Weight:
        *lead, num_in = shape
        data = self.integers(0, 256, *lead, num_in // 2, dtype=torch.uint8)
        return Fp4Weight(data=data, scale=self.exponents(*lead, num_in // 32))

    def dense(self, num_out: int, num_in: int) -> DenseWeight:
        return DenseWeight(data=self.normal(num_out, num_in, scale=num_in**-0.5))

    def experts(self, count: int, hidden: int, inter: int) -> ExpertWeights:
        return ExpertWeights(
            w1=self.fp4(count, inter, hidden), w3=self.fp4(count, inter, hidden), w2=self.fp4(count, hidden, inter)
        )

    def shared_expert(self, hidden: int, inter: int) -> ExpertWeights:
        return ExpertWeights(w1=self.fp8(inter, hidden), w3=self.fp8(inter, hidden), w2=self.fp8(hidden, inter))

    def mhc(self, streams: int, hidden: int) -> MhcWeights:
        num_mixes = 2 * streams + streams * streams
        fn = self.normal(num_mixes, streams * hidden, scale=(streams * hidden) ** -0.5, dtype=torch.float32)
        base, scale = self.normal(num_mixes, dtype=torch.float32), self.normal(3, dtype=torch.float32)
        return MhcWeights(fn=fn, base=base, scale=scale)

    def engram(self, num_rows: int, width: int) -> EngramTable:
        data = self.codes(num_rows, width).view(torch.float8_e4m3fn)
        return EngramTable(data=data, scale=self.exponents(num_rows, width // 32))

    def window_index(self, num_rows: int, window: int) -> Tensor:
        """[num_rows, window] rows of a buffer [window history | rows]: a chunk that starts with a full window before it."""
        row = torch.arange(num_rows, device=self.device)[:, None]
        return (row + 1 + torch.arange(window, device=self.device)).int()

    def selection(self, num_rows: int, topk: int, num_entries: int) -> Tensor:
        """[num_rows, topk] ascending distinct entries, the last few of every seventh row empty."""
        step = max(1, num_entries // topk)
        base = torch.arange(topk, device=self.device) * step
        picked = base + self.integers(0, step, num_rows, topk)
        picked = torch.where(picked < num_entries, picked, -1)
        picked[::7, topk - topk // 8 :] = -1
        return picked.int()

    def routing_ids(self, num_rows: int, topk: int, num_experts: int) -> Tensor:
        """[num_rows, topk] ascending distinct ids, uniform."""
        scores = torch.rand(num_rows, num_experts, device=self.device, generator=self.generator)
        return scores.topk(topk, dim=1).indices.sort(dim=1).values.int()

"""Loads a checkpoint into ModelParameters: check every header, allocate every tensor, then stream bytes into place.

Called once per rank. Tensors are never expanded, converted or held twice: each is read from its shard straight into
its final place, an expert into its slice of the stacked tensor. The trap: parameters exist before their bytes do, so nothing
is returned unless all of it was read.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from prefill_engine.model.checkpoint_files import (
    Catalogue,
    LocatedTensor,
    Problem,
    build_catalogue,
    raise_problems,
)
from prefill_engine.model.load_progress import LoadProgress
from prefill_engine.model.parameters import (
    AttentionParameters,
    CompressorParameters,
    DraftParameters,
    EngramParameters,
    IndexerParameters,
    LayerParameters,
    ModelParameters,
    MoeParameters,
)
from prefill_engine.model.safetensors_reader import StoredFile, StoredTensor
from prefill_engine.model.shard_stream import ShardStream
from prefill_engine.model.tensor_names import ExpectedTensor, build_expected_tensors, scale_name
from prefill_kernels.weights import DenseWeight, EngramTable, ExpertWeights, Fp4Weight, Fp8Weight, MhcWeights, Weight
from prefill_plan.model_spec import LayerSpec, ModelSpec

logger = logging.getLogger(__name__)

_TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
}


def load_parameters(
    path: Path,
    spec: ModelSpec,
    *,
    device: torch.device,
    expert_range: range,
    progress: Callable[[LoadProgress], None] | None = None,
) -> ModelParameters:
    """Parameters of one rank.

    Args:
        path: checkpoint directory: shards with an index, or .safetensors files without one.
        expert_range: routed experts of this rank, a contiguous range of logical ids; others are not read.

    Raises:
        CheckpointError: one error for everything that is missing, extra, misshapen, of a wrong dtype, truncated, or has
            a scale that is NaN or overflows bf16. All ranks check the same headers, whatever their experts.
        ValueError: expert_range is not a non-empty contiguous range of the model's experts.
    """
    if expert_range.step != 1 or not 0 <= expert_range.start < expert_range.stop <= spec.num_experts:
        raise ValueError(f"{expert_range} is no contiguous part of {spec.num_experts} experts")
    catalogue = build_catalogue(path)
    expected = build_expected_tensors(spec)
    problems = compare_headers(catalogue, expected)
    if problems:
        raise_problems(path, problems)
    placement = _Placement(spec, catalogue, device=device, expert_range=expert_range)
    parameters = placement.model()
    if placement.problems:
        raise_problems(path, placement.problems)
    stream = ShardStream(catalogue, placement.targets, device=device, progress=progress)
    problems = stream.run()
    if problems:
        raise_problems(path, problems)
    logger.info(
        "checkpoint loaded",
        extra={"path": str(path), "num_tensors": len(placement.targets), "num_bytes": stream.done_bytes},
    )
    return parameters


def blank_parameters(spec: ModelSpec, *, device: torch.device, expert_range: range) -> ModelParameters:
    """Parameters of the shapes and dtypes a checkpoint of this model has, values unset: for benchmarks, and on the "meta" device
    for counting launches."""
    no_file = StoredFile(path=Path("blank"), file_bytes=0, header=b"", tensors=())
    tensors = {
        name: LocatedTensor(
            file=no_file,
            stored=StoredTensor(name=name, dtype=tensor.dtypes[0], shape=tensor.shape, start=0, end=0),
        )
        for name, tensor in build_expected_tensors(spec).items()
    }
    catalogue = Catalogue(files=(), tensors=tensors, unreadable=frozenset(), problems=())
    return _Placement(spec, catalogue, device=device, expert_range=expert_range).model()


def compare_headers(catalogue: Catalogue, expected: dict[str, ExpectedTensor]) -> list[Problem]:
    """Headers against the config; names of damaged files are not reported once more as missing."""
    missing = []
    mismatched = []
    for name, tensor in expected.items():
        located = catalogue.tensors.get(name)
        if located is None:
            if tensor.needed and name not in catalogue.unreadable:
                missing.append(Problem(kind="missing", text=f"{name} is in no file, expected {_describe(tensor)}"))
        elif located.stored.shape != tensor.shape or located.stored.dtype not in tensor.dtypes:
            kind = "misshapen" if located.stored.shape != tensor.shape else "wrong dtype"
            found = f"{located.stored.dtype} {list(located.stored.shape)}"
            text = f"{located.file.path.name}: {name} is {found}, expected {_describe(tensor)}"
            mismatched.append(Problem(kind=kind, text=text))
    extra = [
        Problem(
            kind="extra",
            text=f"{located.file.path.name}: {name} ({located.stored.dtype} {list(located.stored.shape)}) is no tensor "
            "of the model that config.json describes",
        )
        for name, located in catalogue.tensors.items()
        if name not in expected
    ]
    return [*catalogue.problems, *mismatched, *missing, *extra]


def _describe(tensor: ExpectedTensor) -> str:
    return f"{' or '.join(tensor.dtypes)} {list(tensor.shape)}"


class _Placement:
    """Allocates parameters and remembers, by tensor name, where the bytes of each belong."""

    def __init__(self, spec: ModelSpec, catalogue: Catalogue, *, device: torch.device, expert_range: range) -> None:
        self.targets: dict[str, Tensor] = {}
        self.problems: list[Problem] = []
        self._spec = spec
        self._catalogue = catalogue
        self._device = device
        self._experts = expert_range

    def model(self) -> ModelParameters:
        return ModelParameters(
            embed=self._tensor("embed.weight"),
            layers=tuple(self._layer(layer) for layer in self._spec.layer_specs()),
            norm=self._tensor("norm.weight"),
            head=self._dense("head.weight"),
            draft=self._draft(),
            first_expert=self._experts.start,
        )

    def _layer(self, layer: LayerSpec) -> LayerParameters:
        prefix = f"layers.{layer.index}."
        return LayerParameters(
            attn_norm=self._tensor(prefix + "attn_norm.weight"),
            ffn_norm=self._tensor(prefix + "ffn_norm.weight"),
            mhc_attn=self._mhc(prefix + "hc_attn_"),
            mhc_ffn=self._mhc(prefix + "hc_ffn_"),
            attention=self._attention(layer, prefix + "attn."),
            moe=self._moe(prefix + "ffn."),
            engram=self._engram(prefix + "engram.") if layer.has_engram else None,
        )

    def _attention(self, layer: LayerSpec, prefix: str) -> AttentionParameters:
        has_indexer = layer.topk_source == layer.index
        has_compressor = layer.kv_source == layer.index
        return AttentionParameters(
            wq_a=self._weight(prefix + "wq_a.weight"),
            q_norm=self._tensor(prefix + "q_norm.weight"),
            wq_b=self._weight(prefix + "wq_b.weight"),
            wkv=self._weight(prefix + "wkv.weight"),
            kv_norm=self._tensor(prefix + "kv_norm.weight"),
            wo_a=self._weight(prefix + "wo_a.weight"),
            wo_b=self._weight(prefix + "wo_b.weight"),
            sink=self._tensor(prefix + "attn_sink"),
            compressor=self._compressor(layer, prefix + "compressor.") if has_compressor else None,
            indexer=self._indexer(layer, prefix + "indexer.") if has_indexer else None,
        )

    def _compressor(self, layer: LayerSpec, prefix: str) -> CompressorParameters:
        return CompressorParameters(
            wkv=self._dense(prefix + "wkv.weight"),
            wgate=self._dense(prefix + "wgate.weight") if layer.compress_ratio == 2 else None,
            norm=self._tensor(prefix + "norm.weight"),
        )

    def _indexer(self, layer: LayerSpec, prefix: str) -> IndexerParameters:
        makes_keys = layer.index_key_source == layer.index
        return IndexerParameters(
            wq_b=self._weight(prefix + "wq_b.weight"),
            weights_proj=self._dense(prefix + "weights_proj.weight"),
            wk=self._dense(prefix + "wk.weight") if makes_keys else None,
            k_norm=self._tensor(prefix + "k_norm.weight") if makes_keys else None,
        )

    def _mhc(self, prefix: str) -> MhcWeights:
        return MhcWeights(
            fn=self._tensor(prefix + "fn"), base=self._tensor(prefix + "base"), scale=self._tensor(prefix + "scale")
        )

    def _moe(self, prefix: str) -> MoeParameters:
        shared = prefix + "shared_experts."
        return MoeParameters(
            gate=self._tensor(prefix + "gate.weight"),
            bias=self._tensor(prefix + "gate.bias"),
            image_bias=self._tensor(prefix + "gate.bias_vl") if self._spec.vision else None,
            routed=ExpertWeights(
                w1=self._stacked(prefix, "w1"), w3=self._stacked(prefix, "w3"), w2=self._stacked(prefix, "w2")
            ),
            shared=ExpertWeights(
                w1=self._weight(shared + "w1.weight"),
                w3=self._weight(shared + "w3.weight"),
                w2=self._weight(shared + "w2.weight"),
            ),
        )

    def _engram(self, prefix: str) -> EngramParameters:
        table = prefix + "embed.weight"
        return EngramParameters(
            table=EngramTable(
                data=self._tensor(table), scale=self._tensor(scale_name(table)) if self._spec.quantized else None
            ),
            wkv=self._weight(prefix + "wkv.weight"),
            query_weight=self._tensor(prefix + "q_weight"),
            key_weight=self._tensor(prefix + "k_weight"),
        )

    def _draft(self) -> DraftParameters | None:
        if self._spec.draft is None:
            return None
        layers = range(self._spec.draft.num_layers)
        return DraftParameters(
            main_proj=self._weight("mtp.0.main_proj.weight"),
            main_norm=self._tensor("mtp.0.main_norm.weight"),
            wkv=tuple(self._weight(f"mtp.{layer}.attn.wkv.weight") for layer in layers),
            kv_norm=tuple(self._tensor(f"mtp.{layer}.attn.kv_norm.weight") for layer in layers),
        )

    def _weight(self, name: str) -> Weight:
        if self._spec.quantized:
            return Fp8Weight(data=self._tensor(name), scale=self._tensor(scale_name(name)))
        return self._dense(name)

    def _dense(self, name: str) -> DenseWeight:
        return DenseWeight(data=self._tensor(name))

    def _stacked(self, prefix: str, matrix: str) -> Weight:
        names = [f"{prefix}experts.{expert}.{matrix}.weight" for expert in self._experts]
        if self._spec.quantized:
            return Fp4Weight(data=self._stack(names), scale=self._stack([scale_name(name) for name in names]))
        return DenseWeight(data=self._stack(names))

    def _tensor(self, name: str) -> Tensor:
        stored = self._catalogue.tensors[name].stored
        target = torch.empty(stored.shape, dtype=_TORCH_DTYPES[stored.dtype], device=self._device)
        self.targets[name] = target
        return target

    def _stack(self, names: Sequence[str]) -> Tensor:
        stored = self._catalogue.tensors[names[0]].stored
        for name in names:
            other = self._catalogue.tensors[name]
            if other.stored.dtype != stored.dtype:  # only dense checkpoints leave a choice
                text = f"{other.file.path.name}: {name} is {other.stored.dtype}, but {names[0]} is {stored.dtype}"
                self.problems.append(Problem(kind="wrong dtype", text=text))
        shape = (len(names), *stored.shape)
        stack = torch.empty(shape, dtype=_TORCH_DTYPES[stored.dtype], device=self._device)
        self.targets.update(zip(names, stack.unbind(0), strict=True))
        return stack

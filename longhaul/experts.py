"""Value types: which routed experts a model has and where their bytes lie.

Knows no file format and no policy.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
MAX_EXPERTS = 1024  # LLAMA_MAX_EXPERTS


@dataclass(frozen=True, slots=True, order=True)
class ExpertKey:
    """Name one routed expert: its layer and its number within that layer."""

    layer: int
    expert: int


@dataclass(frozen=True, slots=True)
class Span:
    """Name a byte range of one shard; `offset` counts from the start of the file."""

    shard: int
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """Describe one tensor such as `blk.3.ffn_gate_exps.weight`; expert 0 starts at `offset`."""

    name: str
    layer: int
    shard: int
    offset: int
    n_expert: int
    slice_bytes: int
    type_name: str

    def span(self, expert: int) -> Span:
        """Return where one expert's bytes lie; raises IndexError if there is no such expert."""
        if not 0 <= expert < self.n_expert:
            raise IndexError(f"{self.name} has experts 0 to {self.n_expert - 1}, not {expert}")
        return Span(self.shard, self.offset + expert * self.slice_bytes, self.slice_bytes)


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """Describe the routed experts of one layer."""

    layer: int
    n_expert: int
    n_expert_used: int
    tensors: tuple[ExpertTensor, ...]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: its slices of all tensors."""
        return sum(tensor.slice_bytes for tensor in self.tensors)

    @property
    def total_bytes(self) -> int:
        """Bytes of all experts of this layer."""
        return self.n_expert * self.expert_bytes


@dataclass(frozen=True, slots=True)
class MoeModel:
    """Describe a model: routed experts, bytes of the rest, and the header figures a budget needs.

    `layers` holds the layers with routed experts that the graph evaluates, in order. Layers that
    predict further tokens (MTP), which llama.cpp leaves out unless asked, are counted in
    `mtp_bytes` and nowhere else. A header figure that the file does not give is 0. `stamps` say
    what the shards were when their headers were read: device, inode, size in bytes, mtime in ns.
    """

    path: Path
    shards: tuple[Path, ...]
    arch: str
    name: str
    layers: tuple[MoeLayer, ...]
    dense_bytes: int
    n_layer: int
    n_ctx_train: int
    n_embd: int
    n_vocab: int
    n_head_kv: tuple[int, ...]  # one per layer; 0 where a layer keeps no keys and values
    n_embd_head_k: int
    n_embd_head_v: int
    n_head: int = 0  # the most of any layer
    n_ff: int = 0  # the widest dense feed-forward of any layer
    n_ff_exp: int = 0  # the widest routed expert of any layer
    state_bytes: int = 0  # recurrent state of one sequence
    n_swa: int = 0  # tokens that layers with a sliding window attend to; 0: there are none
    mtp_bytes: int = 0
    stamps: tuple[tuple[int, int, int, int], ...] = ()

    @property
    def fingerprint(self) -> str:
        """16 hex digits that tell the experts of one file from those of another."""
        tensors = [tensor for layer in self.layers for tensor in layer.tensors]
        words = [self.arch, self.name]
        words += [f"{t.name} {t.shard} {t.offset} {t.n_expert} {t.slice_bytes}" for t in tensors]
        return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]

    @property
    def is_moe(self) -> bool:
        """Say whether there is anything to stream."""
        return bool(self.layers)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all routed experts."""
        return sum(layer.total_bytes for layer in self.layers)

    @property
    def token_cycle_bytes(self) -> int:
        """Bytes of all routed experts that one token uses, over all layers."""
        return sum(layer.n_expert_used * layer.expert_bytes for layer in self.layers)

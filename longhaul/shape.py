"""Describes a model that is not on the disk yet, by its shape. Pure."""

from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigError
from .experts import MAX_EXPERTS, MAX_LAYERS, ExpertTensor, MoeLayer, MoeModel

NOWHERE = Path("a model that is not there")
DEFAULT_TRAINED_CONTEXT = 32768
MAX_WIDTH = 2**20
_RANGES = {
    "n_layer": (1, MAX_LAYERS),
    "n_expert": (1, MAX_EXPERTS),
    "n_expert_used": (1, MAX_EXPERTS),
    "n_embd": (1, MAX_WIDTH),
    "n_ff_exp": (1, MAX_WIDTH),
    "n_head": (1, MAX_WIDTH),
    "n_head_kv": (1, MAX_WIDTH),
    "head_size": (1, MAX_WIDTH),
    "n_vocab": (1, 2**24),
    "n_ff": (0, MAX_WIDTH),
    "n_ff_shared": (0, MAX_WIDTH),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Hold the figures of a MoE as its configuration gives them; raises ConfigError for bad ones.

    `bytes_per_weight` is that of the experts and of the rest, for example 0.5625 for Q4_0.
    """

    n_layer: int
    n_expert: int
    n_expert_used: int
    n_embd: int
    n_ff_exp: int
    bytes_per_weight: float
    n_head: int = 32
    n_head_kv: int = 8
    head_size: int = 128
    n_vocab: int = 151_936
    n_layer_dense: int = 0  # leading layers without routed experts
    n_ff: int = 0  # of those
    n_ff_shared: int = 0  # of the shared experts of a layer, together
    n_ctx_train: int = DEFAULT_TRAINED_CONTEXT

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"{name} is {getattr(self, name)}; it is {least} to {most}")
        if self.n_expert_used > self.n_expert:
            raise ConfigError(f"{self.n_expert_used} of {self.n_expert} experts cannot be used")
        if not 0 <= self.n_layer_dense < self.n_layer:
            raise ConfigError(f"{self.n_layer_dense} of {self.n_layer} layers cannot be dense")
        if self.n_layer_dense and not self.n_ff:
            raise ConfigError("dense layers need n_ff, the width of their feed-forward")


def model_of(shape: Shape) -> MoeModel:
    """Return what a GGUF of this shape would be.

    Gate, up and down of each expert, attention, embeddings and output; the router and norms are
    float32.
    """
    head_rows = shape.n_head * shape.head_size
    attention = shape.n_embd * (2 * head_rows + 2 * shape.n_head_kv * shape.head_size)
    shared = 3 * shape.n_embd * shape.n_ff_shared
    router = shape.n_embd * shape.n_expert
    n_moe = shape.n_layer - shape.n_layer_dense
    weights = shape.n_layer * attention + n_moe * shared + 2 * shape.n_vocab * shape.n_embd
    weights += shape.n_layer_dense * 3 * shape.n_embd * shape.n_ff
    floats = n_moe * router + 2 * shape.n_layer * shape.n_embd
    slice_bytes = round(shape.n_embd * shape.n_ff_exp * shape.bytes_per_weight)
    layers = tuple(
        MoeLayer(
            il,
            shape.n_expert,
            shape.n_expert_used,
            tuple(
                ExpertTensor(
                    f"blk.{il}.ffn_{kind}_exps.weight", il, 0, 0, shape.n_expert, slice_bytes, "?"
                )
                for kind in ("down", "gate", "up")
            ),
        )
        for il in range(shape.n_layer_dense, shape.n_layer)
    )
    return MoeModel(
        path=NOWHERE,
        shards=(),
        arch="by its shape",
        name="",
        layers=layers,
        dense_bytes=round(weights * shape.bytes_per_weight) + 4 * floats,
        n_layer=shape.n_layer,
        n_ctx_train=shape.n_ctx_train,
        n_embd=shape.n_embd,
        n_vocab=shape.n_vocab,
        n_head_kv=(shape.n_head_kv,) * shape.n_layer,
        n_embd_head_k=shape.head_size,
        n_embd_head_v=shape.head_size,
        n_head=shape.n_head,
        n_ff=max(shape.n_ff, shape.n_ff_shared),
        n_ff_exp=shape.n_ff_exp,
    )

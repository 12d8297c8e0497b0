"""Reads a GGUF and its shards into a MoeModel: where each routed expert's bytes lie.

Knows nothing of policy.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .errors import MissingShardError, ModelError, ModelFormatError, ModelUnsupportedError
from .experts import MAX_EXPERTS, MAX_LAYERS, ExpertTensor, MoeLayer, MoeModel
from .gguf_header import GgufArray, GgufHeader, GgufTensor, quoted, read_header

_ROUTED = re.compile(r"blk\.([0-9]{1,4})\.ffn_(gate|up|down|gate_up)_exps\.weight")
_LEGACY = re.compile(r"blk\.[0-9]{1,4}\.ffn_(gate|up|down)\.[0-9]+\.weight")
_RECURRENT = re.compile(r"blk\.([0-9]{1,4})\.ssm_")
_BLOCK = re.compile(r"blk\.([0-9]{1,4})\.")
_NEEDED = (
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_used_count",
)


def read_index(path: Path) -> MoeModel:
    """Read the headers of a GGUF and of its other shards; a dense model has no layers.

    Raises ModelError if a file cannot be read, ModelFormatError if it is not whole and well-formed,
    ModelUnsupportedError if its experts are stored in a way that cannot be streamed.
    """
    first = read_header(path)
    shards = [first, *_read_other_shards(first)]
    _check_tensors(shards)
    return _build_model(shards)


def read_first_shard(path: Path) -> MoeModel:
    """Describe a split model by its first shard alone: what the others hold is estimated.

    A layer that is not there in full is taken to be like the last one that is, and output weights
    that are not there like the embeddings. No expert has a place. Raises ModelError as read_index
    does, and ModelUnsupportedError if the shard holds no whole layer with experts.
    """
    first = read_header(path)
    n_shards = first.count("split.count") or 1
    if n_shards == 1 or first.count("split.no"):
        raise ModelError(f"{quoted(path)} is not the first shard of several")
    by_layer: dict[int, list[GgufTensor]] = defaultdict(list)
    others: list[GgufTensor] = []
    for tensor in first.tensors:
        block = _BLOCK.match(tensor.name)
        (by_layer[int(block[1])] if block else others).append(tensor)
    last = max(by_layer, default=-1)  # which may go on in the next shard
    whole = [il for il in sorted(by_layer) if il != last and _has_routed(by_layer[il])]
    if not whole:
        raise ModelUnsupportedError(
            f"{quoted(path)} holds no whole layer with experts; the next shards are needed to plan"
        )
    arch = _architecture(first)
    _check_keys(first, arch)
    _, n_evaluated = _n_layers(first, arch)
    for il in range(min(last, n_evaluated), n_evaluated):
        by_layer[il] = [_of_layer(tensor, il) for tensor in by_layer[whole[-1]]]
    names = {tensor.name for tensor in others}
    others += [
        replace(tensor, name="output.weight")
        for tensor in others
        if tensor.name == "token_embd.weight" and "output.weight" not in names
    ]
    first.tensors[:] = [tensor for il in sorted(by_layer) for tensor in by_layer[il]] + others
    return _build_model([first])


def _has_routed(tensors: Sequence[GgufTensor]) -> bool:
    return any(_ROUTED.fullmatch(tensor.name) for tensor in tensors)


def _of_layer(tensor: GgufTensor, il: int) -> GgufTensor:
    return replace(tensor, name=_BLOCK.sub(f"blk.{il}.", tensor.name, count=1), offset=0)


def _read_other_shards(first: GgufHeader) -> list[GgufHeader]:
    """Read the shards after the first, found by llama.cpp's rule for their names."""
    n_shards = first.count("split.count") or 1
    if n_shards == 1:
        return []
    number = (first.count("split.no") or 0) + 1
    suffix = _split_suffix(number, n_shards)
    prefix = str(first.path).removesuffix(suffix)
    if prefix == str(first.path):
        raise ModelFormatError(
            f"{quoted(first.path)} is shard {number} of {n_shards};"
            f" rename it so that it ends in {suffix}"
        )
    if number != 1:
        name = quoted(Path(prefix + _split_suffix(1, n_shards)))
        raise ModelError(
            f"{quoted(first.path)} is shard {number} of {n_shards}; give the first, {name}"
        )
    return [_read_later_shard(first, prefix, no, n_shards) for no in range(1, n_shards)]


def _split_suffix(number: int, n_shards: int) -> str:
    return f"-{number:05d}-of-{n_shards:05d}.gguf"


def _read_later_shard(first: GgufHeader, prefix: str, no: int, n_shards: int) -> GgufHeader:
    path = Path(prefix + _split_suffix(no + 1, n_shards))
    if not path.exists():
        raise MissingShardError(
            f"{quoted(path)} is missing, shard {no + 1} of {n_shards};"
            f" put it beside {quoted(first.path)}"
        )
    shard = read_header(path)
    for key, expected, needed in (
        ("split.no", no, True),
        ("split.count", n_shards, False),
        ("split.tensors.count", first.count("split.tensors.count"), False),
    ):
        value = shard.count(key)
        if value != expected and (needed or value is not None):
            raise ModelFormatError(
                f"{quoted(path)} does not belong to {quoted(first.path)}: its {key} is {value},"
                f" not {expected}; get all shards from one place"
            )
    return shard


def _check_tensors(shards: Sequence[GgufHeader]) -> None:
    """Refuse a name that occurs twice, tensors of single experts, and a wrong total."""
    seen: set[str] = set()
    for shard in shards:
        for tensor in shard.tensors:
            if tensor.name in seen:
                raise ModelFormatError(f"{quoted(shard.path)}: tensor {tensor.name!r} occurs twice")
            if _LEGACY.fullmatch(tensor.name):
                raise ModelUnsupportedError(
                    f"{quoted(shard.path)}: {tensor.name!r} is the tensor of one expert,"
                    " an old layout that cannot be streamed; get a newer conversion of this model"
                )
            seen.add(tensor.name)
    expected = shards[0].count("split.tensors.count")
    if len(shards) > 1 and expected is not None and expected != len(seen):
        raise ModelFormatError(
            f"{quoted(shards[0].path)} announces {expected} tensors, its shards have {len(seen)};"
            " get all shards from one place"
        )


def _build_model(shards: Sequence[GgufHeader]) -> MoeModel:
    first = shards[0]
    arch = _architecture(first)
    n_layer, n_layer_evaluated = _n_layers(first, arch)
    routed, dense_bytes, mtp_bytes = _sort_tensors(shards, n_layer_evaluated)
    if routed:
        _check_keys(first, arch)
    shapes = {tensor.name: tensor.shape for shard in shards for tensor in shard.tensors}
    n_embd = first.count(f"{arch}.embedding_length") or 0
    n_head = first.per_layer(f"{arch}.attention.head_count", n_layer) or (0,) * n_layer
    n_head_kv = first.per_layer(f"{arch}.attention.head_count_kv", n_layer) or n_head
    n_ff = first.per_layer(f"{arch}.feed_forward_length", n_layer) or ()
    recurrent = {int(found[1]) for found in map(_RECURRENT.match, shapes) if found}
    recurrent &= set(range(n_layer))
    has_k = [f"blk.{il}.attn_k.weight" in shapes or il not in recurrent for il in range(n_layer)]
    return MoeModel(
        path=first.path,
        shards=tuple(shard.path for shard in shards),
        arch=arch,
        name=_name(first),
        layers=_moe_layers(first, arch, n_layer, routed),
        dense_bytes=dense_bytes,
        n_layer=n_layer,
        n_ctx_train=first.count(f"{arch}.context_length") or 0,
        n_embd=n_embd,
        n_vocab=_n_vocab(first, arch, shapes),
        n_head_kv=tuple(n if k else 0 for n, k in zip(n_head_kv, has_k, strict=True)),
        n_embd_head_k=_head_size(first, f"{arch}.attention.key_length", n_embd, n_head),
        n_embd_head_v=_head_size(first, f"{arch}.attention.value_length", n_embd, n_head),
        n_head=max(n_head, default=0),
        n_ff=max(n_ff, default=0),
        n_ff_exp=max((shape[0] for name, shape in shapes.items() if _is_down(name)), default=0),
        state_bytes=len(recurrent) * _state_bytes(first, arch, max(n_head, default=0)),
        n_swa=first.count(f"{arch}.attention.sliding_window") or 0,
        mtp_bytes=mtp_bytes,
        stamps=tuple(shard.stamp for shard in shards),
    )


def _architecture(first: GgufHeader) -> str:
    arch = first.fields.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelFormatError(
            f"{quoted(first.path)}: key general.architecture is missing; is this a language model?"
        )
    if not arch.isprintable():  # it is part of keys, and these of messages
        raise ModelFormatError(f"{quoted(first.path)}: key general.architecture is {arch!r}")
    return arch


def _n_layers(first: GgufHeader, arch: str) -> tuple[int, int]:
    """Return the number of layers, and of those that the graph evaluates."""
    n_layer = first.count(f"{arch}.block_count")
    if n_layer is None:  # not a text model, or refused later
        return 0, sys.maxsize
    n_mtp = first.count(f"{arch}.nextn_predict_layers") or 0
    if not max(n_mtp, 1) <= n_layer <= MAX_LAYERS:
        raise ModelFormatError(
            f"{quoted(first.path)}: key {arch}.block_count is {n_layer} and"
            f" {arch}.nextn_predict_layers {n_mtp}; 1 to {MAX_LAYERS} layers are possible"
        )
    return n_layer, n_layer - n_mtp


def _sort_tensors(
    shards: Sequence[GgufHeader], n_layer_evaluated: int
) -> tuple[dict[int, list[ExpertTensor]], int, int]:
    """Return each layer's routed tensors, the bytes of the rest, the bytes of layers left out."""
    routed: dict[int, list[ExpertTensor]] = defaultdict(list)
    dense_bytes = left_out_bytes = 0
    for no, shard in enumerate(shards):
        for tensor in shard.tensors:
            block = _BLOCK.match(tensor.name)
            if block and int(block[1]) >= n_layer_evaluated:
                left_out_bytes += tensor.size_bytes
            elif block and _ROUTED.fullmatch(tensor.name):
                routed[int(block[1])].append(_expert_tensor(shard, no, int(block[1]), tensor))
            else:
                dense_bytes += tensor.size_bytes
    return routed, dense_bytes, left_out_bytes


def _expert_tensor(shard: GgufHeader, no: int, layer: int, tensor: GgufTensor) -> ExpertTensor:
    if len(tensor.shape) != 3 or tensor.shape[-1] == 0 or tensor.size_bytes == 0:
        raise ModelFormatError(
            f"{quoted(shard.path)}: tensor {tensor.name!r} has shape {list(tensor.shape)};"
            " rows, columns and experts are needed"
        )
    n_expert = tensor.shape[-1]
    if n_expert > MAX_EXPERTS:
        raise ModelFormatError(
            f"{quoted(shard.path)}: tensor {tensor.name!r} has {n_expert} experts;"
            f" 1 to {MAX_EXPERTS} are possible"
        )
    slice_bytes, rest = divmod(tensor.size_bytes, n_expert)
    assert rest == 0, "rows are whole blocks, so every expert has the same number of bytes"
    return ExpertTensor(
        tensor.name, layer, no, tensor.offset, n_expert, slice_bytes, tensor.type_name
    )


def _check_keys(first: GgufHeader, arch: str) -> None:
    for key in _NEEDED:
        if f"{arch}.{key}" not in first.fields:
            raise ModelFormatError(
                f"{quoted(first.path)}: key {arch}.{key} is missing, which a model with routed"
                " experts must have; get a newer conversion of this model"
            )


def _moe_layers(
    first: GgufHeader, arch: str, n_layer: int, routed: dict[int, list[ExpertTensor]]
) -> tuple[MoeLayer, ...]:
    used = first.per_layer(f"{arch}.expert_used_count", n_layer) or ()
    announced = first.per_layer(f"{arch}.expert_count", n_layer) or ()
    layers = []
    for il, tensors in sorted(routed.items()):
        counts = sorted({tensor.n_expert for tensor in tensors})
        if len(counts) > 1:
            raise ModelFormatError(
                f"{quoted(first.path)}: the tensors of layer {il} have {counts}"
                " experts; they must agree"
            )
        if not 1 <= used[il] <= counts[0]:
            raise ModelFormatError(
                f"{quoted(first.path)}: key {arch}.expert_used_count is {used[il]}"
                f" for layer {il}, which has {counts[0]} experts"
            )
        if announced[il] < used[il]:
            raise ModelFormatError(
                f"{quoted(first.path)}: key {arch}.expert_count is {announced[il]}"
                f" for layer {il}, of which {used[il]} are used"
            )
        ordered = tuple(sorted(tensors, key=lambda tensor: tensor.name))
        layers.append(MoeLayer(il, counts[0], used[il], ordered))
    return tuple(layers)


def _is_down(name: str) -> bool:
    routed = _ROUTED.fullmatch(name)
    return routed is not None and routed[2] == "down"


def _name(first: GgufHeader) -> str:
    """Return the model's name on one line, "" where it has none."""
    name = first.fields.get("general.name")
    return " ".join(name.split()) if isinstance(name, str) else ""


def _n_vocab(first: GgufHeader, arch: str, shapes: dict[str, tuple[int, ...]]) -> int:
    tokens = first.fields.get("tokenizer.ggml.tokens")
    if isinstance(tokens, GgufArray):
        return tokens.length
    return first.count(f"{arch}.vocab_size") or shapes.get("token_embd.weight", (0, 0))[-1]


def _head_size(first: GgufHeader, key: str, n_embd: int, n_head: tuple[int, ...]) -> int:
    """Return the size of a head, the larger where layers with a sliding window have their own."""
    most = max(n_head, default=0)
    size = first.count(key)
    if size is None:
        size = n_embd // most if most else 0
    return max(size, first.count(f"{key}_swa") or 0)


def _state_bytes(first: GgufHeader, arch: str, n_head: int) -> int:
    """Return the float32 state that a recurrent layer keeps for one sequence."""
    inner, state, group = (
        first.count(f"{arch}.ssm.{key}") or 0 for key in ("inner_size", "state_size", "group_count")
    )
    kernel = first.count(f"{arch}.ssm.conv_kernel") or 0
    kda = first.count(f"{arch}.kda.head_dim") or 0
    convolution = max(kernel - 1, 0) * (inner + 2 * group * state + 3 * n_head * kda)
    return 4 * (convolution + state * inner + n_head * kda * kda)

"""Writes a qwen3moe GGUF with random weights whose router replays a recorded routing trace.

Token id t of the model chooses, in every layer, exactly the experts that the trace holds for its
t-th token, so feeding the ids 0, 1, 2, ... in order gives a cache the locality of the real model at
the real tensor sizes. The trace has to have fewer tokens than n_embd: the router of each layer is
the least-norm solution of a linear system with one equation per (token, expert). The vocabulary is
`no_vocab`: feed token ids, not text.

    make_trace_model.py traces/olmoe-1b-7b.jsonl out.gguf                   # 3.7 GiB, OLMoE's shape
    make_trace_model.py traces/olmoe-1b-7b.jsonl out.gguf --n-ff 64         # small, for tests
    make_trace_model.py traces/qwen3-30b-a3b.route.csv out.gguf --n-ff 768  # the trace's decoding
"""

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter

HEAD_DIM = 128
BLOCK = 32  # values in one Q4_0 or Q8_0 block
CONTEXT_LENGTH = 8192

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Model:
    """Say what is to be written; `trace` has shape (n_tokens, n_layer, n_expert_used)."""

    trace: Ids
    n_embd: int
    n_ff: int
    n_expert: int
    kind: GGMLQuantizationType

    @property
    def n_tokens(self) -> int:
        return int(self.trace.shape[0])

    @property
    def n_layer(self) -> int:
        return int(self.trace.shape[1])

    @property
    def n_expert_used(self) -> int:
        return int(self.trace.shape[2])

    @property
    def n_head(self) -> int:
        return self.n_embd // HEAD_DIM

    @property
    def n_head_kv(self) -> int:
        return max(1, self.n_head // 4)


def read_trace(path: Path) -> Ids:
    """Return the expert ids of a recorded trace, (n_tokens, n_layer, n_expert_used)."""
    if path.suffix == ".jsonl":
        lines = path.read_text().splitlines()
        return np.array([json.loads(line)["layers"] for line in lines], np.int32)
    steps: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    with path.open() as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            if row["phase"] == "1":  # decode
                layers = steps[int(row["turn"]), int(row["step"])]
                layers[int(row["layer"])].append(int(row["expert"]))
    return np.array([[of[il] for il in sorted(of)] for _, of in sorted(steps.items())], np.int32)


def random_blocks(
    rng: np.random.Generator, shape: tuple[int, ...], std: float, kind: GGMLQuantizationType
) -> npt.NDArray[np.uint8]:
    """Return quantised symmetric random weights of the given deviation, (..., row_bytes)."""
    n_blocks = int(np.prod(shape)) // BLOCK
    if kind is GGMLQuantizationType.Q4_0:
        blocks = np.empty((n_blocks, 18), np.uint8)
        low, high = (rng.integers(1, 16, (n_blocks, 16), dtype=np.uint8) for _ in range(2))
        blocks[:, 2:] = low | high << 4
        scale = std / 4.32
    else:  # Q8_0
        blocks = np.empty((n_blocks, 34), np.uint8)
        blocks[:, 2:] = rng.integers(-127, 128, (n_blocks, 32), dtype=np.int8).view(np.uint8)
        scale = std / 73.3
    blocks[:, :2] = np.full(n_blocks, scale, np.float16).view(np.uint8).reshape(n_blocks, 2)
    return blocks.reshape(*shape[:-1], -1)


def routers(model: Model, signs: Floats) -> Iterator[Floats]:
    """Yield the router of each layer, (n_expert, n_embd), that replays the trace on `signs`."""
    gram = signs.astype(np.float64) @ signs.T
    solve = np.linalg.solve(gram, signs)  # (n_tokens, n_embd)
    for il in range(model.n_layer):
        wanted = np.zeros((model.n_tokens, model.n_expert))
        # Logits: 8 for the first choice, a little less for each later one.
        logits = 8 - 0.1 * np.arange(model.n_expert_used)
        np.put_along_axis(wanted, model.trace[:, il], logits, axis=1)
        yield (wanted.T @ solve).astype(np.float32)


def quantised(model: Model, il: int) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Yield name, shape and deviation of each quantised tensor of a layer."""
    d, f, n = model.n_embd, model.n_ff, model.n_expert
    head, kv = model.n_head * HEAD_DIM, model.n_head_kv * HEAD_DIM
    unit = d**-0.5
    blk = f"blk.{il}."
    yield blk + "attn_q.weight", (head, d), unit
    yield blk + "attn_k.weight", (kv, d), unit
    yield blk + "attn_v.weight", (kv, d), unit
    yield blk + "attn_output.weight", (d, head), 0.01 * unit
    yield blk + "ffn_gate_exps.weight", (n, f, d), unit
    yield blk + "ffn_up_exps.weight", (n, f, d), unit
    yield blk + "ffn_down_exps.weight", (n, d, f), 0.01 * f**-0.5


def add_metadata(writer: GGUFWriter, model: Model) -> None:
    """Add the keys that llama.cpp wants of a qwen3moe model."""
    writer.add_block_count(model.n_layer)
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(model.n_embd)
    writer.add_feed_forward_length(model.n_ff)
    writer.add_expert_feed_forward_length(model.n_ff)
    writer.add_head_count(model.n_head)
    writer.add_head_count_kv(model.n_head_kv)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(model.n_expert)
    writer.add_expert_used_count(model.n_expert_used)
    writer.add_vocab_size(model.n_tokens)
    writer.add_tokenizer_model("no_vocab")


def write(out: Path, name: str, model: Model, seed: int) -> None:
    """Write the model to `out`."""
    writer = GGUFWriter(out, "qwen3moe")
    writer.add_name(name)
    add_metadata(writer, model)
    rng = np.random.default_rng(seed)
    # Every token is a vector of signs; norms leave it as it is, and small weights keep the residual
    # close to it.
    signs = rng.choice(np.array([-1, 1], np.float32), (model.n_tokens, model.n_embd))

    def add(tensor: str, shape: tuple[int, ...], std: float) -> None:
        blocks: npt.NDArray[Any] = random_blocks(rng, shape, std, model.kind)
        writer.add_tensor(tensor, blocks, raw_dtype=model.kind)

    writer.add_tensor("token_embd.weight", signs)
    writer.add_tensor("output_norm.weight", np.ones(model.n_embd, np.float32))
    add("output.weight", (model.n_tokens, model.n_embd), 0.02)
    for il, router in enumerate(routers(model, signs)):
        for norm in ("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm"):
            size = HEAD_DIM if norm.endswith(("q_norm", "k_norm")) else model.n_embd
            writer.add_tensor(f"blk.{il}.{norm}.weight", np.ones(size, np.float32))
        writer.add_tensor(f"blk.{il}.ffn_gate_inp.weight", router)
        for tensor, shape, std in quantised(model, il):
            add(tensor, shape, std)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write a qwen3moe GGUF whose router replays a recorded routing trace."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("trace", type=Path, help="recorded trace, .jsonl or .csv")
    parser.add_argument("out", type=Path, help="GGUF to write")
    parser.add_argument("--n-embd", type=int, default=2048, help="width of the model")
    parser.add_argument("--n-ff", type=int, default=1024, help="width of one expert")
    parser.add_argument("--n-expert", type=int, help="default: next power of two above all ids")
    parser.add_argument("--n-layer", type=int, help="only the first so many layers of the trace")
    parser.add_argument("--type", choices=["Q4_0", "Q8_0"], default="Q4_0", help="of the weights")
    parser.add_argument("--seed", type=int, default=0, help="seed of all weights")
    args = parser.parse_args()

    trace = read_trace(args.trace)[:, : args.n_layer]
    n_expert = args.n_expert or 1 << int(trace.max()).bit_length()
    model = Model(trace, args.n_embd, args.n_ff, n_expert, GGMLQuantizationType[args.type])
    if model.n_tokens >= model.n_embd:
        parser.error(
            f"the trace has {model.n_tokens} tokens, needs fewer than n_embd = {model.n_embd}"
        )
    write(args.out, f"trace-{args.trace.name}", model, args.seed)
    print(
        f"{args.out}: {model.n_layer} layers, {model.n_expert} experts,"
        f" top-{model.n_expert_used}, {model.n_tokens} token ids, {args.type}"
    )


if __name__ == "__main__":
    main()

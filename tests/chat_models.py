"""Writes a tiny MoE that chats: random weights, the vocabulary and template of a real model."""

from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFWriter
from models import Type, finish, write_tiny_moe

WORDS = {"token_embd.weight": Type.Q8_0, "output.weight": Type.Q8_0}  # most of the file


def write_chat_model(path: Path, source: Path) -> Path:
    """Write a model of 3 layers x 8 experts, top-2, with the tokenizer keys of `source`."""
    words = [key for key in GGUFReader(source).fields.values() if is_word(key.name)]
    n_vocab = next(len(key.data) for key in words if key.name == "tokenizer.ggml.tokens")
    wordless = write_tiny_moe(path.with_suffix(".part"), arch="llama", n_vocab=n_vocab, types=WORDS)
    reader = GGUFReader(wordless)
    writer = GGUFWriter(path, "llama")
    others = [key for key in reader.fields.values() if not is_word(key.name)]
    for key in [*others, *words]:
        if not key.name.startswith("GGUF.") and key.name != "general.architecture":
            writer.add_key_value(key.name, key.contents(), key.types[0], key.types[-1])
    for tensor in reader.tensors:
        data = np.ascontiguousarray(tensor.data).view(np.uint8)
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    finish(writer)
    wordless.unlink()
    return path


def is_word(name: str) -> bool:
    """Say whether a key belongs to the tokenizer."""
    return name.startswith("tokenizer.")

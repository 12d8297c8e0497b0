"""Gets tiny models of every MoE architecture from llama.cpp's own test and gives them more experts.

`test-llama-archs` writes models of 2 experts that both compute for every token, which no cache can
miss; `widen` makes them choose 3 of 8, say.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from models import copy_metadata, finish

ROUTER_GAIN = 8  # the models' norms are small: without it some send every token to the same experts
PER_EXPERT = re.compile(
    r"blk\.\d+\.(ffn_\w+_(ch)?exps\.\w+|ffn_gate_inp\.(weight|bias)|exp_probs_b\w*(\.bias)?)"
)


def write_arch_models(
    out_dir: Path, binary: Path, archs: list[str] | None = None
) -> dict[str, Path]:
    """Let llama.cpp's `test-llama-archs` write its MoE models and return them by architecture.

    All that have routed experts if `archs` is not given. Raises ValueError if it writes none for
    one of them.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    command = [str(binary), "-o", str(out_dir)]
    if archs is not None:
        command += ["-a", "^(" + "|".join(map(re.escape, archs)) + ")$"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for dense in out_dir.glob("*-dense.gguf"):
        dense.unlink()
    suffix = "-moe.gguf"
    found = [path for path in sorted(out_dir.glob("*" + suffix)) if _has_experts(path)]
    models = {path.name.removesuffix(suffix): path for path in found}
    missing = sorted(set(archs or ()) - set(models))
    if missing:
        raise ValueError(f"{binary.name} writes no MoE model of {', '.join(missing)}")
    return models if archs is None else {arch: models[arch] for arch in archs}


def widen(path: Path, out: Path, n_expert: int = 8, n_expert_used: int = 3, seed: int = 0) -> Path:
    """Write the F32 or F16 model at `path` to `out` with new random experts after those it has."""
    reader = GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    had = reader.fields[f"{arch}.expert_count"].contents()
    writer = GGUFWriter(out, arch)
    copy_metadata(reader, writer)
    _set_count(reader, writer, f"{arch}.expert_count", n_expert)
    _set_count(reader, writer, f"{arch}.expert_used_count", n_expert_used)
    rng = np.random.default_rng(seed)
    for tensor in reader.tensors:
        data, kind = np.array(tensor.data), tensor.tensor_type
        if PER_EXPERT.fullmatch(tensor.name) and data.shape[0] == had:
            if kind not in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
                raise ValueError(f"{path}: {tensor.name} is {kind.name}, not F32 or F16")
            data = np.concatenate([data, _new_experts(rng, data, n_expert - had)])
        if tensor.name.endswith(".ffn_gate_inp.weight"):
            data *= ROUTER_GAIN
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    finish(writer)
    return out


def _has_experts(path: Path) -> bool:
    return any("_exps.weight" in tensor.name for tensor in GGUFReader(path).tensors)


def _new_experts(
    rng: np.random.Generator, like: npt.NDArray[Any], n_experts: int
) -> npt.NDArray[Any]:
    scale = np.sqrt(np.mean(np.square(like, dtype=np.float64)))
    values = rng.standard_normal((n_experts, *like.shape[1:])) * scale
    new: npt.NDArray[Any] = values.astype(like.dtype)
    return new


def _set_count(reader: GGUFReader, writer: GGUFWriter, key: str, count: int) -> None:
    field = reader.fields[key]
    old = field.contents()
    # Layers without experts have a count of 0 where each layer has its own.
    new = [count if n else 0 for n in old] if isinstance(old, list) else count
    del writer.kv_data[0][key]  # adding it again without this logs a warning
    writer.add_key_value(key, new, field.types[0], field.types[-1])

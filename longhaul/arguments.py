"""What longhaul has to know of the options that go to llama.cpp's tools unchanged. Pure."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from .budget import RunSizes
from .errors import ConfigError

DEFAULT_UBATCH = 512  # llama.cpp's n_ubatch and n_batch
DEFAULT_BATCH = 2048

_ELEMENT_BYTES = {"f32": 4.0}  # of the KV cache; every other type takes 2 or less
_MODEL = ("-m", "--model")
_REMOTE = ("-hf", "-hfr", "--hf-repo", "-mu", "--model-url", "-dr", "--docker-repo", "--models-dir")
_REMOTE_VARIABLES = ("LLAMA_ARG_HF_REPO", "LLAMA_ARG_MODEL_URL", "LLAMA_ARG_DOCKER_REPO")
_QUESTIONS = ("--version", "--usage", "--list-devices", "-cl", "--cache-list", "--completion-bash")


def spelled(word: str) -> str:
    """Return an option's name as listed; llama.cpp also takes underscores."""
    return word.replace("_", "-") if word.startswith("--") else word


def option(
    args: Sequence[str], names: Sequence[str], env: Mapping[str, str], variable: str = ""
) -> str | None:
    """Return the last value of an option, as llama.cpp does, else of its environment variable."""
    value = env.get(variable) if variable else None
    for word, following in pairwise(args):
        if spelled(word) in names:
            value = following
    return value


def count(
    args: Sequence[str], names: Sequence[str], env: Mapping[str, str], variable: str, default: int
) -> int:
    """Return an option's whole number, 0 or more; raises ConfigError if it is none."""
    found = number(args, names, env, variable)
    return default if found is None else max(found, 0)


def number(
    args: Sequence[str], names: Sequence[str], env: Mapping[str, str], variable: str
) -> int | None:
    """Return an option's whole number, None where it is not given; raises ConfigError if none."""
    text = option(args, names, env, variable)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError as e:
        raise ConfigError(f"{names[-1]} {text!r} is not a whole number") from e


@dataclass(frozen=True, slots=True)
class LlamaArguments:
    """Hold the options of a llama.cpp tool that decide how much memory a run takes."""

    model: Path | None
    n_ctx: int | None = None  # 0: as many as the model was trained with; None: not said
    n_batch: int = DEFAULT_BATCH
    n_ubatch: int = DEFAULT_UBATCH
    n_seq: int | None = None  # None: not said
    kv_element_bytes: float = 2.0
    flash_attention: bool = True
    other_files: tuple[Path, ...] = ()  # draft model, projector: loaded beside the model
    cache_ram_mib: int | None = None  # for prompts of the past; -1: no limit, None: not said
    n_checkpoints: int | None = None  # of each sequence; None: not said

    def sizes(self) -> RunSizes:
        """Return what costs memory; the read buffers are not llama.cpp's and left at 0."""
        return RunSizes(
            n_ctx=self.n_ctx or 0,
            n_ubatch=self.n_ubatch,
            read_buffer_bytes=0,
            n_seq=self.n_seq or 1,
            kv_element_bytes=self.kv_element_bytes,
            flash_attention=self.flash_attention,
            other_bytes=self.other_bytes,
        )

    @property
    def other_bytes(self) -> int:
        """Bytes of the other files."""
        return sum(path.stat().st_size for path in self.other_files if path.is_file())


def config_files(env: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the files there are that llama.cpp reads options from before all others."""
    home = env.get("XDG_CONFIG_HOME") or Path(env.get("HOME") or "/") / ".config"
    paths = [Path(folder) / "llama.cpp" / "config.ini" for folder in ("/etc", home)]
    return [path for path in paths if path.exists()]


def remote_models(args: Sequence[str], env: Mapping[str, str] = os.environ) -> list[str]:
    """Return options and variables by which llama.cpp gets a model from somewhere else."""
    words = [word for word in args if spelled(word) in _REMOTE]
    return words + [variable for variable in _REMOTE_VARIABLES if env.get(variable)]


def workers(args: Sequence[str], env: Mapping[str, str] = os.environ) -> list[str]:
    """Return the other machines, HOST:PORT, that llama.cpp is told to use."""
    value = option(args, ("-rpc", "--rpc"), env, "LLAMA_ARG_RPC")
    return [endpoint for endpoint in (value or "").split(",") if endpoint]


def only_asks(args: Sequence[str]) -> bool:
    """Say whether the tool is only asked for something that needs no model."""
    return len(args) == 1 and spelled(args[0]) in _QUESTIONS


def names_model(args: Sequence[str], env: Mapping[str, str] = os.environ) -> bool:
    """Say whether the tool is told which model to use."""
    return option(args, _MODEL, env, "LLAMA_ARG_MODEL") is not None or bool(
        remote_models(args, env) or (args and args[-1] in _MODEL)
    )


def read_arguments(args: Sequence[str], env: Mapping[str, str] = os.environ) -> LlamaArguments:
    """Read llama.cpp's options; raises ConfigError for one with which nothing can be streamed."""
    model = option(args, _MODEL, env, "LLAMA_ARG_MODEL")
    remote = remote_models(args, env)
    if remote:  # beside --model too: llama.cpp would load what it names instead
        raise ConfigError(
            f"{remote[0]} is not supported while streaming; give a file by --model alone"
        )
    if model is None and args and args[-1] in _MODEL:
        raise ConfigError(f"{args[-1]} has no value; give a GGUF file")
    if "--check-tensors" in map(spelled, args):
        raise ConfigError("--check-tensors cannot be used while streaming: experts are not loaded")
    load_mode = option(args, ("-lm", "--load-mode"), env, "LLAMA_ARG_LOAD_MODE")
    if load_mode == "mmap+mlock":
        raise ConfigError(
            "--load-mode mmap+mlock would lock all experts in memory; use mlock or mmap"
        )
    split_mode = option(args, ("-sm", "--split-mode"), env, "LLAMA_ARG_SPLIT_MODE")
    if split_mode == "tensor":
        raise ConfigError(
            "--split-mode tensor cannot be used while streaming: it spreads each expert over all"
            " devices; use layer"
        )
    n_batch = count(args, ("-b", "--batch-size"), env, "LLAMA_ARG_BATCH", DEFAULT_BATCH)
    n_ubatch = count(args, ("-ub", "--ubatch-size"), env, "LLAMA_ARG_UBATCH", DEFAULT_UBATCH)
    flash = option(args, ("-fa", "--flash-attn"), env, "LLAMA_ARG_FLASH_ATTN")
    kv_types = [
        option(args, ("-ctk", "--cache-type-k"), env, "LLAMA_ARG_CACHE_TYPE_K"),
        option(args, ("-ctv", "--cache-type-v"), env, "LLAMA_ARG_CACHE_TYPE_V"),
    ]
    others = [
        option(
            args,
            ("-md", "--spec-draft-model", "--model-draft"),
            env,
            "LLAMA_ARG_SPEC_DRAFT_MODEL",
        ),
        option(args, ("-mm", "--mmproj"), env, "LLAMA_ARG_MMPROJ"),
    ]
    n_ctx = count(args, ("-c", "--ctx-size"), env, "LLAMA_ARG_CTX_SIZE", -1)
    return LlamaArguments(
        model=Path(model) if model is not None else None,
        n_ctx=None if n_ctx < 0 else n_ctx,
        n_batch=n_batch or DEFAULT_BATCH,
        n_ubatch=min(n_ubatch or n_batch, n_batch or n_ubatch) or DEFAULT_UBATCH,
        n_seq=count(args, ("-np", "--parallel"), env, "LLAMA_ARG_N_PARALLEL", 0) or None,
        kv_element_bytes=max(_ELEMENT_BYTES.get(kind or "", 2.0) for kind in kv_types),
        flash_attention=flash not in ("off", "0", "false", "disabled"),
        other_files=tuple(Path(path) for path in others if path is not None),
        cache_ram_mib=number(args, ("-cram", "--cache-ram"), env, "LLAMA_ARG_CACHE_RAM"),
        n_checkpoints=number(
            args,
            ("-ctxcp", "--swa-checkpoints", "--ctx-checkpoints"),
            env,
            "LLAMA_ARG_CTX_CHECKPOINTS",
        ),
    )

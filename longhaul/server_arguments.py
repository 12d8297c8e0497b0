"""What longhaul has to know of llama-server's options, which go to it unchanged. Pure."""

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from .arguments import count, option, spelled
from .errors import ConfigError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8080
DEFAULT_PARALLEL = 4  # sequences of llama-server, which share one KV cache then
MAX_PORT = 65535

_BATCH = ("-b", "--batch-size")
_PER_SLOT = ("--kv-unified-per-slot",)
_WHOLE_BATCH = ("--spec-", "--model-draft", "-md", "--mmproj", "-mm")


@dataclass(frozen=True, slots=True)
class ServerArguments:
    """Hold the options of llama-server that its page follows, and those that cost memory."""

    host: str = DEFAULT_HOST  # the first one that is an address
    port: int = DEFAULT_PORT
    api_keys: tuple[str, ...] = ()
    has_address: bool = True  # not only UNIX sockets
    has_batch: bool = False
    needs_whole_batch: bool = False  # drafts and images may not fit into one of a ubatch
    n_ctx_per_sequence: int = 0  # 0: not said
    has_tls: bool = False

    @property
    def page_host(self) -> str:
        """Where the page listens: it speaks no TLS, so not beside a server that does."""
        return DEFAULT_HOST if self.has_tls else self.host

    def extra_args(self, n_ubatch: int) -> list[str]:
        """Return options to be put before the user's own.

        A batch of one ubatch lets the server look after its clients and say how far a prompt is
        once a ubatch.
        """
        words = ["--metrics"]
        if not self.has_batch and not self.needs_whole_batch:
            words += ["--batch-size", str(n_ubatch)]
        return words


def read_server_arguments(
    args: Sequence[str], env: Mapping[str, str] = os.environ
) -> ServerArguments:
    """Read llama-server's options; raises ConfigError for a number or key file that is none."""
    words = {spelled(word) for word in args}
    hosts = _csv(option(args, ("--host",), env, "LLAMA_ARG_HOST") or "")
    addresses = [host for host in hosts if not host.endswith(".sock")]
    return ServerArguments(
        host=addresses[0] if addresses else DEFAULT_HOST,
        port=count(args, ("--port",), env, "LLAMA_ARG_PORT", DEFAULT_PORT),
        api_keys=_api_keys(args, env),
        has_address=bool(addresses) or not hosts,
        needs_whole_batch=any(word.startswith(_WHOLE_BATCH) for word in words),
        n_ctx_per_sequence=count(args, _PER_SLOT, env, "LLAMA_ARG_KV_UNIFIED_PER_SLOT", 0),
        has_batch=option(args, _BATCH, env, "LLAMA_ARG_BATCH") is not None,
        has_tls=option(args, ("--ssl-key-file",), env, "LLAMA_ARG_SSL_KEY_FILE") is not None,
    )


def page_port_of(text: str, server: ServerArguments) -> int | None:
    """Return where the page listens: "" is beside the server, "off" nowhere, 0 any free port."""
    word = text.strip().lower()
    if word == "off":
        return None
    if not word:
        if not server.has_address:
            return None
        return server.port + 1 if 0 < server.port < MAX_PORT else 0
    try:
        port = int(word)
    except ValueError as e:
        raise ConfigError(f"--longhaul-page-port {text!r} is not a whole number") from e
    if not 0 <= port <= MAX_PORT:
        raise ConfigError(f"--longhaul-page-port {port} is not a port; give 0 to {MAX_PORT}")
    if port == server.port != 0:
        raise ConfigError(f"--longhaul-page-port {port} is the server's own port")
    return port


def _csv(text: str) -> list[str]:
    return [word.strip() for word in next(csv.reader([text]), []) if word.strip()]


def _api_keys(args: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """Return all keys: llama-server takes each --api-key and the file together."""
    given = [env.get("LLAMA_API_KEY", "")]
    given += [value for word, value in pairwise(args) if spelled(word) == "--api-key"]
    keys = [key for text in given for key in _csv(text)]
    files = [value for word, value in pairwise(args) if spelled(word) == "--api-key-file"]
    if not files and env.get("LLAMA_ARG_API_KEY_FILE"):
        files = [env["LLAMA_ARG_API_KEY_FILE"]]
    for file in files:
        try:
            lines = Path(file).read_text().splitlines()
        except OSError as e:
            raise ConfigError(f"--api-key-file {file}: {e.strerror}") from e
        except UnicodeDecodeError as e:
            raise ConfigError(f"--api-key-file {file}: not a text file") from e
        keys += [line for line in lines if line and not line.startswith("#")]
    return tuple(keys)

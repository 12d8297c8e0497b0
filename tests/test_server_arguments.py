from pathlib import Path

import pytest

from longhaul.arguments import read_arguments
from longhaul.errors import ConfigError
from longhaul.launch import tool_sizes
from longhaul.server_arguments import ServerArguments, page_port_of, read_server_arguments


def read(*args: str, **env: str) -> ServerArguments:
    return read_server_arguments(args, env)


@pytest.mark.parametrize(
    ("args", "env", "host", "port"),
    [
        ((), {}, "127.0.0.1", 8080),
        (("--port", "9000"), {}, "127.0.0.1", 9000),
        (("--host", "0.0.0.0", "--port", "1"), {}, "0.0.0.0", 1),
        (("--host", "/tmp/a.sock, ::1"), {}, "::1", 8080),
        (("--host", "/tmp/a.sock"), {}, "127.0.0.1", 8080),
        ((), {"LLAMA_ARG_HOST": "10.0.0.1", "LLAMA_ARG_PORT": "81"}, "10.0.0.1", 81),
        (("--port", "82"), {"LLAMA_ARG_PORT": "81"}, "127.0.0.1", 82),
    ],
)
def test_address(args: tuple[str, ...], env: dict[str, str], host: str, port: int) -> None:
    server = read(*args, **env)
    assert (server.host, server.port) == (host, port)


def test_the_page_does_not_stand_open_beside_a_server_that_speaks_tls() -> None:
    assert read("--host", "0.0.0.0").page_host == "0.0.0.0"
    assert read("--host", "0.0.0.0", "--ssl-key-file", "k").page_host == "127.0.0.1"


def test_api_keys_are_those_of_llama_server(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# mine\nthree\n\nfour\n")
    server = read(
        "--api-key",
        "one,two",
        "--api-key-file",
        str(file),
        "--api-key",
        "five",
        LLAMA_API_KEY="six",
    )
    assert sorted(server.api_keys) == sorted(["one", "two", "three", "four", "five", "six"])
    assert read().api_keys == ()


def test_options_may_be_spelt_with_underscores(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("two\n")
    server = read("--api_key", "one", "--api_key_file", str(file), "--batch_size", "9")
    assert server.api_keys == ("one", "two")
    assert server.has_batch


def test_a_key_file_that_is_not_there_stops_the_server(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read("--api-key-file", str(tmp_path / "none"))


def test_what_is_added_follows_the_users_own() -> None:
    assert read().extra_args(512) == ["--metrics", "--batch-size", "512"]
    drafts = read("--spec-draft-model", "d.gguf")
    assert drafts.extra_args(512) == ["--metrics"]
    own = read("-b", "64")
    assert own.extra_args(512) == ["--metrics"]


@pytest.mark.parametrize(
    ("text", "port", "wanted"),
    [
        ("", 8080, 8081),
        ("", 65535, 0),
        ("", 0, 0),
        ("0", 0, 0),
        (" OFF ", 8080, None),
        ("0", 8080, 0),
        ("99", 8080, 99),
    ],
)
def test_page_port(text: str, port: int, wanted: int | None) -> None:
    assert page_port_of(text, ServerArguments(port=port)) == wanted


@pytest.mark.parametrize("text", ["on", "-1", "65536", "8080.5"])
def test_page_port_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--longhaul-page-port"):
        page_port_of(text, ServerArguments())


def test_sequences_and_past_prompts_cost_memory(model_of_any_size: object) -> None:
    sizes = tool_sizes("server", read_arguments([], {}), model_of_any_size)  # type: ignore[arg-type]
    assert sizes.n_seq == 4
    arguments = read_arguments(["-np", "2", "--cache-ram", "100"], {})
    two = tool_sizes("server", arguments, model_of_any_size, read())  # type: ignore[arg-type]
    assert two.n_seq == 2
    assert two.other_bytes == 100 * 2**20


def test_the_page_does_not_take_the_servers_port() -> None:
    with pytest.raises(ConfigError, match="the server's own port"):
        page_port_of("8080", read())


def test_no_page_beside_a_socket_unless_it_is_wanted() -> None:
    server = read("--host", "/run/a.sock")
    assert page_port_of("", server) is None
    assert page_port_of("99", server) == 99


def test_a_context_for_each_sequence(model_of_any_size: object) -> None:
    server = read("--kv-unified-per-slot", "1000")
    arguments = read_arguments(["-np", "3"], {})
    assert tool_sizes("server", arguments, model_of_any_size, server).n_ctx == 3000  # type: ignore[arg-type]
    arguments = read_arguments(["-np", "3", "-c", "512"], {})
    assert tool_sizes("server", arguments, model_of_any_size, server).n_ctx == 512  # type: ignore[arg-type]


@pytest.fixture
def model_of_any_size() -> object:
    return object()  # the server's sizes do not depend on it

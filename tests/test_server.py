"""longhaul-server as its clients see it."""

import json
import re
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from commands import SMALL, TIMEOUT_S, first_expert_byte, run
from models import truncate, truncated
from servers import ANSWER, LONG_CONTEXT, Server, serve

from longhaul.budget import MIB
from longhaul.index import read_index

pytestmark = pytest.mark.usefixtures("libraries")

LONG = "The sea is wide and the night is long. " * 40  # about 400 tokens

LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "looks",
        "parameters": {
            "type": "object",
            "properties": {"where": {"type": "string", "enum": ["here", "there"]}},
            "required": ["where"],
        },
    },
}
# Calls between tags, as many models have them; the chat model's own template knows no tools.
TOOL_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools: <tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
Call one as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content %}{{ message.content }}{% endif %}
{%- if message.tool_calls %}{% for call in message.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def server(chat_model: Path, libraries: Path) -> Iterator[Server]:
    with serve(chat_model) as running:
        yield running


# --- what is served -------------------------------------------------------------------------------


def test_a_chat_is_the_text_of_the_cli(server: Server, chat_model: Path) -> None:
    text = server.chat("Write about the sea", 24)["choices"][0]["message"]["content"]
    args = ("-p", "Write about the sea", "-n", "24", "--single-turn", "--temp", "0", "--seed", "1")
    cli = run("longhaul-cli", "--model", chat_model, *SMALL, *args, "--ignore-eos", "-t", "2")
    (turn,) = cli.turns
    assert len(text) > 40
    assert turn.removeprefix("Write about the sea\n").strip() == text.strip()


def test_the_same_question_has_the_same_answer_among_others(server: Server) -> None:
    wanted = server.complete("Once upon a time", 12).json()["content"]
    assert len(wanted) > 10
    for i in range(10):
        server.complete(f"Number {i} is a number of {i * i} other", 4).raise_for_status()
        assert server.complete("Once upon a time", 12).json()["content"] == wanted


def test_a_stream_holds_the_same_words(server: Server) -> None:
    whole = server.complete("The moon", 16).json()["content"]
    parts = []
    body = {"prompt": "The moon", "n_predict": 16, "stream": True, **ANSWER}
    with server.http.stream("POST", "/completion", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                parts.append(json.loads(line.removeprefix("data: ")))
    assert len(parts) > 10
    assert "".join(part["content"] for part in parts) == whole
    assert parts[-1]["timings"]["longhaul_read_bytes"] >= 0


def test_the_openai_package(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "Hello"}]
    chat = client.chat.completions.create(
        model="any", messages=messages, max_tokens=8, temperature=0, seed=1
    )
    assert chat.choices[0].message.content
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 8
    text = client.completions.create(model="any", prompt="Hello", max_tokens=8, temperature=0)
    assert text.choices[0].text
    stream = client.chat.completions.create(
        model="any", messages=messages, max_tokens=8, temperature=0, seed=1, stream=True
    )
    words = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(words) == chat.choices[0].message.content
    offered = client.chat.completions.create(
        model="any", messages=messages, tools=[LOOK], max_tokens=8
    )
    assert offered.choices[0].message.content or offered.choices[0].message.tool_calls
    schema = {"name": "place", "schema": LOOK["function"]["parameters"]}
    shaped = client.chat.completions.create(
        model="any",
        messages=messages,
        response_format={"type": "json_schema", "json_schema": schema},
        max_tokens=64,
    )
    assert json.loads(shaped.choices[0].message.content or "")["where"] in ("here", "there")
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="any", messages=[{"role": "user"}])


def test_a_tool_is_called(chat_model: Path, tmp_path: Path) -> None:
    template = tmp_path / "tools.jinja"
    template.write_text(TOOL_TEMPLATE)
    with serve(chat_model, "--jinja", "--chat-template-file", template) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        asked = {"role": "user", "content": "Look there."}
        begun = {"role": "assistant", "content": '<tool_call>\n{"name": "look'}  # it would ramble
        call: Any = {
            "model": "any",
            "messages": [asked, begun],
            "tools": [LOOK],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "temperature": 0,
            "max_tokens": 128,
        }
        made = client.chat.completions.create(**call).choices[0]
        assert made.finish_reason == "tool_calls"
        wanted = [one.function for one in made.message.tool_calls]
        assert {one.name for one in wanted} == {"look"}
        assert {json.loads(one.arguments)["where"] for one in wanted} <= {"here", "there"}
        found = [""] * len(wanted)
        for chunk in client.chat.completions.create(**call, stream=True):
            for part in chunk.choices[0].delta.tool_calls or []:
                found[part.index] += part.function.arguments or ""
        assert found == [one.arguments for one in wanted]
        messages: Any = [asked, made.message.model_dump(exclude_none=True)]
        for one in made.message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": one.id, "content": "a tree"})
        after = client.chat.completions.create(
            model="any", messages=messages, tools=[LOOK], max_tokens=8
        )
        assert after.usage is not None
        assert after.usage.completion_tokens > 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here: apt-get install curl")
def test_the_curl_line_of_the_readme(server: Server) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (line,) = re.findall(r"^    (curl http://127.0.0.1:8080/.*)$", readme, re.MULTILINE)
    words = shlex.split(line.replace("http://127.0.0.1:8080", server.url))
    done = subprocess.run([*words, "-s"], capture_output=True, check=True, timeout=TIMEOUT_S)
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["content"]
    assert answer["timings"]["longhaul_read_bytes"] >= 0


def test_a_grammar_holds(server: Server) -> None:
    answer = server.complete("Yes or no?", 8, grammar='root ::= "yes" | "no"', ignore_eos=False)
    assert answer.json()["content"] in ("yes", "no")


def test_a_growing_chat_reuses_what_was_said(server: Server) -> None:
    messages = [{"role": "user", "content": LONG}]
    reused = []
    for i in range(3):
        body = {"messages": messages, "max_tokens": 8, "cache_prompt": True, **ANSWER}
        reply = server.http.post("/v1/chat/completions", json=body).raise_for_status().json()
        reused.append(reply["timings"]["cache_n"])
        assert reply["timings"]["cache_n"] + reply["timings"]["prompt_n"] > 300
        messages += [reply["choices"][0]["message"], {"role": "user", "content": f"And {i}?"}]
    assert reused[1] > 300
    assert reused[2] > reused[1]


def test_embeddings_are_the_resident_models(chat_model: Path) -> None:
    found = []
    for mode in (SMALL, ("--no-longhaul",)):
        with serve(chat_model, "--embeddings", "--pooling", "mean", cache=mode) as server:
            body = {"input": "The sea is wide", "model": "any"}
            answer = server.http.post("/v1/embeddings", json=body).raise_for_status().json()
            found.append(answer["data"][0]["embedding"])
    assert len(found[0]) > 16
    assert len(set(found[0])) > 16
    assert found[0] == found[1]


def test_quantised_kv_cache(chat_model: Path) -> None:
    types = ("--cache-type-k", "q8_0", "--cache-type-v", "q4_0", "--flash-attn", "on")
    with serve(chat_model, *types) as server:
        first = server.complete(LONG * 2, 16).raise_for_status().json()
        assert first["timings"]["prompt_n"] > 700
        assert len(first["content"]) > 10
        again = server.complete(LONG * 2, 16, cache_prompt=False).json()
        assert again["content"] == first["content"]


# --- what is said of it ---------------------------------------------------------------------------


def test_the_plan_and_the_page_are_said_before(server: Server) -> None:
    err = server.running.err
    lines = [line.split()[1] for line in err.splitlines() if line.startswith("longhaul: ")]
    assert lines[:6] == ["model", "cache", "ubatch", "memory", "reads", "page"]
    assert f"longhaul: page    {server.page}\n" in err


def test_a_reply_says_what_it_read(server: Server) -> None:
    before = server.metrics()
    timings = server.complete("Far away in the west", 12).json()["timings"]
    after = server.metrics()
    assert 0 < timings["longhaul_hit_rate"] < 1
    assert timings["longhaul_tier_rate"] == 0  # there is none
    read = after["longhaul_read_bytes_total"] - before["longhaul_read_bytes_total"]
    assert timings["longhaul_read_bytes"] == read > 0
    waited = after["longhaul_wait_seconds_total"] - before["longhaul_wait_seconds_total"]
    assert timings["longhaul_wait_ms"] == pytest.approx(1000 * waited)
    hits, misses = (
        after[f"longhaul_{name}_total"] - before[f"longhaul_{name}_total"]
        for name in ("hits", "misses")
    )
    assert timings["longhaul_hit_rate"] == pytest.approx(hits / (hits + misses))
    server.running.wait_for(r"experts streamed: hit rate = [0-9.]+ %, [0-9.]+ MiB read", err=True)


def test_metrics_stand_beside_llama_cpps(server: Server, chat_model: Path) -> None:
    server.complete("Hello", 4).raise_for_status()
    metrics = server.metrics()
    assert metrics["llamacpp:tokens_predicted_total"] > 0
    assert metrics["longhaul_errors_total"] == 0
    assert 0 < metrics["longhaul_resident_bytes"] <= metrics["longhaul_budget_bytes"] <= MIB
    layers = read_index(chat_model).layers
    assert metrics["longhaul_budget_bytes"] == 14 * layers[0].expert_bytes


def test_the_page_shows_the_run(server: Server) -> None:
    timings = server.complete("The page", 9).json()["timings"]
    state = server.state()
    page = httpx.get(server.page).raise_for_status()
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "access-control-allow-origin" not in page.headers
    assert "<canvas" in page.text
    assert not re.search(r"(src|href)=|https?://", page.text)  # nothing from elsewhere
    reply = state["replies"][-1]
    assert reply["n_generated"] == 9
    assert reply["n_prompt"] == timings["prompt_n"]
    assert reply["read_bytes"] == timings["longhaul_read_bytes"]
    assert reply["hit_rate"] == pytest.approx(timings["longhaul_hit_rate"])
    metrics = server.metrics()
    for name in ("hits", "misses", "evictions"):
        counted = sum(state[phase][f"n_{name}"] for phase in ("prefill", "decode"))
        assert counted == metrics[f"longhaul_{name}_total"] > 0
    layers = state["layers"]
    assert [len(layer["used_since"]) for layer in layers] == [8, 8, 8]
    for layer in layers:
        ranks = sorted(rank for rank in layer["used_since"] if rank >= 0)
        assert ranks == list(range(layer["n_slots"]))
    assert state["memory"]["rss_bytes"] > 10 * MIB
    assert state["memory"]["planned_bytes"] > state["memory"]["budget_bytes"] == MIB
    assert state["decode"]["recent"]["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("path", "headers", "code"),
    [
        ("state", {"Host": "evil.example"}, 403),
        ("", {"Host": "evil.example:80"}, 403),
        ("../etc/passwd", {}, 404),
        ("state.json", {}, 404),
        ("state", {"Host": "localhost"}, 200),
    ],
)
def test_the_page_answers_nothing_else(
    server: Server, path: str, headers: dict[str, str], code: int
) -> None:
    answer = httpx.get(server.page + path, headers=headers)
    assert answer.status_code == code
    assert "access-control-allow-origin" not in answer.headers


def test_the_page_works_while_a_prompt_runs(chat_model: Path) -> None:
    with serve(chat_model, *LONG_CONTEXT, "-ub", "32") as server:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.complete, LONG * 20, 1)
            seen = set()
            while not answer.done():
                seen.add(server.state()["prefill"]["n_tokens"])
        assert answer.result().status_code == 200
    assert len(seen) > 3


def test_an_api_key_guards_every_address(chat_model: Path) -> None:
    with serve(chat_model, "--api-key", "one,two") as server:
        assert server.complete("x", 1).status_code == 401
        assert server.http.get("/metrics").status_code == 401
        assert httpx.get(server.page + "state").status_code == 401
        wrong = {"Authorization": "Bearer onetwo"}
        assert httpx.get(server.page + "state", headers=wrong).status_code == 401
        for key in ("one", "two"):
            right = {"Authorization": f"Bearer {key}"}
            assert httpx.get(server.page + "state", headers=right).status_code == 200
            assert server.http.get("/metrics", headers=right).status_code == 200


def test_log_disable_is_quiet(chat_model: Path) -> None:
    with serve(chat_model, "--log-disable") as server:
        server.complete("x", 2).raise_for_status()
        server.running.terminate()
        result = server.running.end()
    assert (result.code, result.out, result.err) == (0, "", "")


def test_a_page_port_that_is_taken_is_no_reason_to_stop(chat_model: Path, server: Server) -> None:
    taken = server.page.rsplit(":", 1)[1].rstrip("/")
    with serve(chat_model, "--longhaul-page-port", taken) as other:
        assert f"longhaul: warning no page: port {taken}: Address already in use" in (
            other.running.err
        )
        assert other.complete("x", 2).status_code == 200


def test_no_page_where_none_is_wanted(chat_model: Path) -> None:
    with serve(chat_model, "--longhaul-page-port", "off") as server:
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.page)
        assert "page" not in server.running.err


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["terminate", "interrupt"])
@pytest.mark.parametrize("doing", ["nothing", "prompt", "words"])
def test_it_ends_within_5_s(chat_model: Path, how: str, doing: str) -> None:
    with serve(chat_model, *LONG_CONTEXT, "-ub", "2048", "--parallel", "1") as server:
        if doing != "nothing":
            prompt = LONG * (80 if doing == "prompt" else 1)
            thread = threading.Thread(target=ask_in_vain, args=(server, prompt))
            thread.start()
            phase = "prefill" if doing == "prompt" else "decode"
            wait_for_phase(server, phase)
        start = time.monotonic()
        getattr(server.running, how)()
        result = server.running.end(20)
        took_s = time.monotonic() - start
        if doing != "nothing":
            thread.join()
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.page)
    assert result.code == 0, result.err
    assert took_s < 5
    assert "Traceback" not in result.err


def ask_in_vain(server: Server, prompt: str) -> None:
    """Ask for more words than there will be time for."""
    try:
        httpx.post(
            server.url + "/completion",
            json={"prompt": prompt, "n_predict": 60000, **ANSWER},
            timeout=60,
        )
    except httpx.TransportError:
        pass


def wait_for_phase(server: Server, phase: str) -> None:
    """Wait until something is computed."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        metrics = server.state()
        if phase == "decode" and metrics["decode"]["n_tokens"] > 2:
            return
        if phase == "prefill" and metrics["prefill"]["n_hits"] + metrics["prefill"]["n_misses"] > 0:
            return
        time.sleep(0.02)
    raise TimeoutError(f"no {phase}")


def test_the_page_is_gone_when_the_server_is_killed(chat_model: Path) -> None:
    with serve(chat_model) as server:
        assert httpx.get(server.page).status_code == 200
        page = server.page
    end = time.monotonic() + 5
    with pytest.raises(httpx.ConnectError):
        while time.monotonic() < end:
            httpx.get(page)
            time.sleep(0.05)


def leave_a_prompt(server: Server, prompt: str, **more: object) -> None:
    """Ask, and go away in the middle of the prompt."""
    body = {"prompt": prompt, "n_predict": 4, **ANSWER, **more}
    with pytest.raises(httpx.TimeoutException):
        httpx.post(server.url + "/completion", json=body, timeout=1.0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_machine(chat_model: Path, stream: bool) -> None:
    with serve(chat_model, *LONG_CONTEXT, "-ub", "64", "--parallel", "1") as server:
        leave_a_prompt(server, LONG * 80, stream=stream)
        start = time.monotonic()
        assert server.complete("x", 2).status_code == 200
        took_s = time.monotonic() - start
        counted = server.state()["prefill"]["n_tokens"]
        n_prompt = len(server.http.post("/tokenize", json={"content": LONG * 80}).json()["tokens"])
    assert took_s < 2  # the server looks after its clients ten times a second
    assert 64 <= counted < n_prompt / 2


def test_a_client_that_leaves_is_noticed_beside_others(chat_model: Path) -> None:
    args = (*LONG_CONTEXT, "-ub", "64", "--parallel", "2", "--kv-unified")
    body = {"prompt": "Once", "n_predict": 60000, "stream": True, **ANSWER}
    with serve(chat_model, *args) as server:
        n_prompt = len(server.http.post("/tokenize", json={"content": LONG * 80}).json()["tokens"])
        with server.http.stream("POST", "/completion", json=body) as other:
            words = other.iter_lines()
            next(words)
            with ThreadPoolExecutor(1) as pool:
                left = pool.submit(leave_a_prompt, server, LONG * 80)
                while not left.done():
                    next(words)
            left.result()
            end = time.monotonic() + 2
            while time.monotonic() < end:  # it has time to notice
                next(words)
            counted = server.state()["prefill"]["n_tokens"]
            end = time.monotonic() + 1
            while time.monotonic() < end:
                next(words)
            assert server.state()["prefill"]["n_tokens"] == counted
    assert 64 <= counted < n_prompt / 2


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_failed_read_is_a_500_and_the_next_request_works(
    chat_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(chat_model.read_bytes())
    with serve(path, "--load-mode", "none") as server:
        wanted = server.complete("And now", 12).json()["content"]
        assert len(wanted) > 10
        with truncated(path, first_expert_byte(path)):
            answer = server.complete("Something completely different", 24)
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert error["type"] == "server_error"
        assert "Experts could not be read: the model file has changed." in error["message"]
        assert str(tmp_path) not in answer.text
        assert "content" not in answer.json()
        assert server.metrics()["longhaul_errors_total"] == 1
        assert server.complete("And now", 12).json()["content"] == wanted
        server.running.terminate()
        result = server.running.end()
    assert result.code == 0
    assert "longhaul: error: " in result.err
    assert ", 1 errors\n" in result.err


def test_a_failed_read_in_a_stream_ends_it_with_the_error(chat_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(chat_model.read_bytes())
    body = {"prompt": "Once", "n_predict": 1500, "stream": True, **ANSWER}
    with serve(path, "--load-mode", "none", "--parallel", "1") as server:
        wanted = server.complete("Once", 400).json()["content"]
        words, error, is_cut = "", None, False
        first = first_expert_byte(path)
        with server.http.stream("POST", "/completion", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    data = json.loads(line.removeprefix("data: "))
                    assert error is None  # which is the last that is sent
                    error = data.get("error")
                    words += data.get("content", "")
                if len(words) > 20 and not is_cut:
                    truncate(path, first)
                    is_cut = True
    assert error is not None
    assert "Experts could not be read" in error["message"]
    assert 20 < len(words)
    assert wanted.startswith(words[: len(wanted)])


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"prompt": 5.5}', 400),
        (b'{"prompt": "x", "n_predict": "many"}', 400),
        (b'{"prompt": "x", "grammar": "root ::= ("}', 400),
        (b"\xff\xfe", 400),
    ],
)
def test_bad_requests_are_told_so(server: Server, body: bytes, code: int) -> None:
    answer = server.http.post("/completion", content=body)
    assert answer.status_code == code
    assert answer.json()["error"]["code"] == code
    assert server.http.get("/health").status_code == 200


def test_unknown_fields_are_passed_over(server: Server) -> None:
    assert server.complete("x", 2, no_such_field=1).status_code == 200


def test_too_long_a_prompt_is_told_so(server: Server) -> None:
    answer = server.complete(LONG * 20, 1)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "exceed_context_size_error"


def test_200_clients_at_once(server: Server) -> None:
    everybody_is_there = threading.Barrier(200)

    def ask(i: int) -> int:
        body = {"prompt": f"{i}", "n_predict": 1, **ANSWER}
        with httpx.Client(timeout=TIMEOUT_S) as http:  # each on a connection of its own
            everybody_is_there.wait(TIMEOUT_S)
            return http.post(server.url + "/completion", json=body).status_code

    with ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(ask, range(200)))
    assert answers == [200] * 200


def test_a_huge_body_is_refused(server: Server) -> None:
    answer = server.http.post("/completion", content=b" " * (101 * 2**20))
    assert answer.status_code == 413
    assert server.complete("x", 2).status_code == 200


@pytest.mark.parametrize("which", ["url", "page"])
def test_slow_clients_keep_nobody_from_being_served(server: Server, which: str) -> None:
    port = int(getattr(server, which).rsplit(":", 1)[1].rstrip("/"))
    with ExitStack() as stack:
        for _ in range(3):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            slow.sendall(b"GET /state HTTP/1.1\r\nHost: local")
        assert server.complete("x", 2).status_code == 200
        assert server.state()["pid"] == server.running.pid


GARBAGE = [
    b"\r\n\r\n",
    b"\x00\x01\x02\xff\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /state\r\n\r\n",
    b"GET /state HTTP/9.9\r\n\r\n",
    b"GET /%00%ff/../../state HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /state HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello",
    b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /state HTTP/1.1\r\nHost: [::1\r\n\r\n",
    b"GET /state HTTP/1.1\r\n" + b"X: y\r\n" * 500 + b"\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /state HTTP/1.1\r\nHost: localhost\r\nAuthorization: \xff\xfe\r\n\r\n",
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_does_not_hurt_the_page(server: Server, garbage: bytes) -> None:
    port = int(server.page.rsplit(":", 1)[1].rstrip("/"))
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(garbage)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while part := client.recv(65536):
                answer += part
        except ConnectionResetError:
            pass  # it did not read everything
    assert not answer.startswith(b"HTTP/1.1 5") or b" 501 " in answer or b" 505 " in answer
    assert b"Traceback" not in answer
    assert b"Access-Control" not in answer
    assert server.state()["model"] == "tiny llama"


def test_it_listens_on_this_machine_only(server: Server) -> None:
    listening = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    ports = [int(url.rsplit(":", 1)[1].rstrip("/")) for url in (server.url, server.page)]
    for port in ports:
        local = re.findall(rf"^\s*\d+: ([0-9A-F]+):{port:04X} \S+ 0A ", listening, re.MULTILINE)
        assert local == ["0100007F"]


def test_a_port_that_is_taken_ends_with_1(chat_model: Path, server: Server) -> None:
    port = server.url.rsplit(":", 1)[1]
    result = run("longhaul-server", "--model", chat_model, *SMALL, "-c", "64", "--port", port)
    assert result.code == 1
    assert "Traceback" not in result.err


def test_the_chat_page_is_there_or_how_to_get_it(server: Server) -> None:
    page = server.http.get("/", headers={"Accept-Encoding": "gzip"})
    if page.status_code != 200:
        assert page.status_code == 501
        assert "`make ui`" in page.text
    else:
        assert page.status_code == 200
        assert "<html" in page.text

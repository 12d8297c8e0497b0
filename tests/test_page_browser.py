"""The page as a browser shows it."""

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from servers import serve

pytestmark = pytest.mark.usefixtures("libraries")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
def test_a_browser_shows_a_request_while_it_runs(chat_model: Path, tmp_path: Path) -> None:
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    wait = ("--virtual-time-budget=3000", "--window-size=1000,1100")
    with serve(chat_model, "--parallel", "1") as server:
        server.complete("Before", 5).raise_for_status()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.complete, "Once upon a time", 1900)
            command = [str(CHROMIUM), *FLAGS, profile, *wait, "--dump-dom", server.page]
            shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
            was_running = not answer.done()
            answer.result().raise_for_status()
    assert was_running
    page = shown.stdout
    assert re.search(r'id="status"[^>]*>computing<', page)
    assert re.search(r'id="tg">[0-9.]+<small> tok/s<', page)
    assert re.search(r'id="hits">[0-9.]+<small> %<', page)
    assert re.search(r"1[0-4] of 24 in memory", page)
    assert re.search(r"[0-9]+ MiB resident, [0-9]+ at most, [0-9]+ planned; slots 1 MiB", page)
    replies = re.findall(r"<tr><td>[0-9]+ s ago</td>.*?</tr>", page)
    assert len(replies) == 1
    assert "<td>5</td>" in replies[0]

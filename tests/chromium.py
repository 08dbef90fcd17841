"""Opens a page in a real headless Chromium and returns its result; `needs_chromium` marks the tests that do.

    page = open_page(path, tmp_path)          # page.dom, page.console, page.requests

Chromium is driven by its command line alone; its net log has the addresses that a page asked for.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")
# The browser's own errands (updates, the time of day) find no host.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--virtual-time-budget=20000",
    "--enable-logging=stderr",
)  # fmt: skip


@dataclass(frozen=True)
class Page:
    """dom: after scripts have run. console: what the page logged or threw. requests: http(s) and ws addresses."""

    dom: str
    console: list[str]
    requests: list[str]


def open_page(path: Path, scratch: Path, width: int = 1200, height: int = 900) -> Page:
    net_log = scratch / "net.json"
    done = _run(path, scratch, width, height, f"--log-net-log={net_log}", "--dump-dom")
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    events = json.loads(net_log.read_text())["events"]
    started = [event["params"] for event in events if {"url", "initiator"} <= set(event.get("params", {}))]
    asked = {start["url"] for start in started if start["initiator"] != "not an origin"}  # that is the browser itself
    return Page(done.stdout, console, sorted(url for url in asked if re.match(r"(https?|wss?):", url)))


def take_screenshot(
    path: Path, picture: Path, scratch: Path, width: int = 1200, height: int = 4000, *flags: str
) -> None:
    _run(path, scratch, width, height, f"--screenshot={picture}", *flags)


def print_to_pdf(path: Path, pdf: Path, scratch: Path) -> None:
    _run(path, scratch, 1000, 1000, "--no-pdf-header-footer", f"--print-to-pdf={pdf}")


def _run(path: Path, scratch: Path, width: int, height: int, *flags: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    profile = scratch / "chromium-profile"
    shutil.rmtree(profile, ignore_errors=True)
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", *flags]
    done = subprocess.run([*command, path.resolve().as_uri()], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr[-2000:]
    return done

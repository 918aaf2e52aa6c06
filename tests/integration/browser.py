"""A headless Chromium for the tests, which reaches nothing but this machine."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Run a browser with a fresh profile. Skips the test if Chromium, its driver or selenium is not installed."""
    if CHROMIUM is None or CHROMEDRIVER is None:
        pytest.skip("chromium and chromedriver are not installed")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for each in (*OPTIONS, f"--user-data-dir={profile}"):
            options.add_argument(each)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        made = webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))
        try:
            yield made
        finally:
            made.quit()


def errors(browser: Any) -> list[str]:
    """Return what the browser's console reports: errors of the script, and what the page's policy has blocked."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]

"""The site: it is built with `--strict`, holds every page, needs no other server, and has every public name."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest
from pyspark.ml.param import Param
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.pages import DOCS, ROOT
from tests.website import api, diagrams, links

ALIASES = {"spark_elastic.tensorflow.keras"}
"""Names of modules that are in the reference under their own name."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", built]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return built


@pytest.fixture(scope="module")
def inventory(site: Path) -> set[str]:
    """The names in the API reference. A name without a docstring is not in it."""
    head, _, packed = (site / "objects.inv").read_bytes().partition(b"using zlib.\n")
    assert b"# Project: spark_elastic\n" in head
    return {line.partition(" ")[0] for line in zlib.decompress(packed).decode().splitlines()}


class Resources(HTMLParser):
    """What a browser loads with a page, and where its links lead."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        source = named.get("src") or (named.get("href") if tag == "link" else None)
        if source and named.get("rel") != "canonical":
            self.loaded.append(source)
        if tag == "a" and named.get("href"):
            self.links.append(str(named["href"]))


@functools.cache
def resources(page: Path) -> Resources:
    return Resources(page)


def pages(site: Path) -> list[Path]:
    found = sorted(site.rglob("*.html"))
    assert len(found) > 50
    return found


def test_every_page_is_in_the_navigation(site: Path) -> None:
    wanted = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    wanted |= {path.relative_to(ROOT).with_suffix(".html") for path in ROOT.glob("examples/notebooks/*.ipynb")}
    wanted |= {Path(name) for name in ("index.html", "CHANGELOG.html", "CONTRIBUTING.html", "SECURITY.html")}
    wanted = {path.with_name("index.html") if path.stem == "README" else path for path in wanted}
    assert {path for path in wanted if not (site / path).exists()} == set()
    listed = set()
    for page in (
        "index.html",
        "estimators.html",
        "doctor.html",
        "benchmarks.html",
        "api/index.html",
    ):  # one of each tab
        listed |= {os.path.normpath(Path(page).parent / link) for link in resources(site / page).links}
    assert {str(path) for path in wanted} - listed - {"index.html"} == set()


def test_the_pages_need_no_other_server(site: Path) -> None:
    loaded = {(page.name, each) for page in pages(site) for each in resources(page).loaded}
    assert len(loaded) > 100
    assert {(page, each) for page, each in loaded if re.match(r"(?:https?:)?//", each)} == set()
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^)]*", styles) == []


def test_links_within_the_site_lead_to_its_files(site: Path) -> None:
    broken = set()
    for page in pages(site):
        if page.name == "404.html":
            continue
        for link in resources(page).links:
            path = link.partition("#")[0]
            if path and not re.match(r"[a-z]+:", path) and not (page.parent / path).exists():
                broken.add(f"{page.relative_to(site)}: {link}")
    assert broken == set()


def test_links_to_the_repository_lead_to_its_files(site: Path) -> None:
    here = re.compile(re.escape(links.repository()) + r"/(?:blob|tree|raw)/main/([^#]+)")
    found = {each for page in pages(site) for link in resources(page).links for each in here.findall(link)}
    assert found
    assert {path for path in found if not (ROOT / path).exists()} == set()


def test_a_notebook_s_page_leads_to_its_files(site: Path) -> None:
    found = resources(site / "examples" / "notebooks" / "01_quickstart.html").links
    folder = f"{links.repository()}/blob/main/examples/notebooks"
    assert {f"{folder}/01_quickstart.ipynb", f"{folder}/01_quickstart.py"} <= set(found)


def test_a_diagram_that_is_not_drawn_stays_as_it_is() -> None:
    page = "# A\n\n```mermaid\nflowchart LR\n    planted --> diagram\n```\n"
    assert diagrams.replaced(page) == page
    assert not diagrams.file_of(next(iter(diagrams.of_page(page)))).exists()


def test_every_diagram_is_drawn_and_no_other_one(site: Path) -> None:
    wanted = {name for page in DOCS.rglob("*.md") for name in diagrams.of_page(page.read_text())}
    assert {path.stem for path in diagrams.FOLDER.glob("*.svg")} == wanted, "run: make diagrams"
    shown = "".join(page.read_text() for page in pages(site))
    assert all(f'id="diagram-{name}"' in shown for name in wanted)


@pytest.mark.parametrize("module", api.PUBLIC_MODULES)
def test_every_public_name_is_documented(module: str, inventory: set[str]) -> None:
    names = public_names(importlib.import_module(module))
    assert names
    missing = {f"{module}.{name}" for name in names} - ALIASES - inventory
    assert missing == set(), "without a docstring, or not in docs/api"


def public_names(module: ModuleType) -> list[str]:
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return list(listed)
    own = [(name, value) for name, value in vars(module).items() if not name.startswith("_")]
    return [name for name, value in own if isinstance(value, type) and value.__module__ == module.__name__]


def test_the_reference_has_no_private_names(inventory: set[str]) -> None:
    assert {name for name in inventory if "._" in name} == set()


def test_arguments_that_a_decorator_gives_are_in_the_reference(site: Path) -> None:
    text = (site / "api" / "spark_elastic.html").read_text()
    run = text.partition('id="spark_elastic.run"')[2].partition('id="spark_elastic.run_async"')[0]
    for name in ("fn", "num_proc", "elastic_timeout", "crash_limit"):
        assert f"<code>{name}</code>" in run


@pytest.mark.parametrize("name", ["ElasticTorchEstimator", "ElasticKerasEstimator"])
def test_every_setting_of_an_estimator_is_explained_in_the_reference(name: str, site: Path) -> None:
    import spark_elastic

    text = (site / "api" / "estimators.html").read_text()
    part = text.partition(f'id="spark_elastic.{name}"')[2].partition("</ul>")[0]
    cls = getattr(spark_elastic, name)
    settings = [each for each in dir(cls) if isinstance(getattr(cls, each), Param)]
    assert len(settings) > 30
    assert [each for each in settings if f"<code>{each}</code>" not in part] == []


# --- in a browser -----------------------------------------------------------------------------------------------------


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    program, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("needs chromium (or google-chrome) and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    profile = tmp_path_factory.mktemp("profile")
    for each in ("headless", "no-sandbox", "no-first-run", "window-size=1300,1000", f"user-data-dir={profile}"):
        options.add_argument(f"--{each}")
    for each in ("background-networking", "component-update", "sync", "gpu", "dev-shm-usage", "quic"):
        options.add_argument(f"--disable-{each}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(driver)) as started:
        yield started


def test_the_search_finds_a_setting_and_nothing_is_asked_of_other_servers(
    address: str, browser: webdriver.Chrome
) -> None:
    browser.get(address + "404.html")
    browser.get_log("performance")  # of the browser's own first page
    browser.get(address + "index.html")
    field = browser.find_element(By.CSS_SELECTOR, ".md-search__input")
    field.click()
    field.send_keys("heartbeat_timeout")
    WebDriverWait(browser, 60).until(lambda shown: shown.find_elements(By.CSS_SELECTOR, ".md-search-result__link"))
    found = browser.find_elements(By.CSS_SELECTOR, ".md-search-result__link")
    assert "elasticity.html" in " ".join(str(each.get_attribute("href")) for each in found)
    browser.get(address + "concepts.html")
    assert browser.find_element(By.CSS_SELECTOR, ".diagram svg").size["height"] > 100
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}
    assert address + "search/search_index.json" in asked
    assert {url for url in asked if re.match(r"https?:|wss?:", url) and not url.startswith(address)} == set()
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.parametrize("page", ["index", "benchmarks", "errors", "concepts", "api/estimators", "api/torch"])
def test_no_page_is_wider_than_a_telephone(page: str, address: str, browser: webdriver.Chrome) -> None:
    size = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(f"{address}{page}.html")
    assert browser.execute_script("return document.documentElement.scrollWidth") == 400

"""The description on a package index is README.md with absolute links; everything else is in pyproject.toml."""

import importlib.util
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def readme() -> str:
    """Return the description; README.md as it is where the files that it links to are missing, as in an image."""
    spec = importlib.util.spec_from_file_location("links", ROOT / "scripts" / "website" / "links.py")
    links = importlib.util.module_from_spec(spec)
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "spark_elastic" / "__init__.py").read_text(), re.MULTILINE)
    try:
        spec.loader.exec_module(links)
        return links.readme_for_an_index(found.group(1))
    except FileNotFoundError:
        return (ROOT / "README.md").read_text()


setup(long_description=readme(), long_description_content_type="text/markdown")

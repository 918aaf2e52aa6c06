"""The Java that Spark would start with on this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

from spark_elastic.errors import JavaNotFoundError

_JAVA = 17


def check_java() -> str:
    """Return the path of the `java` that Spark would use.

    Raises:
        JavaNotFoundError: There is none, or it is too old. The message has the command that installs one.
    """
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if home and not os.access(java or "", os.X_OK):
        raise _no_java(f"JAVA_HOME={home} has no bin/java; unset JAVA_HOME, or let it name a Java {_JAVA} or newer")
    if java is None:
        raise _no_java(f"Spark needs Java {_JAVA} or newer and there is no `java`")
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _no_java(f"{java} cannot be run ({error})") from None
    text = done.stderr + done.stdout
    if done.returncode != 0:  # without Java, macOS has a `java` that prints how to get one
        raise _no_java(f"{java} does not run: {text.strip()[:200]}")
    major = java_major_version(text)
    if major is not None and major < _JAVA:
        raise _no_java(f"{java} is Java {major} and {_JAVA} or newer is needed")
    return java


def java_major_version(said: str) -> int | None:
    """Return the major version in the output of `java -version` ("1.8.0_292" is 8), or None if there is none."""
    found = re.search(r'version "(\d+)(?:\.(\d+))?', said)
    if found is None:
        return None
    major = int(found.group(1))
    return int(found.group(2) or 0) if major == 1 else major


def _no_java(problem: str) -> JavaNotFoundError:
    mac = f"brew install openjdk@{_JAVA}"
    install = (
        f"On macOS: {mac}"
        if sys.platform == "darwin"
        else (
            f"On Debian and Ubuntu: sudo apt-get install -y openjdk-{_JAVA}-jre-headless; "
            f"on Fedora: sudo dnf install java-{_JAVA}-openjdk-headless; on macOS: {mac}"
        )
    )
    return JavaNotFoundError(f"{problem}. {install}")

"""Judge what workers report, with one planted fault at a time."""

import pytest

from spark_elastic.diagnostics.examination import judge_clocks, judge_driver, judge_versions
from spark_elastic.diagnostics.findings import OK, PROBLEM, WARNING, Finding, Report

PACKAGES = {"spark-elastic": "0.2.0", "torch": "2.13.0", "numpy": "2.1.0", "pyspark": "4.0.0"}
PACKAGES |= {"pandas": "2.3.3", "pyarrow": "25.0.1"}


def judged(python="3.11.7", **changes):
    there = {name: version for name, version in {**PACKAGES, **changes}.items() if version is not None}
    report = {"host": "three", "executable": "/usr/bin/python3", "python": python, "packages": there}
    return judge_versions("3.11.7", PACKAGES, [report])


@pytest.mark.parametrize(
    ("packages", "level", "fix"),
    [
        (PACKAGES, OK, ""),
        ({**PACKAGES, "torch": "2.5.1"}, PROBLEM, "torch>=2.6"),
        ({name: PACKAGES[name] for name in ("torch", "numpy", "pyspark")}, WARNING, "extra [spark]"),
        ({"torch": "2.13.0"}, PROBLEM, "extra [spark]"),
        ({**PACKAGES, "pandas": "2.1.4"}, OK, ""),
        ({**PACKAGES, "pandas": "2.1.4", "pyspark": "4.1.0"}, PROBLEM, "pandas>=2.2"),
    ],
)
def test_level_of_the_drivers_packages(packages, level, fix):
    found = judge_driver("3.11.7", packages)
    assert (found.level, fix in found.fix) == (level, True)


def test_level_of_a_version_difference_depends_on_the_package():
    assert judged().level == judged("3.11.9").level == OK
    assert judged(torch="2.6.0").level == judged(numpy=None).level == WARNING
    found = judged(**{"spark-elastic": "0.1.9"})
    assert (found.level, "spark-elastic is 0.1.9 on three and 0.2.0 here" in found.says) == (PROBLEM, True)


@pytest.mark.parametrize(
    ("clocks", "level"),
    [
        ([105.0, 105.01, 105.02], OK),
        ([105.0, 105.01, 108.0], WARNING),
        ([105.0, 105.01, 300.0], PROBLEM),
        ([90.0], WARNING),
        ([400.0, 400.0], PROBLEM),
    ],
)
def test_clocks_are_compared_with_one_another_and_with_the_time_of_the_job(clocks, level):
    assert judge_clocks({str(rank): at for rank, at in enumerate(clocks)}, 100.0, 110.0).level == level


def test_report_is_ok_without_problems_and_has_all_its_forms():
    fine = Finding("clocks", OK, "all are right")
    bad = Finding("storage", PROBLEM, "<cannot> be written", "let it")
    report = Report((fine, bad), 1.0)
    assert not report.ok
    assert Report((fine,), 1.0).ok
    assert "→ let it" in str(report)
    assert "&lt;cannot&gt;" in report._repr_html_()
    assert '"ok": false' in report.to_json()


def test_credentials_in_what_a_finding_says_are_redacted():
    found = Finding("storage", PROBLEM, "OSError: 403 for https://account/c?sig=hunter2")
    assert "hunter2" not in found.says

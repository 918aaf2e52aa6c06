from __future__ import annotations

import io

import pytest

from spark_elastic.driver.output import RankFiles


def test_a_line_whose_file_cannot_be_made_still_reaches_the_terminal(tmp_path):
    (tmp_path / "rank.0").write_text("in the way of the folder")
    terminal = io.StringIO()
    files = RankFiles(tmp_path, terminal)
    with pytest.raises(OSError):
        files.write("[0]<stdout>:hello\n")
    assert terminal.getvalue() == "[0]<stdout>:hello\n"

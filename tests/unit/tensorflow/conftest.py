import pytest

pytest.importorskip("tensorflow")

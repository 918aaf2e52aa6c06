"""Texts and settings without credentials: in logs, errors, trackers and saved files."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import pytest

from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError, UserFunctionError
from spark_elastic.redaction import redacted, without_secrets
from spark_elastic.reporting.event_log import MembershipChange

ADDRESSES = {
    "https://{secret}@host/x": "https://***@host/x",
    "http://me:{secret}@tracking:5000/x": "http://***@tracking:5000/x",
    "postgresql+psycopg2://u:{secret}/w@host:5432/db": "postgresql+psycopg2://***@host:5432/db",
    "https://u:{secret}@s/w:o@host/x?y=1": "https://***@host/x?y=1",
    "https://me@corp.com:{secret}?@host": "https://***@host",
    "https://user:12345@host/{secret}@x": "https://***@x",
    "s3://AKIA{secret}:a%2Fb@bucket/x": "s3://***@bucket/x",
    "abfss://c:{secret}@account/x": "abfss://***@account/x",
    "https://a.blob/c?sv=1&sig={secret}%2B&se=2": "https://a.blob/c?sv=1&sig=***&se=2",
    "https://h/x?token={secret}": "https://h/x?token=***",
    "https://h/x?Api_Key={secret}#a": "https://h/x?Api_Key=***#a",
    "https://h/x?key={secret}&client_secret={secret}": "https://h/x?key=***&client_secret=***",
    "https://h/#access_token={secret}": "https://h/#access_token=***",
    "https://h/x?X-Amz-Credential={secret}&X-Amz-Signature={secret}": (
        "https://h/x?X-Amz-Credential=***&X-Amz-Signature=***"
    ),
    "AccountName=x;AccountKey={secret}==;EndpointSuffix=y": "AccountName=x;AccountKey=***;EndpointSuffix=y",
    "SharedAccessSignature=sv=20&sig={secret}/=;x": "SharedAccessSignature=***&sig=***;x",
    "host=x password='{secret} b' dbname=y": "host=x password=*** dbname=y",
    "AWS_SECRET_ACCESS_KEY={secret}": "AWS_SECRET_ACCESS_KEY=***",
    '{{"token": "{secret}"}}': '{"token": ***}',
    '{{"token": "a\\"{secret}"}}': '{"token": ***}',
    "fs.s3a.secret.key={secret}": "fs.s3a.secret.key=***",
    "fs.azure.account.key.a.dfs.core.windows.net={secret}": "fs.azure.account.key.a.dfs.core.windows.net=***",
    "PASSWORD: {secret}": "PASSWORD: ***",
    "db_password:\t'{secret} x'": "db_password:\t***",
    "tool --password {secret} --user me": "tool --password *** --user me",
    "tool --db-api-key '{secret} x' y": "tool --db-api-key *** y",
    "jdbc:oracle:thin:scott/{secret}@host:1521:db": "jdbc:oracle:thin:***@host:1521:db",
    "jdbc:oracle:oci:scott/{secret}/x@y@//host/db": "jdbc:oracle:oci:***@//host/db",
    "Authorization: Bearer {secret}": "Authorization: Bearer ***",
    "{{'authorization': 'Basic {secret}='}}": "{'authorization': 'Basic ***'}",
    "a call of https://u:{secret}@h/api failed": "a call of https://***@h/api failed",
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_credentials_in_a_text_are_redacted(address: str) -> None:
    assert redacted(address.format(secret="hunter2")) == ADDRESSES[address]


@pytest.mark.parametrize(
    "text",
    [
        "sqlite:////data/a@b:c",
        "hdfs://namenode:8020/user/a@corp.com",
        "https://host/user@example.com?x=1&page=2",
        "abfss://container@account.dfs.core.windows.net/x",
        "TextVectorization(max_tokens=100)",
        "f(token_type_ids=False)",
        "/data/tokens/key",
        "forward(token=None)",
        "no Authorization header",
        "forward(token: str)",
        "jdbc:oracle:thin:@host:1521/db",
        "--password --user me",
        "spark_elastic: rank 0 on host-a lost (exit code 1)",
    ],
)
def test_text_without_credentials_stays_as_it_is(text: str) -> None:
    assert redacted(text) == text


def test_redaction_of_a_long_word_takes_linear_time() -> None:
    began = time.process_time()
    redacted("://" + "a" * 300_000 + "?" + "b" * 300_000)
    redacted("=" + "token." * 50_000)
    redacted("jdbc:oracle:a:" * 20_000)
    assert time.process_time() - began < 5


def test_errors_redact_their_message_and_keep_doing_so_when_they_travel() -> None:
    error = StoreError("https://u:hunter2@h/x cannot be read", url="x")
    raised = UserFunctionError(rank=0, host="h", error_type="OSError", error="s3://k:hunter2@b", traceback="")
    for each in (error, raised, pickle.loads(pickle.dumps(error))):
        assert "hunter2" not in f"{each} {each!r}"
        assert "://***@" in str(each)


def test_store_that_cannot_be_opened_is_named_without_its_password() -> None:
    with pytest.raises(StoreError) as caught:
        Store.create("no-such-scheme://u:hunter2@host/x?sig=hunter3")
    assert "hunter" not in str(caught.value)


def test_store_is_shown_without_credentials_and_opened_again_with_them() -> None:
    store = Store("s3://k:hunter2@bucket", "bucket", filesystem=object()).sub("runs")
    assert (store.url, store.address) == ("s3://***@bucket/runs", "s3://k:hunter2@bucket/runs")
    assert "hunter" not in f"{store} {store!r}"


def test_change_of_the_world_is_told_without_credentials() -> None:
    change = MembershipChange(0.0, "lost", "rank 0", "OSError: s3://k:hunter2@b", 2, 1)
    assert "hunter" not in f"{change} {change!r}"


@pytest.mark.parametrize(
    ("name", "value", "kept", "left_out"),
    [
        ("storage_options", {"key": "a"}, None, ["storage_options"]),
        ("store", "s3://k:s@b", None, ["store"]),
        ("store", "s3://b", "s3://b", []),
        ("checkpoint_dir", Path("https:/x?sig=a"), None, ["checkpoint_dir"]),
        (
            "run_options",
            {"env": {"A": "b"}, "output_dir": "https://h/x?sig=a", "token": "a", "start_timeout": 5},
            {"start_timeout": 5},
            ["run_options['env']", "run_options['output_dir']", "run_options['token']"],
        ),
        ("input_dtypes", {"env": "int64", "token": "int64"}, {"env": "int64", "token": "int64"}, []),
    ],
)
def test_settings_are_saved_without_credentials(name: str, value: Any, kept: Any, left_out: list[str]) -> None:
    assert without_secrets(name, value) == (kept, left_out)

"""Who is logged in, and where: what is wrong with a login is told in a sentence, and one region counts."""

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fastlaunch.aws.client import Aws
from fastlaunch.cli.main import run
from fastlaunch.core.errors import (
    EXIT_USAGE,
    BadConfiguration,
    CloudRefused,
    NotAuthorised,
    TlsFailed,
    UserError,
)
from fastlaunch.core.settings import load_settings
from fastlaunch.lifecycle.world import World

ROLE = "role_arn = arn:aws:iam::123456789012:role/trainer\n"
KEYS = "aws_access_key_id = AKIAEXAMPLE\naws_secret_access_key = example\n"


@pytest.fixture
def name_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write the text as the profile `work`, beside others, and name it."""

    def write(text: str) -> None:
        path = tmp_path / "aws-config"
        others = f"[sso-session work]\nregion = sa-east-1\n[profile keys]\n{KEYS}"
        path.write_text(f"{others}[profile work]\n{text}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(path))
        monkeypatch.setenv("AWS_PROFILE", "work")

    return write


@pytest.mark.parametrize(
    ("profile", "kind", "words"),
    [
        ("credential_process = /no/such/program", NotAuthorised, "/no/such/program"),
        ("credential_process = /dev/null", NotAuthorised, "/dev/null"),
        ("credential_process = /bin/echo no json", NotAuthorised, "JSON"),
        ("credential_process = /bin/sh -c 'echo why >&2; exit 3'", NotAuthorised, "why"),
        ("credential_process = /bin/sh -c 'echo", NotAuthorised, "quotation"),
        ("credential_process = sleep 60", NotAuthorised, "within"),
        (f"{ROLE}source_profile = keys\nmfa_serial = arn:aws:iam::123456789012:mfa/me", NotAuthorised, "MFA"),
        (f"{ROLE}web_identity_token_file = /no/such/token", NotAuthorised, "/no/such/token"),
        (f"{ROLE}source_profile = work", BadConfiguration, "loop"),
        ("aws_access_key_id = AKIAEXAMPLE", NotAuthorised, "aws_secret_access_key"),
        ("sso_session = work\nsso_account_id = 123456789012", BadConfiguration, "sso_"),
        (f"{KEYS}endpoint_url = not a url", BadConfiguration, "not a url"),
        (f"{KEYS}endpoint_url = http://127.0.0.1:99999", BadConfiguration, "Port"),
        (f"{KEYS}region = not a region", BadConfiguration, "not a region"),
        ("[profile work]\n", BadConfiguration, "aws-config"),
        ("no assignment", BadConfiguration, "aws-config"),
    ],
)
def test_what_is_wrong_with_a_login_is_told_and_no_bug(
    name_profile: Callable[[str], None], profile: str, kind: type[CloudRefused], words: str
) -> None:
    name_profile(profile)
    with pytest.raises(CloudRefused) as raised:
        Aws(attempts=1, login_timeout_s=0.3 if "sleep" in profile else 60).identity()
    assert isinstance(raised.value, kind) and raised.value.exit_code == 3
    assert words in raised.value.message and "\n" not in raised.value.message and raised.value.hint


def test_the_login_that_failed_is_named(
    name_profile: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    name_profile("credential_process = /no/such/program")
    assert run(["reap", "--region", "us-east-1", "--dry-run"]) == 3
    error = capsys.readouterr().err
    assert "profile 'work'" in error and "Traceback" not in error


def test_a_login_that_ends_is_made_anew_before_the_next_call(
    name_profile: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "login"
    ended = '{"Version":1,"AccessKeyId":"a","SecretAccessKey":"b","SessionToken":"c","Expiration":"%s"}'
    program.write_text(f"#!/bin/sh\necho '{ended % '2999-01-01T00:00:00Z'}'\n")
    program.chmod(0o755)
    name_profile(f"credential_process = {program}")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    aws = Aws(attempts=1)
    with pytest.raises(CloudRefused, match="no answer"):
        aws.identity()
    program.unlink()
    aws._credentials._expiry_time = aws._credentials._expiry_time.replace(year=2000)
    with pytest.raises(NotAuthorised, match=str(program)):
        aws.identity()


@pytest.fixture
def plain_server() -> Iterator[tuple[str, list[int]]]:
    """The address of a server that knows no TLS, and its connections, in a list."""
    connections: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, (_, port) = server.accept()
                except OSError:
                    return
                with connection:
                    connections.append(port)
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        yield f"https://127.0.0.1:{server.getsockname()[1]}", connections


def test_where_tls_fails_nothing_is_asked_again(
    plain_server: tuple[str, list[int]], name_profile: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, connections = plain_server
    name_profile(KEYS)
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    slept_s: list[float] = []
    with pytest.raises(TlsFailed) as raised:
        Aws(sleep=slept_s.append).identity()
    assert "AWS_CA_BUNDLE" in (raised.value.hint or "")
    assert len(connections) == 1 and slept_s == []


# The region


@pytest.mark.parametrize(
    ("config", "variables", "profile", "region", "source"),
    [
        ("", {}, "", "us-east-1", ""),
        ("", {}, "region = eu-central-1", "eu-central-1", "profile 'work'"),
        ("", {"AWS_DEFAULT_REGION": "eu-west-2"}, "region = eu-central-1", "eu-west-2", "AWS_DEFAULT_REGION"),
        (
            "",
            {"AWS_REGION": "eu-west-1", "AWS_DEFAULT_REGION": "eu-west-2"},
            "region = eu-central-1",
            *("eu-west-1", "AWS_REGION"),
        ),
        ("", {"AWS_REGION": ""}, "region = eu-central-1", "eu-central-1", "profile 'work'"),
        ("region: us-west-2", {"AWS_REGION": "eu-west-1"}, "region = eu-central-1", "us-west-2", None),
        ("", {}, "no assignment", "us-east-1", ""),
    ],
)
def test_one_region_counts_and_what_names_it_is_said_once(
    isolated: Path,
    name_profile: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    variables: dict[str, str],
    profile: str,
    region: str,
    source: str | None,
) -> None:
    (isolated.parent / "config.yaml").write_text(config)
    name_profile(profile)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    told: list[str] = []
    context = World(settings=load_settings(), backends={}, report=told.append)
    assert context.settings.region_from == source
    # Of prices alone, the default goes without saying.
    assert context.own_region(of_prices=True) == region and len(told) == bool(source)
    assert context.own_region() == replace(context, argv=("x",)).own_region() == region
    assert len(told) == (source is not None)
    assert all(region in line and (source or "") in line for line in told)


def test_a_region_of_the_environment_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "Ireland")
    context = World(settings=load_settings(), backends={})
    with pytest.raises(UserError, match="'Ireland', of AWS_REGION") as raised:
        context.own_region()
    assert raised.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    "argv",
    [
        ("submit", "--instance", "p5.48xlarge", "--recipe", "bf16", "--dry-run"),
        ("sweep", "--instance", "p5.48xlarge", "--recipe", "bf16", "--dry-run"),
        ("estimate", "--workload", "vit-huge", "--instance", "p5.48xlarge", "--samples", "1M"),
        ("prices", "--instance", "p5.48xlarge"),
    ],
)
def test_where_a_price_is_not_known_no_other_regions_is_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]
) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert run([*argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("region eu-west-1: AWS_REGION") and "price" in err.splitlines()[1]

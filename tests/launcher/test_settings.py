"""Settings: what the environment and the config file say, and what is told where they are wrong."""

import re
from pathlib import Path

import pytest

from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.core.settings import RegionSettings, Settings, load_settings
from fastlaunch.core.units import DEFAULT_REGION

#: A key that machines in us-east-1 cannot use.
ELSEWHERE = "arn:aws:kms:eu-west-1:123456789012:key/0a"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The config file that FASTLAUNCH_CONFIG names; not there yet."""
    path = tmp_path / "config.yaml"
    monkeypatch.setenv("FASTLAUNCH_CONFIG", str(path))
    return path


def test_an_empty_config_file_gives_the_defaults(isolated: Path, config: Path) -> None:
    for text in ("", "\n", "# nothing\n", "{}"):
        config.write_text(text)
        assert load_settings() == Settings(home=isolated, prices=None, region=DEFAULT_REGION)


def test_the_platforms_folders_are_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLAUNCH_HOME", "")
    monkeypatch.delenv("FASTLAUNCH_CONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    settings = load_settings()
    assert settings == Settings(home=settings.home)
    assert settings.home.is_relative_to(tmp_path)
    assert "fastlaunch" in settings.home.name
    assert not settings.home.exists()


def test_a_relative_path_is_beside_the_config_file_and_others_stay_what_they_are(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.setenv("FASTLAUNCH_HOME", "~/runs")
    for written, path in (
        ("own/prices.yaml", config.parent / "own" / "prices.yaml"),
        ("~/prices.yaml", tmp_path / "me" / "prices.yaml"),
        ("/srv/prices.yaml", Path("/srv/prices.yaml")),
    ):
        config.write_text(f"prices: {written}\nregion: eu-west-1\n")
        settings = load_settings()
        assert (settings.prices, settings.region) == (path, "eu-west-1")
        assert settings.home == tmp_path / "me" / "runs"


def test_what_jobs_use_in_a_region_is_read(config: Path) -> None:
    config.write_text(
        """
        discount: 0.12
        tags: {team: vision, "cost-center": "4711"}
        aws:
          us-east-1:
            bucket: acme-training
            prefix: /teams/vision/
            instance_profile: fastlaunch-node
            security_groups: [sg-0123, sg-4567]
            subnets: {us-east-1b: subnet-0b, us-east-1a: subnet-0a}
            placement_groups: {us-east-1a: cluster-a}
            ami_parameter: /ours/ami
            repository: training
            volume_kms_key: arn:aws:kms:us-east-1:123456789012:key/mrk-0a1b
            output_kms_key: arn:aws:kms:us-east-1:123456789012:key/0c2d
            sagemaker_subnets: [subnet-0c]
            sagemaker_security_groups: [sg-89ab]
            encrypt_between_containers: true
          eu-west-1:
        """
    )
    settings = load_settings()
    assert settings.discount == 0.12
    assert settings.tags == {"team": "vision", "cost-center": "4711"}
    assert settings.aws == {
        "us-east-1": RegionSettings(
            bucket="acme-training",
            prefix="teams/vision",
            instance_profile="fastlaunch-node",
            security_groups=("sg-0123", "sg-4567"),
            subnets={"us-east-1b": "subnet-0b", "us-east-1a": "subnet-0a"},
            placement_groups={"us-east-1a": "cluster-a"},
            ami_parameter="/ours/ami",
            repository="training",
            volume_kms_key="arn:aws:kms:us-east-1:123456789012:key/mrk-0a1b",
            output_kms_key="arn:aws:kms:us-east-1:123456789012:key/0c2d",
            sagemaker_subnets=("subnet-0c",),
            sagemaker_security_groups=("sg-89ab",),
            encrypt_between_containers=True,
        ),
        "eu-west-1": RegionSettings(),
    }
    # Zones are tried as they are written.
    assert list(settings.aws["us-east-1"].subnets) == ["us-east-1b", "us-east-1a"]


def test_text_is_what_stands_there(config: Path) -> None:
    config.write_text("tags: {cost-center: 0123, since: 2026-11-26, on: no}\nmax_cost: 50\nregion: us-east-1")
    assert load_settings().tags == {"cost-center": "0123", "since": "2026-11-26", "on": "no"}
    assert load_settings().max_cost == 50.0


def test_without_aws_settings_there_is_no_region_and_no_discount(config: Path) -> None:
    for text in ("region: us-west-2", "aws:", "aws: {}"):
        config.write_text(text)
        assert (load_settings().aws, load_settings().discount) == ({}, 0)
    config.write_text("aws: {us-east-1: {prefix: /}}")
    assert load_settings().aws["us-east-1"].prefix == "", "the top of the bucket"


def test_a_config_file_that_is_named_must_exist(config: Path) -> None:
    with pytest.raises(BadFile, match="does not exist") as caught:
        load_settings()
    assert caught.value.hint is not None and "make an empty file" in caught.value.hint
    assert load_settings(config_may_lack=True).aws == {}


def test_an_unknown_user_is_the_users_error(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.touch()
    monkeypatch.setenv("FASTLAUNCH_HOME", "~no-such-user/runs")
    with pytest.raises(UserError, match="names no folder"):
        load_settings()


@pytest.mark.parametrize(
    ("text", "problem", "line"),
    [
        ("region: a\nregion: b: c\n", "is not YAML", 2),
        ("reigon: us-east-1", "unknown field `reigon`", 1),
        ("- region", "not `name: value` pairs", 1),
        ("region: [us-east-1]", "region is a list, not text", 1),
        ("max_cost: 1:00", "max_cost is '1:00', not a number", 1),
        ("prices: ''", "prices is empty", 1),
        ("discount: 12%", "discount is '12%'", 1),
        ("region: r\ndiscount: 1", "discount is 1", 2),
        ("max_cost: 0", "max_cost is 0", 1),
        ("budgets:\n  owner_day: 0", "owner_day is 0", 2),
        ("budgets:\n  week: 5", "has an unknown field `week`", 2),
        ("max_price_age: soon", "max_price_age: 'soon' is not a duration", 1),
        ("rates:\n  p5: {}", "needs one of", 2),
        ("rates:\n  p5: {sunk: true, discount: 0.1}", "needs one of", 2),
        ("rates:\n  p5: {usd_per_hour: 3}", "for a whole family", 2),
        ("aws: us-east-1", "not `name: value` pairs", 1),
        ("aws: {us-east: {bucket: acme}}", "'us-east', which is not the name of a region", 1),
        ("aws:\n  us-east-1:\n    bukcet: acme", "unknown field `bukcet`", 3),
        # What no region can have, said before AWS is asked.
        ("aws: {us-east-1: {bucket: 's3://acme/x'}}", "a name without s3://", 1),
        ("aws: {us-east-1: {prefix: $(reboot)}}", "it takes letters, digits", 1),
        ("aws: {us-east-1: {security_groups: [default]}}", "an id such as sg-0a1b2c", 1),
        ("aws: {us-east-1: {subnets: {us-west-2a: subnet-1}}}", "'us-west-2a', not a zone of us-east-1", 1),
        ("aws: {us-east-1: {subnets: {us-east-1: subnet-1}}}", "'us-east-1', not a zone of us-east-1", 1),
        ("aws: {us-east-1: {subnets: {us-east-1a: vpc-1}}}", "'vpc-1' for us-east-1a, not an id", 1),
        ("aws: {us-east-1: {sagemaker_subnets: [subnet-1]}}", "needs `sagemaker_security_groups`", 1),
        ("aws: {us-east-1: {sagemaker_security_groups: [sg-1]}}", "needs `sagemaker_subnets`", 1),
        ("aws: {us-east-1: {sagemaker_subnets: [a]}}", "`sagemaker_subnets` has 'a'", 1),
        ("aws: {us-east-1: {volume_kms_key: alias/ours}}", "the ARN of a key in us-east-1", 1),
        (f"aws: {{us-east-1: {{output_kms_key: '{ELSEWHERE}'}}}}", "the ARN of a key in us-east-1", 1),
        ("region: r\ntags: {team: [1]}", "team is a list, not text", 2),
        ("region: r\ntags: {'aws:team': x}", "begins with aws:", 2),
    ],
)
def test_a_wrong_config_file_is_named(config: Path, text: str, problem: str, line: int | None) -> None:
    config.write_text(text)
    with pytest.raises(BadFile, match=re.escape(problem)) as caught:
        load_settings()
    assert str(config) in caught.value.message
    assert caught.value.line == line

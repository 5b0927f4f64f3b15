"""docs/setup.md: the policies that it shows are those of the data, and its config file is one."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fastlaunch.account.policies import documents, names_by_hand, statements
from fastlaunch.core.paths import shipped
from fastlaunch.core.settings import load_settings

TEXT = shipped("docs/setup.md").read_text(encoding="utf-8")
NAMES = names_by_hand(account="ACCOUNT", bucket="BUCKET")
DOCUMENTS = documents(NAMES)


def document(name: str) -> Any:
    """The document that the text gives under this file name."""
    match = re.search(rf"`{re.escape(name)}`:\n\n```json\n(.*?)```", TEXT, re.DOTALL)
    assert match, f"there is no {name}"
    return json.loads(match[1])


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_of_the_text_is_the_datas(name: str) -> None:
    assert document(name) == DOCUMENTS[name]
    # What makes it by hand prints it first.
    assert name.removesuffix(".json") in TEXT.partition("for file in ")[2].partition("; do")[0]


def test_the_text_shows_nothing_else_and_says_what_every_statement_is_for() -> None:
    assert len(re.findall(r"```json", TEXT)) == len(DOCUMENTS)
    rows = dict(
        re.findall(r"^\| `(\w+)` \| (.*) \|$", TEXT.partition("launcher-policy.json`:")[2], re.MULTILINE)
    )
    assert rows == {one["Sid"]: one["Why"] for one in statements("launcher", NAMES)}


def test_the_config_file_of_the_text_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.search(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    assert found
    path = tmp_path / "config.yaml"
    path.write_text(found[1])
    monkeypatch.setenv("FASTLAUNCH_CONFIG", str(path))
    settings = load_settings()
    here = settings.aws["us-east-1"]
    assert settings.region == "us-east-1"
    assert here.bucket == "acme-training" and list(here.subnets) == ["us-east-1a", "us-east-1b"]
    assert list(here.placement_groups) == list(here.subnets)
    assert (here.role, here.scheduler_role) == tuple(
        role.replace("ACCOUNT", "123456789012") for role in (NAMES.training_role, NAMES.scheduler_role)
    )

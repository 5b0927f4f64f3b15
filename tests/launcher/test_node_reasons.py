"""What a node's short reasons become for the user."""

import re
from importlib.resources import files

import pytest

from fastlaunch.backends.node_report import in_words
from fastlaunch_train.node.protocol import BLOCK

FILES = ("agent.py", "ec2.py", "peers.py")


def test_everything_that_a_node_cannot_do_is_told_in_words() -> None:
    """Read in the agent's code: a reason that is added there needs words here."""
    code = "".join((files("fastlaunch_train") / "node" / name).read_text() for name in FILES)
    # Given at once, after some tries, and after a run that has failed.
    reasons = set(
        re.findall(r'fail\("([a-z0-9 ]+)"\)|, "([a-z0-9 ]+)", \d+, \d+|return "([a-z ]+)"$', code, re.M)
    )
    reasons = {next(filter(None, found)) for found in reasons} | {BLOCK}
    reasons |= set(re.findall(r'self\._try\(\d+, \d+, [\w.]+, "([a-z0-9 ]+)"\)', code))
    assert {"peers", "rank 0", "image pull", "driver", "fabric manager", "disk full"} <= reasons
    assert [reason for reason in reasons if len(in_words(reason)) < len(reason) + 20] == []


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("fabric", "--allow-tcp"),
        ("peers", "not all of its nodes came up"),
        ("container: exit code 125", "could not run its program (exit code 125"),
        ("checkpoint of 20261121-090312-k3f9", "the checkpoint of run 20261121-090312-k3f9"),
        ("disk full", "local NVMe"),
    ],
)
def test_a_reason_says_what_to_do(reason: str, words: str) -> None:
    assert words in in_words(reason)


def test_what_is_not_known_is_told_as_it_is() -> None:
    assert in_words("no GPU") == "no GPU"

"""Which part of a log tells why a job failed."""

from pathlib import Path

from fastlaunch.core.log_file import LOG, last_words, telling_lines

TORCHRUN = (
    "E1121 09:43:53.750000 10848 torch/distributed/elastic/multiprocessing/api.py:1002] failed\n"
    "Traceback (most recent call last):\n"
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    "=====\n"
)


def test_what_torchrun_adds_is_left_out(tmp_path: Path) -> None:
    (tmp_path / LOG).write_text("step 1\nerror: no GPU\n  try bf16\n" + TORCHRUN)
    assert telling_lines(tmp_path, num_lines=2) == ["error: no GPU", "  try bf16"]
    assert last_words(tmp_path) == "error: no GPU"


def test_an_older_torchrun_is_left_out_too(tmp_path: Path) -> None:
    older = "[2023-11-02 14:17:31,123] torch.distributed.elastic.multiprocessing.api: [ERROR] failed\n====\n"
    (tmp_path / LOG).write_text("ValueError: x\n" + older)
    assert last_words(tmp_path) == "ValueError: x"


def test_torchrun_alone_is_shown(tmp_path: Path) -> None:
    (tmp_path / LOG).write_text(TORCHRUN)
    assert telling_lines(tmp_path, num_lines=1) == ["====="]


def test_last_lines_of_a_large_or_odd_log(tmp_path: Path) -> None:
    (tmp_path / LOG).write_bytes(b"x" * 1_000_000 + b"\n\xff\xfe\nValueError: the end\n\n    \n")
    assert last_words(tmp_path) == "ValueError: the end"
    assert len(telling_lines(tmp_path, num_lines=20)) <= 20


def test_without_a_log_there_is_nothing_to_tell(tmp_path: Path) -> None:
    assert telling_lines(tmp_path, num_lines=20) == []
    assert last_words(tmp_path) is None

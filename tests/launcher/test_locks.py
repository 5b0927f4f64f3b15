"""A lock that tells whether a process lives."""

import threading
from pathlib import Path

from fastlaunch.core import locks


def test_a_lock_that_was_waited_for_is_seen_by_others(tmp_path: Path) -> None:
    path, seen = tmp_path / "a.lock", []

    def wait() -> None:
        with locks.held(path):
            seen.append(locks.is_held(path))

    with locks.held(path):
        waiting = threading.Thread(target=wait)
        waiting.start()
        # It waits for the file that is removed in the end.
        waiting.join(0.2)
        assert waiting.is_alive()
    waiting.join(10)
    assert seen == [True]
    assert not locks.is_held(path)

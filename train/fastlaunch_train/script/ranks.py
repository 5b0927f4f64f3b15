"""Where the ranks of a script meet: in the store of torch.distributed, not in its collectives.

A script's ranks may not all record: some scripts call us on rank 0 alone. A collective would wait for ever
for the others, and stand among the script's own; the store has a time-out for each wait.
"""

import datetime
import json
import logging
import sys
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("fastlaunch_train")

#: How long the first meeting waits, after a step that all ranks did, and any later one.
FIRST_WAIT = datetime.timedelta(seconds=60)
LATER_WAIT = datetime.timedelta(minutes=10)


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What all ranks do until they meet again."""

    block_end: int  # the step at which that is
    stop: bool = False  # a rank was asked to stop
    checkpoint: bool = False


class Meeting:
    """The ranks of one script; alone without torch.distributed, or once another rank did not come."""

    def __init__(self) -> None:
        self._number = 0
        self._apart = False
        self.warning: str | None = None

    def agree(self, proposal: Agreed) -> Agreed:
        """Return once every rank has called it, with the last one's proposal; a stop of one is of all."""
        distributed = sys.modules.get("torch.distributed")
        if (
            self._apart
            or distributed is None
            or not distributed.is_available()
            or not distributed.is_initialized()
            or distributed.get_world_size() == 1
        ):
            return proposal
        self._number += 1
        try:
            return self._meet(distributed, proposal)
        except Exception as error:  # A time-out is a RuntimeError or DistStoreError, by torch's version.
            self._apart = True
            self.warning = (
                "the ranks are not synchronised at blocks: not all of them call fastlaunch_train "
                f"at every step ({type(error).__name__})"
            )
            log.warning("warning: %s", self.warning)
            return proposal

    def _meet(self, distributed: Any, proposal: Agreed) -> Agreed:
        store = distributed.distributed_c10d._get_default_store()
        place = f"fastlaunch/{self._number}"
        store.add(f"{place}/stop", int(proposal.stop))
        store.add(f"{place}/checkpoint", int(proposal.checkpoint))
        if store.add(f"{place}/here", 1) == distributed.get_world_size():
            agreed = Agreed(
                block_end=proposal.block_end,
                stop=store.add(f"{place}/stop", 0) > 0,
                checkpoint=store.add(f"{place}/checkpoint", 0) > 0,
            )
            store.set(f"{place}/go", json.dumps(vars(agreed)))
            # Whoever is here has read what the last meeting agreed.
            for key in ("stop", "checkpoint", "here", "go"):
                store.delete_key(f"fastlaunch/{self._number - 1}/{key}")
            return agreed
        store.wait([f"{place}/go"], FIRST_WAIT if self._number == 1 else LATER_WAIT)
        return Agreed(**json.loads(store.get(f"{place}/go")))

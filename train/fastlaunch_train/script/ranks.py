"""Let the ranks of a script agree through the store of torch.distributed, without its collectives.

No rank waits for another. The first rank at a meeting decides for all, and the others read the decision when
they come. So a rank that leaves its loop early, evaluates alone, or never calls us costs the others nothing,
and no wait of ours is part of a step's time. Ranks that the script's own collectives hold together come to a
meeting after the same step, whichever is first.
"""

import json
import logging
import sys
from dataclasses import dataclass, replace
from typing import Any

log = logging.getLogger("fastlaunch_train")

#: Number of decisions to keep for late ranks, and by which a late rank may lag behind a stop.
KEPT, KEPT_BEFORE_STOP = 3600, 10
#: Each rank that was asked to stop adds this to the counter of meetings.
_STOP = 2**40


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """The decision that holds for all ranks until they meet again."""

    num_steps: int  # of the block that begins
    block_end: int  # the step at which it ends
    stop: bool = False  # a rank was asked to stop
    checkpoint: bool = False


class Meeting:
    """The ranks of one script; alone without torch.distributed, or once its store has failed."""

    def __init__(self) -> None:
        self._number = 0  # of the last meeting, also over several process groups
        self._has_told_stop = False
        self.warning: str | None = None

    def agree(self, proposal: Agreed) -> Agreed:
        """Return the proposal of the first rank at this meeting. A stop of one rank stops all at the next.

        They meet after the same step, unless they have done different numbers of steps.
        """
        distributed = sys.modules.get("torch.distributed")
        if (
            self.warning
            or distributed is None
            or not distributed.is_available()
            or not distributed.is_initialized()
            or distributed.get_world_size() == 1
        ):
            return proposal
        try:
            store = distributed.distributed_c10d._get_default_store()
            return self.meet(store, distributed.get_rank(), proposal)
        except Exception as error:  # the error depends on the kind of store and torch's version
            self.warning = f"the ranks do not stop and save together: their store failed ({error})"
            log.warning("warning: %s", self.warning)
            return proposal

    def meet(self, store: Any, rank: int, proposal: Agreed) -> Agreed:
        """Return the decision for this rank. store: like torch.distributed.Store."""
        is_news = proposal.stop and not self._has_told_stop
        self._has_told_stop = self._has_told_stop or proposal.stop
        num_stops, num_held = divmod(store.add("fastlaunch/held", _STOP if is_news else 0), _STOP)
        self._number += 1
        if num_held - self._number > (KEPT_BEFORE_STOP if num_stops else KEPT):
            self._number = num_held
        stop = proposal.stop or num_stops > 0
        entry = json.dumps({**vars(replace(proposal, stop=stop)), "rank": rank})
        agreed = json.loads(store.compare_set(f"fastlaunch/{self._number}", "", entry))
        if agreed.pop("rank") == rank:
            store.add("fastlaunch/held", 1)
            if self._number > 2 * KEPT:  # no rank reads it any more
                store.delete_key(f"fastlaunch/{self._number - 2 * KEPT}")
        last = proposal.block_end - proposal.num_steps
        if not last < agreed["block_end"] <= last + agreed["num_steps"]:
            agreed["block_end"] = last + agreed["num_steps"]
        return Agreed(**agreed)

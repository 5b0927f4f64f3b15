"""What became of a run on one host, by what all hosts say of it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from fastlaunch_train.records.records import is_echo


@dataclass(frozen=True, kw_only=True)
class Word:
    """What a host says of a run that has ended there.

    code: exit code of its training. cause: why it failed, "" if that is not known. is_stopped: the host was
    asked to stop. is_made_to: it ended its training because another's had ended badly. ends: it does no more
    runs.
    """

    code: int
    cause: str = ""
    is_stopped: bool = False
    is_made_to: bool = False
    ends: bool = False


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """state: completed, interrupted or failed. blamed: rank of the host at fault, None if none is.

    is_final: the run is not to be done again by a later container of the same job.
    """

    state: str
    blamed: int | None = None
    is_final: bool = True


def verdict(rank: int, words: Mapping[int, Word], *, is_one_lost: bool) -> Verdict:
    """What became of the run on host `rank`. words: by rank, of all that are not lost.

    A host that ended in the wake of another's end is interrupted; the other one says why.
    """
    own = words[rank]
    is_stopped = any(word.is_stopped for word in words.values())
    is_final = not (is_stopped or is_one_lost)
    if own.code == 0:
        return Verdict(state="completed", is_final=is_final)
    if is_stopped:
        return Verdict(state="interrupted", is_final=is_final)
    guilty = [at for at, word in sorted(words.items()) if word.code and not word.is_made_to]
    plain = [at for at in guilty if words[at].cause and not is_echo(words[at].cause)]
    is_follower = own.is_made_to or is_one_lost or (is_echo(own.cause) and bool(plain))
    if is_follower:
        blamed = next((at for at in (*plain, *guilty) if at != rank), None)
        return Verdict(state="interrupted", blamed=blamed, is_final=is_final)
    return Verdict(state="failed", blamed=rank, is_final=is_final)

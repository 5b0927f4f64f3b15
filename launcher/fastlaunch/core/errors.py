"""Exceptions for problems that the user can fix. Any other exception is a bug and shows a traceback.

UserError                exit 2   the request cannot be carried out as it stands
  UnknownName            exit 2   a recipe, workload, instance, run, ... that does not exist
  BadFile                exit 2   a file of the user's is damaged, foreign or unreadable
CloudRefused             exit 3   AWS refused, or had no capacity
  QuotaExceeded          exit 3   the account may not run that much; no zone of the region helps
  NoCapacity             exit 3   nothing is free there now; another zone, region or type may have it
  NotAuthorised          exit 3   no credentials, expired ones, or ones without the necessary right
  BadConfiguration       exit 3   something named in the request does not exist or does not fit
  Throttled              exit 3   too many requests; nothing was done, and the request may be sent again
  Unreachable            exit 3   no answer; the request may have been carried out
    TlsFailed            exit 3   no encrypted connection; an immediate retry does not help
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

from fastlaunch.core.terminal import printable

EXIT_DONE = 0
EXIT_JOB_FAILED = 1
EXIT_USAGE = 2
EXIT_CLOUD_REFUSED = 3
EXIT_BUG = 70
EXIT_INTERRUPTED = 130


class UserError(Exception):
    """What happened (`message`) and what to type or change (`hint`)."""

    exit_code = EXIT_USAGE

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            # Python shows the note under the traceback of an uncaught error.
            self.add_note(hint)


#: The most names to list beside near ones: more hide these.
_MOST_LISTED = 24


class UnknownName(UserError):
    """A name that does not exist, with the nearest existing names and a list of all, unless they are many.

    synonyms: from other tools' names to ours, which is then suggested.
    listed_by: the command that lists the names, to type instead if they are many.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        known: Iterable[str],
        hint: str | None = None,
        *,
        synonyms: Mapping[str, str] | None = None,
        listed_by: str | None = None,
    ) -> None:
        # Its import takes a tenth of the time of `--help`.
        from difflib import get_close_matches

        names = sorted(set(known))
        meant = (synonyms or {}).get(name)
        near = [meant] if meant else get_close_matches(name, names, n=3, cutoff=0.5)
        suggestion = f"did you mean {' or '.join(near)}?" if near else ""
        listing = f"known: {', '.join(map(printable, names))}" if names else f"there is no {kind} yet"
        if len(names) > _MOST_LISTED and (near or listed_by):
            listing = "" if near else f"`{listed_by}` lists them"
        super().__init__(f"unknown {kind} {name!r}", hint or f"{suggestion} {listing}".strip())
        self.name = name


class BadFile(UserError):
    """A file that cannot be used, with the line (and column) at fault if it is known."""

    def __init__(
        self, path: "Path | str", problem: str, *, line: int | None = None, hint: str | None = None
    ) -> None:
        where = f"{path}:{line}" if line is not None else f"{path}"
        super().__init__(printable(f"{where}: {problem}"), hint)
        self.path = path
        self.problem = problem
        self.line = line


class CloudRefused(UserError):
    """AWS refused the request, or had no capacity for it.

    code: AWS's own name of the error, such as `InsufficientInstanceCapacity`; None where there is none.
    """

    exit_code = EXIT_CLOUD_REFUSED
    code: str | None = None


class QuotaExceeded(CloudRefused):
    """The account's quota is used up. Another zone never helps; another region or a quota increase may."""


class NoCapacity(CloudRefused):
    """AWS has no such instance free there now."""


class NotAuthorised(CloudRefused):
    """There are no credentials, they have expired, or they lack a right."""


class BadConfiguration(CloudRefused):
    """Something that the request names does not exist, or does not fit the rest."""


class Throttled(CloudRefused):
    """Too many requests: nothing was done, and the same request may be sent again."""


class Unreachable(CloudRefused):
    """AWS did not answer and may have carried out the request. Sending it again with its token is safe."""


class TlsFailed(Unreachable):
    """The encrypted connection failed: a certificate or proxy is wrong. An immediate retry is useless."""

"""The training code in a bucket, as plans name it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CodeBundle:
    """The training code as an object in the run bucket. key: whole. sha256: of the object's bytes, in hex.

    commit: of the checkout it was made from, None if that is not known.
    """

    key: str
    sha256: str
    commit: str | None = None

    @classmethod
    def under(cls, prefix: str, *, sha256: str, commit: str | None) -> "CodeBundle":
        """The bundle at its place under a bucket's prefix, where it is stored once for all runs."""
        key = "/".join(filter(None, (prefix, "code", f"{sha256}.tar.gz")))
        return cls(key=key, sha256=sha256, commit=commit)

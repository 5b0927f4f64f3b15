"""A session with AWS: one boto3 client per service and region, retries, and errors by their meaning.

This is the only module that imports boto3. It obeys `AWS_ENDPOINT_URL`.
"""

import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from getpass import getpass
from threading import RLock, Thread
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastlaunch.aws.errors import ApiCall, no_answer, no_client, no_login, refusal, unanswered
from fastlaunch.aws.types import Identity
from fastlaunch.core.activity import note_wait
from fastlaunch.core.errors import (
    BadConfiguration,
    CloudRefused,
    NotAuthorised,
    Throttled,
    TlsFailed,
    Unreachable,
)
from fastlaunch.core.settings import login_region

#: Pause before the second try; it doubles from try to try, up to the maximum.
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 20.0

#: EC2 answers RunInstances within seconds; a busy region takes longer.
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60

T = TypeVar("T")


class AwsSession:
    """AWS in every region, through boto3's usual chain of credentials.

    Every method raises a kind of CloudRefused. If nothing exists, it returns None or an empty value where its
    return type allows that; else it raises BadConfiguration. We repeat calls that were throttled or not
    answered; botocore itself repeats nothing.
    """

    def __init__(
        self,
        *,
        # Tries in all, the first included.
        attempts: int = 5,
        # Seconds to connect, and to read an answer.
        timeouts_s: tuple[float, float] = (CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
        # For login programs, where no terminal shows that they hang.
        login_timeout_s: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        # Makes the client of a service in a region; boto3 unless given.
        connect: Callable[[str, str], Any] | None = None,
    ) -> None:
        self._attempts = attempts
        self._timeouts_s = timeouts_s
        self._login_timeout_s = login_timeout_s
        self._sleep = sleep
        self._now = now
        self._connect = connect or self._connect_with_boto3
        self._session: Any = None
        self._credentials: Any = None
        self._identity: Identity | None = None
        self._clients: dict[tuple[str, str], Any] = {}
        self._lock = RLock()

    def call(self, service: str, region: str, action: str, *, subject: str = "", **parameters: Any) -> Any:
        """Return the answer to one call.

        action: as the service names it, such as `DescribeInstances`. subject: what it is about, for errors.
        """
        api_call = ApiCall(service=service, action=action, region=region, subject=subject)
        return self._send(api_call, parameters)

    def _send(self, api_call: ApiCall, parameters: Mapping[str, Any]) -> Any:
        from botocore import xform_name

        def send(client: Any) -> Any:
            method = getattr(client, xform_name(api_call.action))
            try:
                return _checked(api_call, method(**parameters))
            except (LookupError, AttributeError, TypeError, ValueError) as error:
                # botocore's parsers fail like this if something other than AWS answers.
                raise _unanswered(api_call, error) or no_answer(api_call, repr(error)) from None

        return self._retry(api_call, send)

    def call_or_none(
        self,
        service: str,
        region: str,
        action: str,
        *,
        absent: Collection[str],
        subject: str = "",
        **parameters: Any,
    ) -> Any | None:
        """Return the answer to one call; None if AWS refuses it with one of the codes `absent`."""
        try:
            return self.call(service, region, action, subject=subject, **parameters)
        except BadConfiguration as error:
            if error.code in absent:
                return None
            raise

    def paginate(
        self, service: str, region: str, action: str, *, subject: str = "", **parameters: Any
    ) -> Iterator[Any]:
        """Yield the answer to one call page by page; see `call`."""
        sent, received = {
            "s3": ("ContinuationToken", "NextContinuationToken"),
            "batch": ("nextToken", "nextToken"),
            "logs": ("nextToken", "nextToken"),
        }.get(service, ("NextToken", "NextToken"))
        while True:
            page = self.call(service, region, action, subject=subject, **parameters)
            yield page
            if not page.get(received):
                return
            parameters[sent] = page[received]

    def items(self, service: str, region: str, action: str, name: str, **parameters: Any) -> Iterator[Any]:
        """Yield the entries of the list `name` of every page; see `call`."""
        for page in self.paginate(service, region, action, **parameters):
            yield from page[name]

    def _retry(self, api_call: ApiCall, send: Callable[[Any], T]) -> T:
        """Return what `send` does with the client; repeat it if nothing was done or no answer came."""
        unanswered_call: Unreachable | None = None
        pause_s = FIRST_PAUSE_S
        for attempt in range(1, self._attempts + 1):
            try:
                return self._sent(api_call, send)
            except TlsFailed as error:
                raise unanswered_call or error from None
            except Unreachable as error:
                unanswered_call = error
                if attempt == self._attempts:
                    raise
            except Throttled:
                if attempt == self._attempts:
                    # This try did nothing; an earlier one that got no answer may have.
                    if unanswered_call:
                        raise unanswered_call from None
                    raise
            except NotAuthorised:
                # AWS checks rights before the token, and the login may have ended in between.
                if unanswered_call:
                    raise unanswered_call from None
                raise
            note_wait(f"{api_call} is sent again after {attempt} of {self._attempts} tries")
            self._sleep(pause_s)
            note_wait("")
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        raise AssertionError("at least one attempt")

    def _sent(self, api_call: ApiCall, send: Callable[[Any], T]) -> T:
        """Return what `send` returns for the client; turn botocore's exceptions into ours."""
        from botocore.exceptions import ClientError

        try:
            return send(self._client(api_call.service, api_call.region))
        except ClientError as error:
            raise _refusal(api_call, error) from None
        except Exception as error:
            if (translated := _unanswered(api_call, error)) is None:
                raise
            raise translated from None

    def _client(self, service: str, region: str) -> Any:
        # boto3 makes clients of one session for one thread at a time.
        with self._lock:
            if (service, region) not in self._clients:
                self._clients[service, region] = self._connect(service, region)
            elif self._credentials is not None:
                # Renew credentials before the call, or botocore would do it in the middle of it.
                self._log_in(region, self._credentials.get_frozen_credentials)
            return self._clients[service, region]

    def _connect_with_boto3(self, service: str, region: str) -> Any:
        from botocore.config import Config

        connect_s, read_s = self._timeouts_s
        config = Config(
            connect_timeout=connect_s,
            read_timeout=read_s,
            # `_retry` decides what is sent again, and when.
            retries={"mode": "standard", "total_max_attempts": 1},
        )
        if self._session is None:
            self._session, self._credentials = self._log_in(region, _make_session)
        name = {"servicequotas": "service-quotas"}.get(service, service)
        try:
            client = self._session.client(name, region_name=region, config=config)
            # botocore would notice this in the middle of a call, and take it for a lost answer.
            endpoint = urlsplit(client.meta.endpoint_url)
            if endpoint.port == 0 or endpoint.scheme not in ("http", "https"):
                raise ValueError(f"Invalid endpoint: {client.meta.endpoint_url}")
            return client
        except Exception as error:
            known = _unanswered(ApiCall(service=service, action="", region=region), error)
            raise known or no_client(service, error, region=region) from None

    def _log_in(self, region: str, make: Callable[[], T]) -> T:
        """Return what `make` makes with the user's login. Raises a kind of CloudRefused if that fails."""
        from botocore.exceptions import ClientError

        try:
            return make() if _has_terminal() else _within(self._login_timeout_s, make)
        except ClientError as error:
            raise _refusal(
                ApiCall(service="sts", action=error.operation_name, region=region), error
            ) from None
        except Exception as error:
            raise no_login(error, region=region) from None

    def home_region(self) -> str:
        """Return the region of the user's environment or profile, else the default one."""
        return login_region()[0]


class _Answer(dict[str, Any]):
    """A part of an answer; reading a field that it lacks, and AWS always gives, raises Unreachable."""

    def __init__(self, api_call: ApiCall, fields: Mapping[str, Any]) -> None:
        super().__init__((name, _checked(api_call, value)) for name, value in fields.items())
        self._api_call = api_call

    def __missing__(self, name: str) -> Any:
        raise no_answer(self._api_call, f"no {name}")


def _checked(api_call: ApiCall, value: Any) -> Any:
    if isinstance(value, dict):
        return _Answer(api_call, value)
    return [_checked(api_call, part) for part in value] if isinstance(value, list) else value


def _refusal(api_call: ApiCall, error: Any) -> CloudRefused:
    """Return the error that botocore's ClientError means."""
    details = error.response.get("Error", {})
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return refusal(api_call, details.get("Code", ""), details.get("Message", ""), status=status)


def _unanswered(api_call: ApiCall, error: Exception) -> CloudRefused | None:
    """Return the error that an exception of botocore means; None for an unknown one."""
    return unanswered(api_call, tuple(kind.__name__ for kind in type(error).__mro__), str(error))


def _make_session() -> tuple[Any, Any]:
    """Return a boto3 session and its credentials, fetched now. Raises whatever the login raises."""
    import boto3
    from botocore.exceptions import NoCredentialsError, UnknownCredentialError

    session = boto3.Session()

    def ask_second_factor(question: str) -> str:
        if not _has_terminal():
            raise EOFError
        return getpass(question)

    with suppress(UnknownCredentialError, AttributeError):
        provider = session._session.get_component("credential_provider").get_provider("assume-role")
        # Its default asks on the terminal, and without one prints the question all the same.
        provider._prompter = ask_second_factor
    credentials = session.get_credentials()
    if credentials is None:
        raise NoCredentialsError
    credentials.get_frozen_credentials()
    return session, credentials


def _has_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _within(seconds: float, make: Callable[[], T]) -> T:
    """Return what `make` returns or raises; raise TimeoutError if that takes longer."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(make())
        except BaseException as error:
            errors.append(error)

    # As a daemon, a thread that hangs keeps no process from ending.
    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"it gave no answer within {seconds:.0f} s")
    return results[0]

"""A session with AWS: one boto3 client per service and region, retries, and errors told apart.

The only module that imports boto3. `AWS_ENDPOINT_URL` is obeyed.
"""

import time
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime
from threading import RLock
from typing import Any, TypeVar

from fastlaunch.aws.errors import ApiCall, refusal, unanswered
from fastlaunch.aws.types import Identity
from fastlaunch.core.errors import BadConfiguration, NotAuthorised, Throttled, Unreachable
from fastlaunch.core.units import DEFAULT_REGION

#: Pause before the second try; it doubles from try to try, up to the maximum.
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 20.0

#: EC2 answers RunInstances within seconds; a busy region takes longer.
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60

T = TypeVar("T")


class AwsSession:
    """AWS in every region, through boto3's usual chain of credentials.

    Every method raises a kind of CloudRefused. Where nothing exists it returns None or an empty value if its
    return type allows that, and raises BadConfiguration if not. Calls that were throttled or not answered are
    repeated; botocore itself repeats nothing.
    """

    def __init__(
        self,
        *,
        # Tries in all, the first included.
        attempts: int = 5,
        # Seconds to connect, and to read an answer.
        timeouts_s: tuple[float, float] = (CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        # Makes the client of a service in a region; boto3 unless given.
        connect: Callable[[str, str], Any] | None = None,
    ) -> None:
        self._attempts = attempts
        self._timeouts_s = timeouts_s
        self._sleep = sleep
        self._now = now
        self._connect = connect or self._connect_with_boto3
        self._session: Any = None
        self._identity: Identity | None = None
        self._clients: dict[tuple[str, str], Any] = {}
        self._lock = RLock()

    def call(self, service: str, region: str, action: str, *, subject: str = "", **parameters: Any) -> Any:
        """Return the answer to one call.

        action: as the service names it, such as `DescribeInstances`. subject: what it is about, for errors.
        """
        from botocore import xform_name

        api_call = ApiCall(service=service, action=action, region=region, subject=subject)
        return self._retry(api_call, lambda client: getattr(client, xform_name(action))(**parameters))

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
            "logs": ("nextToken", "nextToken"),
        }.get(service, ("NextToken", "NextToken"))
        while True:
            page = self.call(service, region, action, subject=subject, **parameters)
            yield page
            if not page.get(received):
                return
            parameters[sent] = page[received]

    def _retry(self, api_call: ApiCall, send: Callable[[Any], T]) -> T:
        """Return what `send` makes of the client, repeated where nothing was done or no answer came."""
        unanswered_call: Unreachable | None = None
        pause_s = FIRST_PAUSE_S
        for attempt in range(1, self._attempts + 1):
            try:
                return self._translate_errors(
                    api_call, lambda: send(self._client(api_call.service, api_call.region))
                )
            except Unreachable as error:
                unanswered_call = error
                if attempt == self._attempts:
                    raise
            except Throttled:
                if attempt == self._attempts:
                    # This try did nothing; an earlier one without an answer may have.
                    if unanswered_call:
                        raise unanswered_call from None
                    raise
            except NotAuthorised:
                # AWS checks rights before the token, and a login may have ended in between.
                if unanswered_call:
                    raise unanswered_call from None
                raise
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        raise AssertionError("at least one attempt")

    def _translate_errors(self, api_call: ApiCall, send: Callable[[], T]) -> T:
        """Return what `send` does; raise what botocore raises as one of our errors."""
        from botocore.exceptions import ClientError

        try:
            return send()
        except ClientError as error:
            details = error.response.get("Error", {})
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code, message = details.get("Code", ""), details.get("Message", "")
            raise refusal(api_call, code, message, status=status) from None
        except Exception as error:
            names = tuple(each.__name__ for each in type(error).__mro__)
            translated = unanswered(api_call, names, str(error))
            if translated is None:
                raise
            raise translated from None

    def _client(self, service: str, region: str) -> Any:
        # boto3 makes clients of one session for one thread at a time.
        with self._lock:
            if (service, region) not in self._clients:
                self._clients[service, region] = self._connect(service, region)
            return self._clients[service, region]

    def _connect_with_boto3(self, service: str, region: str) -> Any:
        from botocore.config import Config

        connect_s, read_s = self._timeouts_s
        config = Config(
            connect_timeout=connect_s,
            read_timeout=read_s,
            # `_retry` decides what is repeated, and when.
            retries={"mode": "standard", "total_max_attempts": 1},
        )
        name = {"servicequotas": "service-quotas"}.get(service, service)
        try:
            return self._boto3_session().client(name, region_name=region, config=config)
        except ValueError as error:
            if "endpoint" in str(error):
                hint = "AWS_ENDPOINT_URL takes a whole URL, such as http://127.0.0.1:5000; or unset it"
                raise BadConfiguration(f"cannot reach {service}: {error}", hint) from None
            raise

    def _boto3_session(self) -> Any:
        import boto3

        with self._lock:
            if self._session is None:
                self._session = boto3.Session()
            return self._session

    def home_region(self) -> str:
        """Return the region of the user's environment or profile, else the default one."""
        api_call = ApiCall(service="sts", action="GetCallerIdentity", region=DEFAULT_REGION)
        region: str | None = self._translate_errors(api_call, lambda: self._boto3_session().region_name)
        return region or DEFAULT_REGION

"""Where a SageMaker training job can run: all that was looked up about one region, by name."""

from dataclasses import dataclass

from fastlaunch.backends.stored_code import CodeBundle
from fastlaunch.catalog.hardware import InstanceType


@dataclass(frozen=True, kw_only=True)
class TrainingSite:
    """One region, with the instance types that a job may get there, and all that a request for it names.

    instance: the first choice, as EC2 names it; SageMaker's name has `ml.` before it. others: which to take
    instead, in order, each with as many GPUs. role: ARN of the execution role. image: by digest, in ECR of
    the region. code: None if the image holds it. usd_per_hour: on-demand price of the dearest type.
    keep_alive_minutes: of a warm pool after the job, 0 for none. training_plan: ARN.
    A text such as `<image-digest>` stands for what is not known without asking AWS.
    """

    instance: InstanceType
    others: tuple[InstanceType, ...] = ()
    region: str
    role: str
    bucket: str
    prefix: str
    image: str
    code: CodeBundle | None
    usd_per_hour: float
    price_as_of: str
    volume_gib: int
    keep_alive_minutes: int = 0
    training_plan: str | None = None

    @property
    def backend(self) -> str:
        """The backend whose place this is."""
        return "sagemaker"

    @property
    def name(self) -> str:
        """`ml.p5.48xlarge or ml.p5en.48xlarge in us-east-1`."""
        types = " or ".join(f"ml.{one.name}" for one in (self.instance, *self.others))
        return f"{types} in {self.region}"

    @property
    def zone(self) -> str | None:
        """None: SageMaker chooses."""
        return None

    @property
    def max_price_usd(self) -> float | None:
        """None: SageMaker's spot has no limit of the user's."""
        return None

    @property
    def idle_minutes(self) -> int:
        """For which a warm pool is kept, and billed, after the job."""
        return self.keep_alive_minutes

    @property
    def own_names(self) -> tuple[str, ...]:
        """None: a region has all in common."""
        return ()

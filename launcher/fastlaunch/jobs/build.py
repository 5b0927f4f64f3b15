"""`Options` -> `Jobs`, to run or rehearse here or on AWS -> a `Job` for every run.

A request that is wrong by itself is an error here, before AWS is asked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastlaunch.catalog.experiments import published_experiments
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.catalog.prices import Catalogue, check_sold
from fastlaunch.core.errors import UserError
from fastlaunch.core.ownership import FEWEST_TIMED_STEPS, FIRST_LOOK, MOST_ROUNDS
from fastlaunch.jobs.data_sources import DataFile, check_data, check_models, check_travels, data_file
from fastlaunch.jobs.job import Job, Script, Terms, Variant
from fastlaunch.jobs.machine import Machine
from fastlaunch.jobs.option_rules import check_no_script, check_purchase
from fastlaunch.jobs.options import ML, Options
from fastlaunch.jobs.scripts import caveats_of, num_ranks_of, on_nodes, script_spec, scripts_here, scripts_of
from fastlaunch.jobs.variants import (
    DEFAULT_STEPS,
    capabilities_of,
    missing_on,
    nearest_on,
    problem_on,
    variants_of,
    without_model,
)
from fastlaunch_train.recipes.requirements import Capabilities, bf16_emulation
from fastlaunch_train.recipes.rules import ranks_problem
from fastlaunch_train.workloads.registry import WorkloadInfo

#: Every repeat is planned and stored before the first one starts.
MAX_REPEATS = 1000
GPU_WORKLOAD, CPU_WORKLOAD = "vit-huge", "vit-tiny"
_CPU_BATCH_SIZE = 8
#: Processes that stand in for several GPUs where there is none.
_CPU_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """What to train, checked as far as possible without AWS; `at` gives the jobs on a machine."""

    options: Options
    #: What is trained, in order; none where scripts are.
    variants: tuple[Variant, ...] = ()
    #: The variants of a command of the user's own, the baseline first.
    scripts: tuple[Script, ...] = ()
    #: The instance types of the options, in the order they are tried; none on this machine.
    instances: tuple[InstanceType, ...] = ()
    #: Variants of an experiment that the instances cannot run, as (name, reason).
    skipped: tuple[tuple[str, str], ...] = ()
    #: What a rehearsal does not cover, and what is different in an experiment here, as (topic, sentence).
    differences: tuple[tuple[str, str], ...] = ()
    #: What to know about the figures before they are made.
    caveats: tuple[str, ...] = ()
    #: What is uploaded for the workloads to read; None for other data.
    data_file: DataFile | None = None

    @property
    def workloads(self) -> tuple[WorkloadInfo, ...]:
        """The workloads of the variants, each once."""
        return tuple(dict.fromkeys(variant.workload for variant in self.variants))

    @property
    def user_file(self) -> Path | None:
        """The user's own workload file, which travels in the code bundle; None for any other workload."""
        if self.scripts:
            return None
        path, separator, _ = self.variants[0].workload.name.rpartition(".py:")
        return Path(f"{path}.py") if separator else None

    def at(
        self, instance: InstanceType | None = None, region: str | None = None, *, image: str | None = None
    ) -> tuple[Job, ...]:
        """Return the jobs on an instance type, or on this machine: A B, then B A, and so on.

        Every instance type gets the same jobs in the same order, with one rank per GPU unless a variant says
        otherwise. image: by digest, where it is known. Raises UserError if a recipe does not train with so
        many ranks.
        """
        options, scripts = self.options, self.scripts
        where: dict[str, Any] = {"region": region or options.region}
        if instance:
            where |= {
                "backend": options.service,
                "instance": instance.name,
                "num_nodes": options.num_nodes,
                "allow_tcp": options.allow_tcp and options.num_nodes > 1,
                "image": image,
                "terms": Terms(
                    purchase=options.purchase,
                    max_minutes=options.max_minutes,
                    max_price_usd=options.max_price_usd,
                    reservation=options.reservation,
                    training_plan=options.training_plan,
                    idle_timeout_s=options.idle_timeout_s,
                ),
            }
            scripts = tuple(
                on_nodes(script, options.nproc, instance, options.num_nodes) for script in scripts
            )
        if scripts:
            return interleaved([script_spec(script, **where) for script in scripts], options)
        num_gpus = instance.num_accelerators * options.num_nodes if instance else 1
        # Two variants may have the same stand-in here; it is run once.
        specs = dict.fromkeys(
            _spec(variant, options, num_gpus=num_gpus, **where) for variant in self.variants
        )
        jobs = interleaved(_with_common_batch(list(specs), options), options)
        return _in_containers(jobs, options) if options.container else jobs


def check_names(options: Options) -> None:
    """Raise UserError for what exists nowhere, whether the options say where to train or not."""
    check_purchase(options)
    if options.command is not None:
        scripts_of(options)
    else:
        check_no_script(options)
        variants_of(options, GPU_WORKLOAD)


def build_jobs(options: Options, *, catalogue: Catalogue | None, machine: Machine | None = None) -> Jobs:
    """Return what to train: on `machine`, or on AWS without a machine.

    options: for AWS, after `check_on_aws`. catalogue: needed for AWS, to rehearse an instance, and to tell
    what a GPU supports. Raises UserError for what does not exist, is not sold, is not allowed or cannot run
    there. A variant of an experiment that cannot run is left out.
    """
    if machine is None:
        assert catalogue is not None
        return _jobs_on_aws(options, catalogue)
    _check_repeats(options)
    if options.command is not None:
        scripts = scripts_here(options, machine)
        return Jobs(options=options, scripts=scripts, caveats=caveats_of(scripts))
    check_no_script(options)
    instance = catalogue.instance(options.rehearsed) if catalogue and options.rehearsed else None
    variants = variants_of(options, GPU_WORKLOAD if instance or machine.devices else CPU_WORKLOAD)
    # The data are in the user's own image, not here.
    image = options.image if options.container else None
    for data in dict.fromkeys(variant.inputs.data for variant in variants):
        check_data(data, [variant.workload for variant in variants], where="image" if image else "here")
    kinds = machine.capabilities(catalogue)
    here: list[Variant] = []
    differences: list[tuple[str, str]] = []
    published = published_experiments()[options.experiment].epochs if options.experiment else None
    if published is not None and options.steps is None and (steps := variants[0].steps) is not None:
        made_up = f"{published} epochs; made-up data have no end, so {steps} steps"
        differences.append(("length", made_up))
    for variant in variants:
        if variant.is_published:
            lacking = missing_on(variant.recipe, kinds)
            if machine.devices and (variant.num_gpus or 0) > len(machine.devices):
                lacking = f"it is for {variant.num_gpus} GPUs, and here is {machine.description}"
            if lacking:
                differences.append(("run", f"{variant.name}: {lacking}, left out"))
                continue
        adapted, changes = _adapt(variant, options, machine, kinds)
        if not image:
            check_models(adapted)
        here.append(adapted)
        differences += changes
    if not here:
        raise UserError(
            f"no run of experiment {options.experiment} can be made here: {differences[-1][1]}",
            f"add --instance p5.48xlarge; `fastlaunch experiments {options.experiment}` shows what it needs",
        )
    if instance and catalogue:
        num_ranks = max(variant.num_gpus or 1 for variant in here)
        differences += _of_every_rehearsal(instance, catalogue, machine, num_ranks=num_ranks)
    return Jobs(
        options=options,
        variants=tuple(here),
        differences=tuple(dict.fromkeys(differences)),
        caveats=_caveats(here, kinds, options),
    )


def interleaved(specs: Sequence[Job], options: Options) -> tuple[Job, ...]:
    """Return all rounds of the jobs: A B, then B A, and so on, so that drift affects all alike.

    Each round has the next seed. The runs of a round start from the same weights and see the same data, so
    they make a pair for the convergence guard.
    """
    if options.until_resolved and len(specs) < 2:
        is_script = specs[0].script is not None
        raise UserError(
            f"--until-resolved compares {'variants' if is_script else 'recipes'}, and here is one",
            f"name several: {'-L amp=bf16,fp32' if is_script else '--recipe bf16,compile'}; "
            "or give --repeats",
        )
    num_rounds = options.planned_rounds or options.num_repeats
    rounds = (specs if number % 2 == 0 else specs[::-1] for number in range(num_rounds))
    return tuple(
        replace(spec, seed=spec.seed + number, round=number + 1, max_rounds=options.planned_rounds)
        for number, round_ in enumerate(rounds)
        for spec in round_
    )


def _with_common_batch(specs: Sequence[Job], options: Options) -> list[Job]:
    """Return the jobs; with `--batch-size auto`, each batch has to fit all recipes on its workload.

    Their rows then share a global batch, and can be ranked.
    """
    if options.batch_size != "auto":
        return list(specs)
    labels: dict[Any, dict[str, None]] = {}
    for spec in specs:
        labels.setdefault((spec.workload, spec.inputs), {})[spec.recipe.label] = None
    fits = [tuple(labels[spec.workload, spec.inputs]) for spec in specs]
    return [replace(spec, fit=fit if len(fit) > 1 else ()) for spec, fit in zip(specs, fits, strict=True)]


def _in_containers(jobs: Sequence[Job], options: Options) -> tuple[Job, ...]:
    """Return the jobs with a container for each node; the nodes find each other over TCP.

    Raises UserError for what stays outside of the containers. An absolute path is in the user's own image.
    """
    for job in jobs:
        outside = (job.inputs.data.partition(":")[2], job.inputs.model, job.inputs.tokenizer)
        for path in filter(None, outside):
            if Path(path).exists() and not (options.image and Path(path).is_absolute()):
                raise UserError(
                    f"{path} is on this machine, not in the container",
                    "leave it out, rehearse without --container, or give --image and its path there",
                )
    num_nodes = options.num_nodes
    return tuple(
        replace(
            job, num_nodes=num_nodes, num_gpus=num_nodes * job.num_gpus, image=options.image, allow_tcp=True
        )
        for job in jobs
    )


def _adapt(
    variant: Variant, options: Options, machine: Machine, kinds: Sequence[Capabilities]
) -> tuple[Variant, list[tuple[str, str]]]:
    """Return the variant as it is on `machine`, with its ranks and batch size, and rows of `differences`."""
    is_rehearsed = options.rehearsed is not None
    recipe = variant.recipe
    problem = missing_on(recipe, kinds)
    if problem is not None:
        recipe = nearest_on(variant.recipe, variant.workload, kinds)
        if not is_rehearsed:
            overrides = "".join(f" --set {field}={value}" for field, value in recipe.overrides)
            raise UserError(
                f"recipe {variant.recipe.label} cannot run here: {problem}",
                f"the nearest that can: --recipe {recipe.name}{overrides}",
            )
    is_small = not machine.devices and (is_rehearsed or variant.is_published)
    small = without_model(variant) if is_small else variant
    batch_size: int | str = small.workload.batch_size
    if not machine.devices and small is variant:
        batch_size = min(batch_size, _CPU_BATCH_SIZE)
    if isinstance(variant.batch_size, int) and small is not variant:
        # A batch meant for the real workload would only slow its stand-in down.
        batch_size = min(variant.batch_size, batch_size)
    elif variant.batch_size is not None:
        batch_size = variant.batch_size
    differences = []
    if small is not variant:
        meant = f"{variant.workload.name} at batch {variant.batch_size or variant.workload.batch_size}"
        stand_in = f"{small.workload.name} at batch {batch_size}"
        differences.append(("workload", f"{meant}: rehearsed with {stand_in}"))
    one_each = len(machine.devices) or 1
    typed = one_each if options.nproc is None else num_ranks_of(options.nproc, machine)
    num_ranks = variant.num_gpus or typed
    if variant.num_gpus and not machine.devices and num_ranks > _CPU_RANKS:
        differences.append(("ranks", f"{num_ranks}; here: {_CPU_RANKS}"))
        num_ranks = _CPU_RANKS
    if problem is not None:
        differences.append(("recipe", f"{variant.recipe.label}: {problem}, rehearsed as {recipe.label}"))
    return replace(small, recipe=recipe, num_gpus=num_ranks, batch_size=batch_size), differences


def _spec(variant: Variant, options: Options, *, num_gpus: int, **where: Any) -> Job:
    """Return the variant as a job. Raises UserError if its recipe does not train with so many ranks.

    num_gpus: the ranks, unless the variant says how many. where: fields of `Job` about machines and terms.
    """
    num_gpus = num_gpus if variant.num_gpus is None else variant.num_gpus
    if problem := ranks_problem(variant.recipe, num_gpus):
        message, hint = problem
        raise UserError(f"recipe {variant.recipe.label}: {message}", hint)
    batch_size = variant.workload.batch_size if variant.batch_size is None else variant.batch_size
    return Job(
        workload=variant.workload.name,
        recipe=variant.recipe,
        batch_size=None if isinstance(batch_size, str) else batch_size,
        steps=variant.steps,
        epochs=variant.epochs,
        num_gpus=num_gpus,
        seed=options.seed,
        inputs=variant.inputs,
        checkpoint_every=options.checkpoint_every,
        eval_every=variant.eval_every,
        step_profile=options.step_profile,
        **where,
    )


def _of_every_rehearsal(
    instance: InstanceType, catalogue: Catalogue, machine: Machine, *, num_ranks: int
) -> Iterator[tuple[str, str]]:
    """Yield the rows of `differences` that every rehearsal has."""
    accelerator = catalogue.accelerators[instance.accelerator]
    yield "GPU", f"{instance.num_accelerators} x {accelerator.name}; here: {machine.description}"
    if num_ranks != instance.num_accelerators:
        yield "ranks", f"{instance.num_accelerators}; here: {num_ranks}"
    efa = f", {instance.num_efa_interfaces} EFA interfaces" if instance.num_efa_interfaces else ""
    yield "network", f"{instance.network_gbps:g} Gbps{efa}"
    yield "image", "the container image, its driver and its libraries"
    yield "price", f"nothing here tells what a step costs on {instance.name}"


def _jobs_on_aws(options: Options, catalogue: Catalogue) -> Jobs:
    scripts = () if options.command is None else scripts_of(options)
    variants = () if scripts else variants_of(options, GPU_WORKLOAD)
    instances = instances_of(options, catalogue)
    _check_each_once("region", options.regions)
    _check_repeats(options)
    for instance in instances if options.service == "ec2" else ():
        check_sold(instance, options.purchase, options.max_price_usd)
    if scripts:
        for instance in instances:
            if isinstance(options.nproc, int) and options.nproc > instance.num_accelerators:
                num_gpus = instance.num_accelerators
                raise UserError(
                    f"{options.nproc} processes on {instance.name}, which has {num_gpus} GPUs",
                    f"give --nproc {num_gpus} or less: one process per GPU",
                )
        # Over several nodes, or by --nproc, torchrun starts a rank on each GPU.
        on_one = instances if options.num_nodes == 1 and options.nproc is None else ()
        caveats = caveats_of(scripts, on_one)
        return Jobs(options=options, scripts=scripts, instances=instances, caveats=caveats)
    check_no_script(options)
    _check_training(options)
    # All variants read the same.
    data = data_file(variants[0].inputs.data, options)
    for variant in variants:
        check_travels(variant, options, data)
    if data is not None:
        variants = tuple(
            replace(variant, inputs=replace(variant.inputs, data=data.source)) for variant in variants
        )
    runnable: list[Variant] = []
    skipped: list[tuple[str, UserError]] = []
    for variant in variants:
        # Every instance type gets the same jobs, so what one type cannot run is run on none.
        problems = (
            problem_on(instance, variant, options, catalogue, variants=variants) for instance in instances
        )
        problem = next(filter(None, problems), None)
        if problem is None:
            runnable.append(variant)
        elif variant.is_published:
            skipped.append((variant.name, problem))
        else:
            raise problem
    if not runnable:
        name, error = skipped[0]
        raise UserError(
            f"no run of experiment {options.experiment} can be made there: {name}: {error.message}",
            error.hint,
        )
    kinds = [capabilities_of(catalogue.accelerator_of(instance.name)) for instance in instances]
    return Jobs(
        options=options,
        variants=tuple(runnable),
        instances=instances,
        skipped=tuple((name, error.message) for name, error in skipped),
        caveats=_caveats(runnable, kinds, options),
        data_file=data,
    )


def instances_of(options: Options, catalogue: Catalogue) -> tuple[InstanceType, ...]:
    """Return the instance types. Raises UserError if one does not exist or cannot join so many nodes."""
    names = options.instances
    if options.service == "sagemaker":
        names = tuple(name.removeprefix(ML) for name in names)
    _check_each_once("instance type", names)
    instances = tuple(map(catalogue.instance, names))
    for instance in instances:
        if options.num_nodes == 1 or instance.num_efa_interfaces or options.allow_tcp:
            continue
        with_efa = (
            name
            for name, known in catalogue.instances.items()
            if known.num_efa_interfaces > 1 and catalogue.accelerator_of(name).compute_capability
        )
        raise UserError(
            f"{instance.name} has no EFA, by which {options.num_nodes} nodes would talk",
            f"add --allow-tcp to do without, or choose a type with EFA: {', '.join(with_efa)}",
        )
    return instances


def _caveats(variants: Sequence[Variant], kinds: Sequence[Capabilities], options: Options) -> tuple[str, ...]:
    """Return what to know of the figures that the variants will have on these machines."""
    caveats = [bf16_emulation(variant.recipe, kind) for variant in variants for kind in kinds]
    return tuple(filter(None, dict.fromkeys([*caveats, _too_short(options)])))


def _too_short(options: Options) -> str | None:
    """Return what runs of so few steps do not show; None if there are enough."""
    if options.steps is None or options.steps >= FEWEST_TIMED_STEPS:
        return None
    return f"--steps {options.steps} gives no step time: that takes {FEWEST_TIMED_STEPS} steps or more"


def _check_repeats(options: Options) -> None:
    if not 1 <= options.num_repeats <= MAX_REPEATS:
        raise UserError(f"--repeats is {options.num_repeats}", f"give 1 to {MAX_REPEATS}")
    most = options.max_rounds
    if most is not None and not options.until_resolved:
        raise UserError("--max-rounds limits --until-resolved", "add that, or give --repeats")
    if most is not None and not FIRST_LOOK <= most <= MOST_ROUNDS:
        raise UserError(f"--max-rounds is {most}", f"give {FIRST_LOOK} to {MOST_ROUNDS}")
    if options.until_resolved and (why := _too_short(options)):
        raise UserError(f"--until-resolved needs step times, and {why}", "give more steps")
    if options.until_resolved and options.num_repeats > 1:
        fewest = min(max(options.num_repeats, FIRST_LOOK), MOST_ROUNDS)
        raise UserError(
            "--until-resolved decides how often each recipe runs",
            f"leave out --repeats, or give --max-rounds {fewest}",
        )


def _check_each_once(kind: str, names: Sequence[str]) -> None:
    if not names:
        raise UserError(f"no {kind} is named", f"give at least one {kind}")
    doubled = {name for name in names if names.count(name) > 1}
    if doubled:
        raise UserError(f"{kind} {min(doubled)} is given twice", "give it once")


def _check_training(options: Options) -> None:
    if options.nproc is not None:
        raise UserError(
            "--nproc is for training on this machine", "leave it out: on AWS it is one process per GPU"
        )
    if options.purchase == "spot" and not options.checkpoint_every:
        quarter = (DEFAULT_STEPS if options.steps is None else options.steps) // 4
        raise UserError(
            "spot without checkpoints: an interruption would lose everything",
            f"add --checkpoint-every {max(1, min(500, quarter))}, or another number of steps",
        )
    if options.steps is not None and 0 < options.steps < FEWEST_TIMED_STEPS and not options.eval_every:
        raise UserError(str(_too_short(options)), "give more, or --eval-every for what they train to")

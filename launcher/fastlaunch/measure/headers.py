"""Read the headers of a run's records: contradictions between them, and the identity of the run."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from fastlaunch.core.units import first_names
from fastlaunch.measure.record_files import RankRecord
from fastlaunch.measure.summary import VERSION, WORDS
from fastlaunch_train.recipes.recipe import Recipe, RecipeError
from fastlaunch_train.records.contents import version_of
from fastlaunch_train.records.records import SILENT
from fastlaunch_train.workloads.registry import WorkloadError, WorkloadInfo, workload_info

#: Fields of a recipe that override the workload's, which headers record too.
_OF_WORKLOADS = ("optimizer", "learning_rate")

#: Fields that all records of a run share, and further fields that the ranks of an attempt share.
_SHARED_BY_RUN = ("run_id", "workload", "recipe", "batch_size_per_gpu", "seed", "data", "data_identity")
_SHARED_BY_RANKS = (
    *("world_size", "num_nodes", "steps", "first_step", "versions", "attention_backend"),
    *("image_digest", "commit", "instance"),
)
#: Fields that a rank may have failed to read, as on a network disk, although it trained.
_MAY_BE_UNKNOWN = ("data_identity", "model_identity")
_MOST_NAMED = 4
#: Packages whose versions count whatever the recipe is.
_ALWAYS_PACKAGES = ("torch", "cuda", "cudnn", "timm", "transformer_engine")


def contradictions(attempts: Mapping[int, Sequence[RankRecord]]) -> list[str]:
    """Return the contradictions between the records of one run, as sentences.

    A rank without steps is not checked: it may have ended before its header was complete.
    """
    problems = []
    first: Mapping[str, Any] | None = None
    for number, records in attempts.items():
        ranks = [record.header["rank"] for record in records]
        world_size = records[0].header["world_size"]
        missing = list(islice((rank for rank in range(world_size) if rank not in ranks), 8))
        if missing:
            more = " and more" if world_size - len(set(ranks)) > len(missing) else ""
            problems.append(
                f"attempt {number}: no record of rank {', '.join(map(str, missing))}{more} of {world_size}"
            )
        if len(set(ranks)) < len(ranks):
            problems.append(f"attempt {number}: two records of one rank")
        schemas = sorted({record.header["schema"] for record in records})
        if len(schemas) > 1:
            problems.append(f"attempt {number}: ranks have records of schema {', '.join(map(str, schemas))}")
        headers = [record.header for record in records if record.steps]
        if not headers:
            continue
        shared = _SHARED_BY_RUN + _SHARED_BY_RANKS
        differing = [key for key in shared if any(_differ(header, headers[0], key) for header in headers)]
        machines = [header["machine"] for header in headers]
        for key in ("device_name", "driver"):
            if any(machine.get(key) != machines[0].get(key) for machine in machines):
                differing.append(key)
        if differing:
            problems.append(f"attempt {number}: ranks differ in {', '.join(differing)}")
        first = first or headers[0]
        differing = [key for key in _SHARED_BY_RUN if _differ(headers[0], first, key)]
        if differing:
            problems.append(f"attempt {number} differs from the first in {', '.join(differing)}")
    return problems


def _differ(one: Mapping[str, Any], other: Mapping[str, Any], key: str) -> bool:
    """Return whether two headers disagree in `key`.

    Older records are read by today's meaning, and workload and data fields that they lack do not count.
    """
    ours, theirs = one.get(key), other.get(key)
    if key == "batch_size_per_gpu" and "script" in one:
        return False  # a rank sets it at its first step; its samples are counted
    if key == "recipe":
        return resolved_record(one[key]) != resolved_record(other[key])
    if key in _MAY_BE_UNKNOWN:
        return ours is not None and theirs is not None and ours != theirs
    if key == "workload":
        return any(_differ(one[key], other[key], name) for name in one[key].keys() & other[key].keys())
    return bool(ours != theirs)


def mixed_schemas(attempts: Mapping[int, Sequence[RankRecord]]) -> list[str]:
    """Return a note for each attempt that another version of the training package recorded."""
    first = min(attempts)
    notes = []
    for what, schema_of in (("records", lambda header: header["schema"]), ("recipes", recipe_schema)):
        of_first = schema_of(attempts[first][0].header)
        for number, records in attempts.items():
            schema = schema_of(records[0].header)
            if schema != of_first:
                notes.append(f"attempt {number} has {what} of schema {schema}, attempt {first} of {of_first}")
    versions = {number: version_of(files_of(records[0].header)) for number, records in attempts.items()}
    for number, version in versions.items():
        if None not in (version, versions[first]) and version != versions[first]:
            notes.append(
                f"attempt {number} ran version {version} of the script, attempt {first} {versions[first]}"
            )
    return notes


def variant_of(header: Mapping[str, Any]) -> dict[str, str] | None:
    """Return a script's variant, as text by name; None for a workload."""
    script = header.get("script")
    return None if script is None else {str(name): str(text) for name, text in script["variant"].items()}


def is_silent(record: RankRecord) -> bool:
    """Return whether a script's rank never called us: the wrapper wrote its record and knows only its end."""
    return (record.header.get("script") or {}).get(SILENT) is True


def files_of(header: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of a script's files by path; empty for workloads and older records."""
    files = header.get("files")
    return {str(name): str(digest) for name, digest in files.items()} if isinstance(files, Mapping) else {}


def changed_files(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Return `a/train.py, b.py and 3 more`: the paths at which digests of files differ."""
    names = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
    return first_names(names, _MOST_NAMED)


def recipe_schema(header: Mapping[str, Any]) -> int:
    """Return the version of the recipe's fields; 1 if it is not recorded."""
    schema = header["recipe"].get("schema", 1)
    return schema if isinstance(schema, int) else 1


def power_limit_of(header: Mapping[str, Any]) -> float | None:
    """Return the GPU's power limit in watts; None without a GPU or if the driver gives none."""
    watts = header["machine"].get("power_limit_w")
    is_number = isinstance(watts, int | float) and not isinstance(watts, bool)
    return float(watts) if is_number and 0 < watts < 1e6 else None


def fingerprint_of(header: Mapping[str, Any], num_nodes: int) -> dict[str, str]:
    """Return what repeats of a run share besides their options, as texts by name."""
    machine, versions, workload = header["machine"], header["versions"], header["workload"]
    packages = (*_ALWAYS_PACKAGES, *_packages_used(header))
    # The digests of a published model; older records have none.
    identity = workload.get("model_identity")
    published = identity if isinstance(identity, Mapping) else {}
    values = {
        "device_name": machine["device_name"],
        "driver": machine.get("driver"),
        **{name: versions.get(name) for name in packages},
        "attention_backend": header["attention_backend"],
        "image_digest": header["image_digest"],
        VERSION: version_of(files_of(header)),
        WORDS: (header.get("script") or {}).get(WORDS),
        "model": workload.get("model"),
        **_stated(workload),
        **{f"model_{part}": published.get(part) for part in ("config", "weights")},
        **_data_read(header),
        # None for runs that load their data themselves, and for older records.
        "num_data_workers": header.get("num_data_workers") or None,
        "num_gpus_per_node": header["world_size"] // num_nodes,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _stated(workload: Mapping[str, Any]) -> dict[str, object]:
    """Return a workload's build arguments, and its statements about its steps."""
    arguments = workload.get("arguments")
    stated: dict[str, object] = {name: workload.get(name) for name in ("weight_decay", "max_grad_norm")}
    if workload.get("lr_schedule") != "constant":
        stated["lr_schedule"] = workload.get("lr_schedule")
    stated["warmup_steps"] = workload.get("warmup_steps") or None
    if isinstance(arguments, Mapping):
        words = [f"{name}={json.dumps(value)}" for name, value in sorted(arguments.items())]
        stated["arguments"] = " ".join(words) or None
    return stated


def _data_read(header: Mapping[str, Any]) -> dict[str, object]:
    """Return the digest of the data or the generator's name, and the tokenizer.

    Return nothing for older records, or for the placeholder values that they contain.
    """
    identity = header.get("data_identity") or {}
    digest, made_by, version = (identity.get(name) for name in ("digest", "generator", "generator_version"))
    made = None if version == 1 else made_by if version is None else f"{made_by} {version}"
    return {"data": " ".join(filter(None, (digest, made))) or None, "tokenizer": identity.get("tokenizer")}


def _packages_used(header: Mapping[str, Any]) -> Iterator[str]:
    """Yield packages that the run used because its recipe or workload asks for them."""
    recipe = header["recipe"]
    if str(recipe.get("parallelism")).startswith("zero"):
        yield "deepspeed"
    if recipe.get("fp8_scaling") in ("tensorwise", "rowwise"):
        yield "torchao"
    if recipe.get("engine") == "ort":
        yield from ("onnxruntime-training", "onnxruntime-training-cpu", "torch-ort")
    if recipe.get("loop") == "lightning":
        yield "lightning"
    if recipe.get("loop") == "transformers":
        yield "accelerate"
    workload = known_workload(header["workload"]["name"])
    if recipe.get("loop") == "transformers" or (workload and "tokenizer" in workload.takes):
        yield "transformers"


def known_workload(name: str) -> WorkloadInfo | None:
    """Return the workload of this name; None if the registry does not know it."""
    try:
        return workload_info(name)
    except WorkloadError:
        return None


def num_nodes_of(ranks: Sequence[RankRecord]) -> int:
    """Return the number of machines of one attempt: the headers' number, or the number of hosts if larger.

    A launcher need not tell the ranks the number of nodes.
    """
    hosts = {host for record in ranks if (host := record.header["machine"]["host_id"])}
    world_size: int = ranks[0].header["world_size"]
    return max(min(len(hosts), world_size), *(int(record.header["num_nodes"]) for record in ranks))


def resolved_record(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a header's recipe with today's fields; unchanged if it cannot be read."""
    try:
        known: Mapping[str, Any] = Recipe.from_record(recipe).to_record()
    except (RecipeError, TypeError, ValueError, KeyError, AttributeError):
        known = recipe
    plain: dict[str, Any] = json.loads(json.dumps(known))
    return plain


def label_of(header: Mapping[str, Any]) -> str:
    """Return a header's recipe label, without overrides that equal the workload's own settings.

    So runs that train alike have equal labels; `resolve_recipe` does the same for the recipe's own settings.
    Records from before the workload's optimizer was recorded keep their label.
    """
    recipe, workload = header["recipe"], header["workload"]
    by_itself = {field for field in _OF_WORKLOADS if workload.get(field, ...) == recipe.get(field)}
    name, *overrides = recipe["label"].split(" ")
    return " ".join([name, *(text for text in overrides if text.partition("=")[0] not in by_itself)])

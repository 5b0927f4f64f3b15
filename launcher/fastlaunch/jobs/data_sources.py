"""Check what a job reads: data, models and the user's own file have to be there when it runs.

The user's own workload file travels to AWS with the training code, and one file of data as an input. Other
data and models have to be in the user's own image or in an input from S3, at an absolute path. Models may
also be on the Hugging Face hub, and data may be made up there.
"""

import hashlib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from pathlib import Path, PurePosixPath, PureWindowsPath

from fastlaunch.core.errors import BadFile, UnknownName, UserError
from fastlaunch.core.plan import CodeBundle, code_key
from fastlaunch.jobs.job import Variant
from fastlaunch.jobs.option_rules import LOCAL_DATA, given_inputs
from fastlaunch.jobs.options import Options
from fastlaunch_train.node.protocol import INPUTS
from fastlaunch_train.records.rows import FORMATS, Part, RowError, is_rows_file, read_bytes, read_rows
from fastlaunch_train.workloads.registry import WorkloadInfo, names_folder

DATA_SOURCES = ("synthetic", "loader", "folder:PATH", "file:PATH")
#: Sources that are made up as they are read, without an end.
MADE_UP = ("synthetic", "loader")
#: owner/name or name, as on the Hugging Face hub.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
#: Folders that containers get from outside, so that a job does not see what the image has there: /out on EC2,
#: those below /opt/ml on SageMaker.
_HIDDEN = ("/opt/ml", "/out", "/dev", "/proc", "/sys")
#: The largest file of data that travels.
_MAX_FILE_BYTES = 2**30
#: A placeholder of a dry run looks like <this>; SageMaker takes a value of one line.
_NO_PATH = re.compile(r"[\x00-\x1f\x7f<>]")


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """A file of data on this machine that jobs get as an input. It is read where its bytes are needed."""

    path: Path
    sha256: str
    num_bytes: int

    @property
    def source(self) -> str:
        """The `--data` of the jobs."""
        return f"file:{INPUTS}/{LOCAL_DATA}/{self._name}"

    @property
    def data(self) -> bytes:
        """Its bytes. Raises UserError if they changed."""
        content = _content(self.path)
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise UserError(f"{self.path} changed meanwhile", "submit again, and leave it as it is")
        return content

    @cached_property
    def num_bytes_of_text(self) -> int:
        """How much of it is trained on, in bytes: of JSON Lines the texts, chats without their template."""
        content = read_bytes(self.path)
        if not is_rows_file(self.path):
            return len(content)
        rows = read_rows(self.path, content)
        return sum(_length(part) for row in rows for part in (row.prompt, row.completion) if part)

    def stored(self, prefix: str) -> CodeBundle:
        """Return where it lies in a bucket."""
        return CodeBundle(key=code_key(prefix, f"{self.sha256}/{self._name}"), sha256=self.sha256)

    @property
    def _name(self) -> str:
        return re.sub(r"[^A-Za-z0-9._-]", "_", self.path.name)


def data_file(data: str, options: Options) -> DataFile | None:
    """Return the file of data here that has to travel; None if the source is another.

    An absolute path is in the user's own image, if there is one. Raises UserError for a file that is too
    large or cannot be read.
    """
    kind, _, text = data.partition(":")
    path = _written_out(text)
    if kind != "file" or (options.image and path.is_absolute()) or not path.is_file():
        return None
    num_bytes = path.stat().st_size
    if num_bytes > _MAX_FILE_BYTES:
        raise UserError(
            f"{text} has {num_bytes / 2**30:.1f} GiB, and files of at most 1 GiB are uploaded",
            f"aws s3 cp {text} s3://BUCKET/PREFIX/{path.name}; then give --input data=s3://BUCKET/PREFIX "
            f"--data file:{INPUTS}/data/{path.name}",
        )
    sha256 = hashlib.sha256(_content(path)).hexdigest()
    return DataFile(path=path, sha256=sha256, num_bytes=num_bytes)


def _length(part: Part) -> int:
    """Return the bytes of a text, or of what is said in a chat."""
    if isinstance(part, str):
        return len(part.encode())
    return sum(len(str(message["content"] or "").encode()) for message in part)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadFile(path, str(error.strerror)) from None


def data_source(text: str) -> str:
    """Return the data source that is meant: a path alone is that of a file, or of a folder."""
    if ":" in text or text in MADE_UP or not ("/" in text or _written_out(text).exists()):
        return text
    return f"{'folder' if _written_out(text).is_dir() else 'file'}:{text}"


def check_data(data: str, workloads: Iterable[WorkloadInfo], *, where: str = "here") -> None:
    """Raise UserError if the workloads cannot read the data. where: `here`, in an `image` or `elsewhere`."""
    kind, _, path = data.partition(":")
    if where == "here" and kind == "folder" and path and not _written_out(path).is_dir():
        raise UserError(
            f"there is no folder {path}", "give a folder with one folder of images, or of reviews, per class"
        )
    if where == "here" and kind == "file" and path and not _written_out(path).is_file():
        raise UserError(f"there is no file {path}", "give one of text, JSON Lines, or a CSV file of reviews")
    if data in MADE_UP:
        return
    if kind not in ("folder", "file") or not path:
        raise UserError(f"unknown data source {data!r}", f"known: {', '.join(DATA_SOURCES)}")
    for workload in workloads:
        if workload.is_own:
            continue
        if workload.sample_unit == "tensors":
            raise UserError(f"workload {workload.name!r} makes its own data", "give --data synthetic")
        if kind == "file" and not reads_text(workload):
            raise UserError(
                f"workload {workload.name!r} reads no text", "give --data folder:PATH, or synthetic"
            )
        if workload.is_fine_tuning and where == "here":
            check_rows(_written_out(path))
        if kind == "folder" and workload.sample_unit == "sequences":
            raise UserError(
                f"workload {workload.name!r} reads one file of text, no folder", "give --data file:PATH"
            )
    if where == "image":
        if not PurePosixPath(path).is_absolute():
            raise UserError(
                f"--data {data} is a path on this machine: in an image it begins with /",
                f"give the path that the image has it at, such as --data {_example(data)}",
            )
        _check_path("--data ", path)


@cache
def check_rows(path: Path) -> None:
    """Raise UserError for JSON Lines that hold what cannot be trained on, before a machine is rented."""
    if not path.is_file() or not is_rows_file(path):
        return
    try:
        are_empty = [row.is_empty for row in read_rows(path, read_bytes(path))]
    except RowError as error:
        raise UserError(error.message, error.hint) from None
    except OSError as error:
        raise BadFile(path, str(error.strerror)) from None
    if not are_empty:
        raise UserError(f"{path} is empty", FORMATS)
    if all(are_empty):
        raise UserError(f"{path} has nothing to predict: every text and completion is empty", FORMATS)


def check_models(variant: Variant) -> None:
    """Raise UserError if a folder that a model or tokenizer is read from is not here.

    A name that is neither a path nor a folder is one of the Hugging Face hub. Raises UnknownName for a model
    that the timm installed here lacks.
    """
    if variant.workload.name.startswith("timm:"):
        _check_timm(variant.workload.name.removeprefix("timm:").partition(".")[0])
    for option, name in _models(variant):
        if names_folder(name) and not _written_out(name).is_dir():
            raise UserError(
                f"there is no folder {name}", f"give {option}FOLDER, or a name on the Hugging Face hub"
            )


def _models(variant: Variant) -> Iterator[tuple[str, str]]:
    """Yield what models and tokenizers are named by, and their names."""
    if variant.inputs.model is not None:
        yield "--model ", variant.inputs.model
    if variant.inputs.tokenizer is not None:
        yield "--tokenizer ", variant.inputs.tokenizer
    prefix, _, model = variant.workload.name.partition(":")
    if prefix in ("hf-clm", "hf-lora", "hf-sft"):
        yield f"{prefix}:", model


def _check_timm(model: str) -> None:
    """Raise UnknownName if the timm that is installed here, if any, has no such model."""
    spec = importlib.util.find_spec("timm")
    if spec is None or not spec.submodule_search_locations:
        return
    # Importing it would take seconds.
    files = Path(spec.submodule_search_locations[0], "models").glob("*.py")
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    names = set(re.findall(r"^def ([a-z]\w*)\(pretrained", source, re.MULTILINE))
    # Former names stand as text, in tables of deprecated ones.
    if names and model not in names and f"'{model}'" not in source:
        near = get_close_matches(model, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(f'timm:{name}' for name in near)}?" if near else None
        raise UnknownName("model of timm", model, names, hint or "timm.list_models() lists what there is")


def _written_out(path: str) -> Path:
    """Return the path with `~` replaced by the home; unchanged if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def reads_text(workload: WorkloadInfo) -> bool:
    """Return whether the workload is a language model's."""
    return "tokenizer" in workload.takes


def check_travels(variant: Variant, options: Options, local: DataFile | None) -> None:
    """Raise UserError if data, model or the user's own file will not be where the job runs.

    local: its data, if these travel.
    """
    data = variant.inputs.data
    is_fetched = local is not None or _is_in_input(data.partition(":")[2], options)
    if local is not None and variant.workload.is_fine_tuning:
        check_rows(local.path)
    where = "image" if options.image is not None and not is_fetched else "elsewhere"
    check_data(data, [variant.workload], where=where)
    if not (options.image or is_fetched or data in MADE_UP):
        example = _example(data)
        name = PurePosixPath(example).name
        kind, _, path = data.partition(":")
        if kind == "file":
            raise UserError(f"there is no file {path}", "give a file that is here; it is uploaded to the job")
        raise UserError(
            f"{data} is on this machine, not on the instance, and folders do not travel",
            f"build an image with it, COPY {name} /opt/data/{name}, and give --image REGISTRY/NAME@sha256:..."
            f" --data {example}; or copy it to S3, and give --input {name}=s3://BUCKET/PREFIX --data "
            f"{example.partition(':')[0]}:{INPUTS}/{name}; or --data synthetic, or loader for images, which "
            "are made there",
        )
    for option, name in _models(variant):
        _check_model(option, name, options)
    path = variant.workload.name.rpartition(".py:")[0]
    if path and (PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts):
        raise UserError(
            f"workload {variant.workload.name!r} is not below this folder",
            "its file travels with the training code: go to its folder, and give ./my.py:build",
        )
    if path and options.image:
        raise UserError(
            f"workload {variant.workload.name!r} travels in the code bundle, which --image does without",
            "leave out --image",
        )
    if options.requirements and options.image:
        raise UserError(
            "--requirements with an --image of yours is for a script",
            "install them in the image: fastlaunch build",
        )


def _example(data: str) -> str:
    """Return the data source with a path in an image, by its name here; `C:\\data\\acl` has one, too."""
    kind, _, path = data.partition(":")
    return f"{kind}:/opt/data/{PureWindowsPath(path).name or 'NAME'}"


def _check_model(option: str, name: str, options: Options) -> None:
    """Raise UserError unless the job finds the model by this name: on the hub, or in the user's own image."""
    if _is_in_input(name, options):
        return
    if options.image and PurePosixPath(name).is_absolute():
        _check_path(option, name)
        return
    if _HUB_NAME.fullmatch(name) and not Path(name).exists():
        return
    raise UserError(
        f"{option}{name!r} is a folder on this machine, not on the instance",
        "give its name on the Hugging Face hub; or build an image with it, COPY it to /opt/models/...,"
        " and give --image REGISTRY/NAME@sha256:... and the path there",
    )


def _is_in_input(path: str, options: Options) -> bool:
    """Return whether the path lies in a folder that a job gets from S3."""
    folders = [f"{INPUTS}/{name}" for name in given_inputs(options)]
    parts = PurePosixPath(path)
    return ".." not in parts.parts and any(parts.is_relative_to(folder) for folder in folders)


def _check_path(option: str, path: str) -> None:
    """Raise UserError if no image can have something at the absolute path."""
    # Two slashes at the start would be another root.
    parts = PurePosixPath("/" + path.lstrip("/"))
    if _NO_PATH.search(path):
        raise UserError(
            f"{option}{path!r} has < or >, or a character that cannot be printed", "rename it in the image"
        )
    if ".." in parts.parts or len(parts.parts) == 1:
        raise UserError(f"{option}{path} is no path in an image", "give the whole path, without ..")
    hidden = next((name for name in _HIDDEN if parts.is_relative_to(name)), None)
    if hidden:
        raise UserError(
            f"{option}{path} cannot be read in a job, whose containers get {hidden} from outside",
            "have it elsewhere in the image, as in /opt/data",
        )

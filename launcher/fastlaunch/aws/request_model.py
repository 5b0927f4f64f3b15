"""What botocore's model of a service says against a request, without sending it.

Read from botocore's own data, as importing botocore would take longer than the rest of a dry run.
"""

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

#: Stands for what is not known yet, such as `<role>`.
_PLACEHOLDER = re.compile(r"<[a-z0-9-]+>")


def model_problems(service: str, operation: str, request: Mapping[str, Any]) -> list[str]:
    """Return which limits of the model the request breaks: lengths, ranges, patterns.

    botocore itself checks names, types and minimums, and only when it sends. Placeholders pass.
    """
    model = _model(service)
    shape = model["operations"][operation]["input"]["shape"]
    return list(_problems(model["shapes"], shape, request, ""))


@cache
def _model(service: str) -> Any:
    spec = find_spec("botocore")
    assert spec is not None and spec.origin is not None
    versions = Path(spec.origin).parent.joinpath("data", service).glob("*/service-2.json.gz")
    return json.loads(gzip.decompress(max(versions).read_bytes()))


def _problems(shapes: Mapping[str, Any], name: str, value: Any, path: str) -> Iterator[str]:
    shape = shapes[name]
    yield from _broken_limits(shape, value, path)
    if shape["type"] == "structure":
        for member, part in value.items():
            inner = f"{path}.{member}".removeprefix(".")
            yield from _problems(shapes, shape["members"][member]["shape"], part, inner)
    elif shape["type"] == "list":
        for part in value:
            yield from _problems(shapes, shape["member"]["shape"], part, path)
    elif shape["type"] == "map":
        for key, part in value.items():
            yield from _problems(shapes, shape["key"]["shape"], key, path)
            yield from _problems(shapes, shape["value"]["shape"], part, f"{path}.{key}")


def _broken_limits(shape: Mapping[str, Any], value: Any, path: str) -> Iterator[str]:
    is_text, is_open = isinstance(value, str), isinstance(value, str) and _PLACEHOLDER.search(value)
    size = len(value) if hasattr(value, "__len__") else value
    unit = " characters" if is_text else " entries" if hasattr(value, "__len__") else ""
    pattern = shape.get("pattern")
    if "max" in shape and size > shape["max"]:
        yield f"{path} has {size:,}{unit}, above {shape['max']:,}"
    elif "min" in shape and size < shape["min"] and not is_open:
        yield f"{path} has {size:,}{unit}, below {shape['min']:,}"
    # Python's expressions know no classes of Unicode, which only tags have.
    elif is_text and pattern and r"\p" not in pattern and not is_open and not re.fullmatch(pattern, value):
        yield f"{path} {value!r} does not fit {pattern}"

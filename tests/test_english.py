"""How names and sentences are written, in code, documentation and messages."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from test_layers import MODULES, nodes_of

ROOT = Path(__file__).parents[1]
SOURCES = sorted(MODULES.values())
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
#: A sentence that begins with "Of" keeps its subject for the end.
_INVERTED = re.compile(r"(?:\A|\n\s*\n|[.:!?][\"')]*\s+|\n[-*|] )\s*Of\s")
#: Participles and pronouns do not say what a thing is.
_VAGUE = ("own", "found", "told", "said", "asked", "each")
#: A file, or an identifier with a dot or a capital in it.
_FILE = re.compile(r"[\w./-]+\.(py|md|toml|yaml|sh|j2|txt)")
_IDENTIFIER = re.compile(r"\w+(\.[A-Za-z_]\w*)+|_*[A-Z]\w*[a-z]\w*")
#: Names that are not ours and stand nowhere else.
_FOREIGN = (
    *("sagemaker.amazonaws.com", "mlflow.db", "float8_linear_utils._auto_filter_for_rowwise", "log.txt"),
    *("mock.patch", "model.py", "config.yaml", "prices.yaml"),
    *("onnxruntime.training.ortmodule", "NetworkInterfaces", "Libfabric", "Server.SpotInstanceTermination"),
)


def texts(path: Path) -> Iterator[str]:
    """Yield each comment and string of a source file, or a page as a whole."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield source
        return
    comment: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comment.append(token.string.lstrip("#: "))
        elif comment and token.type != tokenize.NL:
            yield " ".join(comment)
            comment.clear()
    for node in nodes_of(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def docstrings(path: Path) -> Iterator[str]:
    for node in nodes_of(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node, clean=False) or ""


def given_names(path: Path) -> Iterator[str]:
    """Yield the names of variables, parameters, functions and classes, as often as they are given."""
    for node in nodes_of(path):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def test_no_sentence_begins_with_of() -> None:
    inverted = [
        f"{path.relative_to(ROOT)}: {text[match.start() :].strip()[:70]}"
        for path in [*SOURCES, *PAGES]
        if "Of" in path.read_text(encoding="utf-8")
        for text in texts(path)
        for match in _INVERTED.finditer(text)
    ]
    assert inverted == []


def test_no_thing_is_named_by_a_participle_or_pronoun() -> None:
    vague = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name in given_names(path)
        if name in _VAGUE
    ]
    assert vague == []


def test_the_level_of_a_line_is_no_prefix() -> None:
    """A warning is made by `as_warning`, and known by its class."""
    prefixed = [
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if path.is_relative_to(ROOT / "launcher")
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and str(node.value).startswith("warning: ")
    ]
    assert prefixed == ["launcher/fastlaunch/core/terminal.py"]


def test_what_docstrings_and_pages_name_exists() -> None:
    folders = ("launcher", "train", "containers", "docs", "tests")
    files = [*ROOT.glob("*.*"), *(path for folder in folders for path in (ROOT / folder).rglob("*.*"))]
    documents = {path: "\n".join(docstrings(path)) for path in SOURCES}
    known = set(_FOREIGN)
    for path in SOURCES:
        code = path.read_text(encoding="utf-8")
        for docstring in docstrings(path):
            code = code.replace(docstring, "", 1)
        known |= {path.stem, path.parent.name, *re.findall(r"\w+", code)}
    for path in files:
        if path.suffix in (".yaml", ".j2"):
            known |= set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    documents |= {page: page.read_text(encoding="utf-8") for page in PAGES}
    unknown = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in documents.items()
        for name in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
        if name not in known
        and "NAME" not in name
        and (
            not any(f"/{file}".endswith(f"/{name}") for file in map(str, files))
            if _FILE.fullmatch(name)
            else _IDENTIFIER.fullmatch(name) and not known.issuperset(name.split("."))
        )
    ]
    assert unknown == []

"""MkDocs hook: pages may link to files of the repository outside docs/, which the site takes in.

Such a file is at repository/PATH there. Markdown becomes a page, whose own links are followed too.
The page of the command line gets the examples of `--help`, which mkdocs-click leaves out.
"""

import inspect
import re
import textwrap
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_LINK = re.compile(r"(?<=\]\()(?!https?:)([^)#\s]+)")
_TAKEN_IN = "repository"


def on_startup(command: str, dirty: bool) -> None:
    from fastlaunch.cli.main import fastlaunch

    commands: list[click.Command] = [fastlaunch]
    for each in commands:
        if isinstance(each, click.Group):
            context = click.Context(each)
            found = (each.get_command(context, name) for name in each.list_commands(context))
            commands += filter(None, found)
        _, _, examples = (each.epilog or "").partition("Examples:\n")
        if examples:
            shown = f"```sh\n{textwrap.dedent(examples)}\n```"
            each.help = f"{inspect.cleandoc(each.help or '')}\n\n{shown}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parent
    pages = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    pages.append(("CHANGELOG.md", (root / "CHANGELOG.md").read_text(encoding="utf-8")))
    taken = {"CHANGELOG.md"}
    while pages:
        page, text = pages.pop()
        for link in _LINK.findall(text):
            path = normpath(PurePosixPath(page).parent / link)
            if path.startswith(("docs/", "..")) or path in taken or not (root / path).is_file():
                continue
            taken.add(path)
            if path.endswith(".md"):
                pages.append((path, (root / path).read_text(encoding="utf-8")))
    for path in sorted(taken):
        files.append(File.generated(config, f"{_TAKEN_IN}/{path}", content=(root / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    site_path = page.file.src_uri
    path = site_path.removeprefix(f"{_TAKEN_IN}/") if site_path.startswith(_TAKEN_IN) else f"docs/{site_path}"

    def on_site(link: re.Match[str]) -> str:
        target = normpath(PurePosixPath(path).parent / link[1])
        there = target.removeprefix("docs/") if target.startswith("docs/") else f"{_TAKEN_IN}/{target}"
        return relpath(there, PurePosixPath(site_path).parent)

    return _LINK.sub(on_site, markdown)

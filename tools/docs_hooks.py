"""What mkdocs cannot know: pages in the repository's root, and links that leave docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# Pages of the site that are kept where people look for them in a repository.
FROM_ROOT = {
    "index.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "SECURITY.md": "SECURITY.md",
}
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
# What docstrings call by a role of Sphinx (:meth:`Mix.loader`), and the headings between them.
HEADING = r'<h\d id="(?P<heading>forebay[\w.]*)"'
ROLE = r":(?:attr|class|func|meth):<code>(?P<name>[\w.]+)</code>"
NAMED = re.compile(f"{HEADING}|{ROLE}")


def on_config(config: Any) -> Any:
    """Lists the decision records, which are one file each, under their titles."""
    for section in config["nav"]:
        for pages in section.values():
            for page in pages if isinstance(pages, list) else []:
                if "Decisions" in page:
                    page["Decisions"] = [{"In one line each": "adr/README.md"}] + [
                        {_title(adr): f"adr/{adr.name}"}
                        for adr in sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
                    ]
    return config


def on_files(files: Files, config: Any) -> Files:
    for page, source in FROM_ROOT.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=_relink(text, ROOT, config["repo_url"])))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    source = page.file.src_uri
    if source in FROM_ROOT:
        return markdown
    return _relink(markdown, (ROOT / "docs" / source).parent, config["repo_url"])


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Names in docstrings lead to what they name, where that is on the same page."""
    headings = dict.fromkeys(m["heading"] for m in NAMED.finditer(html) if m["heading"])
    inside = ""

    def replace(found: re.Match[str]) -> str:
        nonlocal inside
        if found["heading"]:
            inside = found["heading"]
            return found[0]
        heading = _heading(found["name"], inside, headings)
        code = f"<code>{found['name']}</code>"
        return f'<a href="#{heading}">{code}</a>' if heading else code

    return NAMED.sub(replace, html)


def _heading(name: str, inside: str, headings: dict[str, None]) -> str | None:
    """Where `name` leads in the docstring of `inside`: to the nearest thing of that name."""
    scope = inside
    while scope:
        if f"{scope}.{name}" in headings:
            return f"{scope}.{name}"
        scope = scope.rpartition(".")[0]
    if name in headings:
        return name
    # forebay.Loader stands under its module: forebay.loader.Loader.
    ends = [h for h in headings if h.endswith("." + name.removeprefix("forebay."))]
    return ends[0] if len(ends) == 1 else None


def _title(page: Path) -> str:
    first = page.read_text().split("\n", 1)[0]
    return first.lstrip("# ").strip()


def _relink(text: str, folder: Path, repository: str) -> str:
    """Links from `folder` to pages of the site stay; links to other files go to the repository."""

    def replace(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if not target.is_relative_to(ROOT) or not target.exists():
            return link[0]  # strict mode names it, if it is a broken link
        path = target.relative_to(ROOT)
        anchor = link[3] or ""
        for page, source in FROM_ROOT.items():
            if str(path) == source:
                return link[1] + page + anchor + link[4]
        if path.parts[0] == "docs" and target.is_file():
            if folder == ROOT:
                return link[1] + str(path.relative_to("docs")) + anchor + link[4]
            return link[0]
        kind = "tree" if target.is_dir() else "blob"
        return f"{link[1]}{repository}/{kind}/main/{path}{anchor}{link[4]}"

    return LINK.sub(replace, text)

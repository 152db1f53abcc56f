"""Hooks of mkdocs.yml: the navigation by folders, and links to files of the repository outside of docs/.

``tox -e docs`` builds the site.  A link to such a file becomes its path as code, if the file exists; otherwise it is a
warning, which fails the strict build.  All other links are checked by mkdocs (``validation`` in mkdocs.yml).
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "tutorials": "Tutorials",
    "how-to": "How-to guides",
    "reference": "Reference",
    "explanation": "Explanation",
    "contributing": "Contributing",
    "evidence": "Evidence",
}
"""Folders of docs/ in the order of the navigation, with their titles."""
_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(#[^)]*)?\)")
_LOG = logging.getLogger("mkdocs.hooks.docs_site")


def on_config(config: Any) -> Any:
    """Set the navigation: the first page, then one section per folder with its pages in the order of their names."""
    docs = Path(config["docs_dir"])
    unknown = sorted({path.parent.name for path in docs.glob("*/*.md")} - set(FOLDERS))
    if unknown:
        _LOG.warning("folders of docs/ without a title in %s: %s", Path(__file__).name, ", ".join(unknown))
    sections = (
        {title: [path.relative_to(docs).as_posix() for path in sorted((docs / folder).glob("*.md"))]}
        for folder, title in FOLDERS.items()
    )
    config["nav"] = [{"Start": "index.md"}, *sections]
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace the links that leave docs/ by the path of their file in the repository."""
    docs, here = Path(config["docs_dir"]).resolve(), Path(page.file.abs_src_path).parent

    def shown(link: re.Match[str]) -> str:
        target = (here / link[2]).resolve()
        if target.is_relative_to(docs):
            return link[0]
        if not target.exists():
            _LOG.warning("%s links to %s, which is not in the repository", page.file.src_uri, link[2])
        return f"{link[1]} (`{target.relative_to(ROOT).as_posix()}`)"

    return _LINK.sub(shown, markdown)

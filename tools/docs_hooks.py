# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs.yml: documents that live outside docs/ become pages, and links out of docs/ stay links in the site.

A page may link to any file of the repository, as it does on a code host. In the site that file is a copy of it under
source/. A link to a file that is not there is left alone, and mkdocs refuses it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parent.parent.resolve()
# Pages of the site by their place in the repository.
_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "readme.md"}
_LINK = re.compile(r"(?<=\]\()(?![a-z][a-z0-9+.-]*:|#)([^)\s#]+)(?=[)\s#])", re.IGNORECASE)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that docs/ does not have."""
    for name, page in _PAGES.items():
        if files.get_file_from_path(page) is None:
            files.append(File.generated(config, page, abs_src_path=str(_ROOT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links to files of the repository into links of the site."""
    here = Path(page.file.abs_src_path or "").resolve()
    docs = Path(config.docs_dir).resolve()

    def link(match: re.Match[str]) -> str:
        target = (here.parent / unquote(match[1])).resolve()
        if (here.is_relative_to(docs) and target.is_relative_to(docs)) or not target.is_relative_to(_ROOT):
            return match[1]
        name = target.relative_to(_ROOT).as_posix()
        if target.is_relative_to(docs):
            uri = target.relative_to(docs).as_posix()
        elif name in _PAGES:
            uri = _PAGES[name]
        elif target.is_file():
            uri = f"source/{name}"
            if files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(target)))
        else:
            return match[1]
        return posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")

    return _LINK.sub(link, markdown)

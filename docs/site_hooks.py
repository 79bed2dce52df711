"""Hooks of mkdocs: the page of all settings, and links that leave docs/.

The site contains only docs/, so links to other files of the repository are replaced by their text.
"""

import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from marsrl.trainer.config.explain import as_markdown

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)[^)]+\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page config.md, the output of `marsrl config --markdown`, which is not in docs/."""
    files.append(File.generated(config, "config.md", content=as_markdown()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return _OUTSIDE.sub(r"\1", markdown)

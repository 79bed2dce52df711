"""Hooks of mkdocs: the page of all settings, and links that leave docs/.

The site has docs/ alone, so links to other files of the repository become their text.
"""

import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from marsrl.trainer.config.explain import as_markdown

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)[^)]+\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """config.md is not in docs/: it is what `marsrl config --markdown` prints."""
    files.append(File.generated(config, "config.md", content=as_markdown()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return _OUTSIDE.sub(r"\1", markdown)

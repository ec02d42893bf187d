"""A hook for mkdocs that adds the generated pages, the changelog and llms.txt."""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # mkdocs imports this file by path

from docs import errors, reference  # noqa: E402  after the path is set


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated files; mkdocs calls this after listing the files in docs/."""
    pages = {
        "reference/settings.md": reference.settings_page(),
        "reference/python.md": reference.python_page(),
        "reference/errors.md": errors.page(),
        "reference/changelog.md": (ROOT / "CHANGELOG.md").read_text(),
        "llms.txt": (ROOT / "llms.txt").read_text().replace("docs/", "").replace(".md)", ".html)"),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files

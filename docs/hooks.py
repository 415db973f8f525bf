"""The notebooks of `examples/notebooks` as pages of the site, with the output they were saved with.

Plain Markdown, so that they look like every other page and load nothing from other hosts.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

FOLDER = Path(__file__).parent.parent / "examples" / "notebooks"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in sorted(FOLDER.glob("*.ipynb")):
        text, images = as_markdown(json.loads(path.read_text(encoding="utf-8")), path.stem)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        files.append(File.generated(config, f"notebooks/{path.name}", abs_src_path=str(path)))
        for name, content in images.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def as_markdown(notebook: dict[str, Any], stem: str) -> tuple[str, dict[str, bytes]]:
    """The page, and its images by file name."""
    parts: list[str] = []
    images: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            if len(parts) == 1:  # below the title and the first paragraph
                parts.append(f"[Download this notebook]({stem}.ipynb){{ download }}")
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            elif "image/png" in data:
                name = f"{stem}-{len(images) + 1}.png"
                images[name] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"[![Plot of the cell above]({name})]({name})")  # a click enlarges it
    return "\n\n".join(parts) + "\n", images

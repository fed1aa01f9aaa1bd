"""The mesh as one HTML file with no outside resource: pick a rank, and its groups light up.

The page holds the sizes, not the groups: its script computes those, so that a world of any size is a small file.
"""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path

from areal_like.alloc.views.data import summary
from areal_like.alloc.views.svg import LIMIT
from areal_like.alloc.views.view import SHARED, MeshView

__all__ = ["render"]

HERE = Path(__file__).parent


def render(view: MeshView) -> str:
    """A complete HTML document; `#rank=5` in its address picks a rank.

    Raises:
        AllocationError: AL106 for a row too long to draw.
    """
    view.window(LIMIT)
    content = summary(view) | {"rank": view.rank, "shared": SHARED}
    _, _, rest = view.headline.partition(view.title + ": ")
    parts = {
        "TITLE": escape(view.title),
        "SUMMARY": escape(rest),
        # "<" is the only character that could end the script element.
        "DATA": json.dumps(content, ensure_ascii=False).replace("<", "\\u003c"),
        "SCRIPT": (HERE / "page.js").read_text(encoding="utf-8"),
    }
    document = (HERE / "page.html").read_text(encoding="utf-8")
    return re.sub(r"@([A-Z]+)@", lambda found: parts[found[1]], document)

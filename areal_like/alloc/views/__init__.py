"""Pictures of a mesh: who is with whom, on which node, with which layers and experts."""

from __future__ import annotations

from areal_like.alloc.views.view import MeshView, ModelParts, Nodes

__all__ = ["FORMATS", "MeshView", "ModelParts", "Nodes", "render"]

FORMATS = ("text", "json", "svg", "html")


def render(view: MeshView, style: str = "text") -> str:
    """The view in one of FORMATS.

    Raises:
        AllocationError: AL106 for a picture (svg, html) with a row too long to draw.
    """
    from areal_like.alloc.views import data, page, svg, text

    renderers = {"text": text.render, "json": data.render, "svg": svg.render, "html": page.render}
    return renderers[style](view)

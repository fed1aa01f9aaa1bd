"""The embedded inference engine: Transformers models, no server.

Order of reading: `engine` (life cycle), `decoding` (the loop over tokens), `sequences` (one request), `sampling`,
`slots` (keys and values), `attention`, `weights` (updates).
"""

from areal_like.engines.huggingface.engine import HuggingFaceEngine

__all__ = ["HuggingFaceEngine"]

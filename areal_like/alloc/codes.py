"""Every code of the language with its one-line summary; `docs/language.md` has an example and the message of each."""

from __future__ import annotations

__all__ = ["CODES"]

CODES: dict[str, str] = {
    # AL0: what is written
    "AL001": "an allocation is a string",
    "AL002": "the string is empty",
    "AL003": "no backend is named",
    "AL004": "the ':' between backend and layout is missing",
    "AL005": "the layout is missing",
    "AL006": "a bracket is missing or superfluous",
    "AL007": "a name is not an identifier",
    "AL008": "the folded form is not attn, then ffn",
    "AL009": "an expression with '+' or '|' over several backends",
    "AL010": "unknown letter",
    "AL011": "a letter has no size",
    "AL012": "a size is zero",
    "AL013": "a size has a leading zero",
    "AL014": "a size has non-ASCII digits",
    "AL015": "a size is not a whole number",
    "AL016": "a size is too large",
    "AL017": "a letter is repeated",
    "AL018": "'*' stands for another letter than d",
    "AL019": "text that does not belong there",
    "AL020": "unknown field",
    # AL1: what the sizes say together
    "AL101": "a letter in the wrong part of the folded form",
    "AL102": "ffn p differs from attn p",
    "AL103": "attn and ffn have different numbers of ranks",
    "AL104": "the experts do not divide the ranks",
    "AL105": "v without p",
    "AL106": "the world is too large",
    "AL107": "d is '*' and has not been resolved",
    "AL108": "the GPUs are no multiple of one replica",
    "AL109": "not a number of GPUs",
    "AL110": "no such dimension, group or rank of the mesh",
    # AL2: what the backend can do
    "AL201": "unknown backend",
    "AL202": "a letter that the backend lacks",
    "AL203": "folding on a backend without experts",
    "AL204": "the backend's plug-in is broken",
    "AL205": "the backend has no engine in this version",
    "AL206": "the backend's engine cannot be imported",
    "AL207": "the backend has another role",
}

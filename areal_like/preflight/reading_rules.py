"""Why the codes matter that are found while a file and its allocation strings are read, each with two examples.

The findings themselves are made where the text is read: `alloc` (AL0 to AL2), `config` (AL8), and
`rollout.agents.environment_file` (AL83).
"""

from __future__ import annotations

from typing import NamedTuple

from areal_like.preflight.registry import Example

__all__ = ["READING_RULES", "ReadingRule"]


class ReadingRule(NamedTuple):
    """Severity, reason and examples of a code."""

    why: str
    bad: Example
    good: Example
    severity: str = "error"


def _string(why: str, bad: str, good: str = "megatron:d4") -> ReadingRule:
    return ReadingRule(why, Example((f'actor.backend="{bad}"',)), Example((f'actor.backend="{good}"',)))


def _key(why: str, bad: tuple[str, ...], good: tuple[str, ...] = (), severity: str = "error") -> ReadingRule:
    return ReadingRule(why, Example(bad), Example(good), severity)


def _file(why: str, bad: str) -> ReadingRule:
    return ReadingRule(why, Example(text=bad), Example())


def _environment(why: str, severity: str = "error") -> ReadingRule:
    """Of an environment file (docs/rollout.md), which no job file can show."""
    return ReadingRule(why, Example(), Example(), severity)


MOE = "megatron:(attn:d4|ffn:e4)"

READING_RULES: dict[str, ReadingRule] = {
    "AL002": _string("Every role that runs has a layout.", " "),
    "AL003": _string("The name before ':' says which engine runs the model.", "d4t2"),
    "AL004": _string("Backend and layout stand on either side of ':'.", "megatron d4"),
    "AL005": _string("Without a size nothing says how many ranks there are.", "megatron:"),
    "AL006": _string(
        "A bracket too few or too many: what belongs to which part is open.", "megatron:(attn:d4|ffn:e4", MOE
    ),
    "AL007": _string("Names become names of processes and files.", "megatron[a-b]:d4", "megatron[a_b]:d4"),
    "AL008": _string(
        "Both parts must be there, in this order, so that nobody misreads them.", "megatron:(ffn:e4|attn:d4)", MOE
    ),
    "AL009": _string(
        "One string is one model: a job with several has one `backend` for each role.", "sglang:d4+megatron:d4"
    ),
    "AL010": _string("A letter that is skipped would change the number of ranks.", "megatron:tp4", "megatron:t4"),
    "AL011": _string("A letter without a number says nothing.", "megatron:dt4", "megatron:d1t4"),
    "AL012": _string("No ranks cannot hold a model; 1 means that the letter is not used.", "megatron:d0"),
    "AL013": _string("04 is more often a slip than a 4.", "megatron:d04"),
    "AL014": _string(
        "Digits of other scripts look alike and are not numbers to other tools.", "megatron:d²", "megatron:d2"
    ),
    "AL015": _string("Ranks are counted in whole numbers.", "megatron:d1.5"),
    "AL016": _string("More than 2^20 ranks is a slip of the keyboard.", "megatron:d9999999"),
    "AL017": _string("Two sizes for one letter: other parsers silently take one of them.", "megatron:d4d8"),
    "AL018": _string("Only replicas can be as many as the GPUs allow.", "megatron:d4t*", "megatron:d*t4"),
    "AL019": _string("Text that is skipped could have meant something.", "megatron:d4,t2", "megatron:d4t2"),
    "AL101": _string("Experts are cut by ffn, sequences and stages by attn.", "megatron:(attn:d4e2|ffn:e2)", MOE),
    "AL102": _string(
        "Attention and experts of a layer are on one stage.",
        "megatron:(attn:d4p2|ffn:p4e2)",
        "megatron:(attn:d4p2|ffn:p2e2)",
    ),
    "AL103": _string(
        "Both grids are laid over the same ranks.", "megatron:(attn:d4|ffn:d2e4)", "megatron:(attn:d4|ffn:d1e4)"
    ),
    "AL104": _string(
        "Megatron raises this late, on a worker, in terms of its process groups.", "megatron:d4e3", "megatron:d4e4"
    ),
    "AL105": _string("Virtual stages divide the stages of a pipeline.", "megatron:d4v2", "megatron:d2p2v2"),
    "AL106": _string("More than 2^20 ranks is a slip of the keyboard.", "megatron:d1024t2048"),
    "AL201": _string("Backends are found by name among the installed packages.", "megatorn:d4"),
    "AL202": _string("The engine would ignore the letter or stop.", "fsdp:d2p2", "fsdp:d4"),
    "AL203": _string("The engine has no expert parallelism to fold.", "fsdp:(attn:d4|ffn:e2)", "fsdp:d4"),
    "AL207": _string("A server cannot train and a trainer does not serve.", "sglang:d4"),
    "AL801": ReadingRule("Nothing is known of a file that cannot be read.", Example(), Example()),
    "AL802": _file("What is not YAML has no keys to check.", "seed: ["),
    "AL803": _file("A configuration is a mapping of keys.", "- seed"),
    "AL804": _file("Most YAML readers silently take the last one.", "seed: 1\nseed: 2\n"),
    "AL805": _key("A key with a typing error would be ignored, and its default taken.", ("+experiment_nam=a",)),
    "AL806": _file("The key has no default that could be right.", "experiment_name: a\n"),
    "AL807": _key("The value would be converted to something that was not meant.", ("seed=two",), ("seed=2",)),
    "AL808": _key("The value is outside of what the key allows.", ("gconfig.top_p=1.5",), ("gconfig.top_p=0.9",)),
    "AL809": _key(
        "The value that is referred to does not exist.",
        ("tokenizer_path=${actor.pth}",),
        ("tokenizer_path=${actor.path}",),
    ),
    "AL810": _key("The override names no place in the configuration.", ("seed",), ("seed=2",)),
    "AL811": _key(
        "The value is legal, and this version would not do what it says.", ("gconfig.frequency_penalty=0.5",)
    ),
    "AL812": _key(
        "The key is kept so that files of AReaL load; nothing here depends on it.",
        ("cluster.cluster_name=a",),
        severity="info",
    ),
    "AL813": _key("One of the two would be ignored.", ("saver.trial_name=other",)),
    "AL814": _key(
        "The key belonged to another version or system; the message says what to write instead.",
        ("allocation_mode=sglang:d4+megatron:d4",),
    ),
    "AL815": _key("The section asks for a model that this version does not train.", ("critic={}",)),
    "AL816": _key(
        "Each key is right, and together they cannot be.", ("actor.kl_ctl=0.1",), ("actor.kl_ctl=0.1", "ref={}")
    ),
    "AL817": _key("The key has no effect, because of another key.", ("evaluator.freq_epochs=1",), severity="warning"),
    "AL818": _key(
        "The two names mean the same; the reference knows the key by the name here.",
        ("grpo_group_size=8",),
        severity="info",
    ),
    "AL830": _environment("A run without an environment has nothing to generate."),
    "AL831": _environment("Agent types are found by name among the installed packages, never by an import path."),
    "AL832": _environment("An argument with a typing error would be ignored, and its default taken."),
    "AL833": _environment("The agent would be another one than the file describes, or fail at its first episode."),
    "AL834": _environment("Groups, banks and figures know an environment by its name."),
    "AL835": _environment("Every sampled environment has at least one group of each batch."),
    "AL836": _environment("The package that declares the agent type is broken."),
    "AL837": _environment("Training on the problems of a benchmark makes its figures worthless."),
    "AL838": _environment("An environment that is evaluation_only is never sampled.", severity="warning"),
}

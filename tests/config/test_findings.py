"""What is wrong with a file is found all at once, each fault with its place, and said in words that help."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_like.alloc import Diagnostic
from areal_like.config import CODES, ConfigError, load_config

MINIMAL = """\
experiment_name: e
trial_name: t
rollout: {backend: "huggingface:d1"}
actor:
  backend: megatron:d1
  path: some/model
  optimizer: {lr: 1e-5}
train_dataset: {path: reasoning_gym/chain_sum, batch_size: 4}
"""


def faults(tmp_path: Path, text: str | bytes, *overrides: str) -> tuple[Diagnostic, ...]:
    file = tmp_path / "run.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as raised:
        load_config(file, list(overrides))
    for d in raised.value.diagnostics:
        assert d.code in CODES or d.code < "AL3", d
        assert d.file in (str(file), "<command line>") and d.line and d.column, d
        assert d.render() in str(raised.value)
    return raised.value.diagnostics


def one(tmp_path: Path, text: str | bytes, *overrides: str) -> Diagnostic:
    found = [d for d in faults(tmp_path, text, *overrides) if d.severity == "error"]
    assert len(found) == 1, [d.render() for d in found]
    return found[0]


# (line to add, code, key, line, column, words of the message or help)
CASES = [
    ("gconfg: {}", "AL805", "gconfg", 9, 1, "did you mean gconfig?"),
    ("gconfig: {temprature: 1}", "AL805", "gconfig.temprature", 9, 11, "did you mean temperature?"),
    ("lr: 3", "AL805", "lr", 9, 1, "actor.optimizer.lr"),
    ("seed: two", "AL807", "seed", 9, 7, "must be a whole number, not 'two'"),
    ("seed: 1.5", "AL807", "seed", 9, 7, "must be a whole number, not 1.5"),
    ("seed: true", "AL807", "seed", 9, 7, "must be a whole number, not true"),
    ("seed: -1", "AL808", "seed", 9, 7, "at least 0, not -1"),
    ("seed: null", "AL807", "seed", 9, 7, "not null"),
    ("seed: 1\nseed: 2", "AL804", None, 10, 1, "first stands in line 9"),
    ("gconfig: []", "AL807", "gconfig", 9, 10, "a section: a mapping of keys, not a list"),
    ("gconfig: {n_samples: 0}", "AL808", "gconfig.n_samples", 9, 22, "at least 1, not 0"),
    ("gconfig: {top_p: 1.01}", "AL808", "gconfig.top_p", 9, 18, "at most 1, not 1.01"),
    ("gconfig: {top_p: .nan}", "AL807", "gconfig.top_p", 9, 18, "a finite number"),
    ("gconfig: {greedy: yes}", "AL807", "gconfig.greedy", 9, 19, "write true or false"),
    ("gconfig: {stop: end}", "AL807", "gconfig.stop", 9, 17, "must be a list"),
    ("gconfig: {stop_token_ids: [1, x]}", "AL807", "gconfig.stop_token_ids[1]", 9, 31, "a whole number, not 'x'"),
    ("gconfig: {temperature: 0}", "AL808", "actor.temperature", 9, 24, "above 0, not 0"),
    ("gconfig: {frequency_penalty: 0.5}", "AL811", "gconfig.frequency_penalty", 9, 30, "cannot do"),
    ("device: gpu", "AL808", "device", 9, 9, "'gpu' is not one of auto, cpu, cuda"),
    ("experiment: 1", "AL805", "experiment", 9, 1, "unknown key 'experiment'"),
    ("total_train_n_seqs: 5", "AL811", "total_train_n_seqs", 9, 21, "total_train_epochs and total_train_steps"),
    ("scheduler: {type: ray}", "AL811", "scheduler.type", 9, 19, "write null or local"),
    ("cluster: {n_nodes: 2}", "AL811", "cluster.n_nodes", 9, 20, "one machine"),
    ("teacher: {}", "AL811", "teacher", 9, 1, "key of AReaL"),
    ("allocation_mode: sglang:d4+megatron:d4", "AL814", "allocation_mode", 9, 1, "one `backend` for each role"),
    ("saver: {trial_name: other}", "AL813", "saver.trial_name", 9, 21, "which is t, but says other"),
    ("saver: {fileroot: /a}", "AL813", "saver.fileroot", 9, 19, "cluster.fileroot, which is experiments"),
    ("ref: {backend: megatron:t0}", "AL012", "ref.backend", 9, 25, "cannot be zero"),
    ("ref: {optimizer: {lr: 1}}", "AL811", "ref.optimizer", 9, 18, "is not trained"),
    ("tokenizer_path: ${actor.pth}", "AL809", "tokenizer_path", 9, 17, "did you mean ${actor.path}?"),
    ("tokenizer_path: ${tokenizer_path}", "AL809", "tokenizer_path", 9, 17, "leads back to itself"),
    ("tokenizer_path: a${actor.path", "AL809", "tokenizer_path", 9, 17, "not closed"),
    ("tokenizer_path: a${actor}", "AL809", "tokenizer_path", 9, 17, "is a section"),
    ("tokenizer_path: ${oc.env:HOME}", "AL809", "tokenizer_path", 9, 17, "not a reference to a key"),
    ("tokenizer_path: !!python/name:os.system x", "AL802", None, 9, 17, "tag"),
    ("1: x", "AL805", None, 9, 1, "a key is a name"),
    ("tokenizer_path: a: b", "AL802", None, 9, 18, "quote a text that contains a colon"),
    ("\tseed: 1", "AL802", None, 9, 1, "not with tabs"),
    ("vllm: {seed: ${seed}}", "AL802", None, 9, 15, "put quotes around a reference"),
    ("seed: [", "AL802", None, 10, 1, "not YAML"),
    ("vllm: &a {x: *a}", "AL802", None, 9, 7, "inside the value that it names"),
    ("valid_dataset: {split: test}", "AL806", "valid_dataset.path", 9, 1, "'path' is missing in valid_dataset"),
    ("valid_dataset: {path: x, type: sft}", "AL811", "valid_dataset.type", 9, 32, "reinforcement learning"),
]


@pytest.mark.parametrize(("line", "code", "key", "row", "column", "words"), CASES, ids=[c[0] for c in CASES])
def test_one_fault(tmp_path: Path, line: str, code: str, key: str | None, row: int, column: int, words: str) -> None:
    found = one(tmp_path, MINIMAL + line + "\n")
    assert (found.code, found.key, found.line, found.column) == (code, key, row, column), found.render()
    assert words in found.render()


def replaced(old: str, new: str) -> str:
    assert old in MINIMAL
    return MINIMAL.replace(old, new)


# (text replaced, by, code, key, line, column, words)
CHANGES = [
    ("trial_name: t\n", "", "AL806", "trial_name", 1, 1, "'trial_name' is missing at the top of the file"),
    ("  path: some/model\n", "", "AL806", "actor.path", 4, 1, "'path' is missing in actor"),
    ("trial_name: t", "trial_name: a/b", "AL808", "trial_name", 2, 13, "not a usable name"),
    ("trial_name: t", "trial_name: 5", "AL807", "trial_name", 2, 13, "put quotes around it"),
    ("lr: 1e-5", "lr: 1e-5, type: adm", "AL808", "actor.optimizer.type", 7, 31, "try: adam"),
    ("lr: 1e-5", "lr: fast", "AL807", "actor.optimizer.lr", 7, 19, "must be a number, not 'fast'"),
    ("  optimizer: {lr: 1e-5}\n", "", "AL816", "actor.optimizer", 4, 1, "has no optimizer"),
    ("megatron:d1", "megatron:d1x", "AL010", "actor.backend", 5, 23, "unknown letter 'x'"),
    ("megatron:d1", "'megatron:d1x'", "AL010", "actor.backend", 5, 24, "unknown letter 'x'"),
    ("megatron:d1", "megatorn:d1", "AL201", "actor.backend", 5, 12, "megatron"),
    ("megatron:d1", "${rollout.backend}", "AL207", "actor.backend", 5, 12, "backend huggingface generates"),
    ('"huggingface:d1"', "megatron:d1", "AL207", "rollout.backend", 3, 20, "backend megatron trains"),
    ("lr: 1e-5", "lr: 1e-5}\n  kl_ctl: 0.1\n  mb_spec: {n_mbs: 1", "AL816", "actor.kl_ctl", 8, 3, "add `ref: {}`"),
    (
        "lr: 1e-5",
        "lr: 1e-5}\n  behave_imp_weight_cap: 5\n  mb_spec: {n_mbs: 1",
        "AL814",
        "actor.behave_imp_weight_cap",
        8,
        3,
        "rejection_sampling: {level: token, action: mask, metric: ratio, upper: X}",
    ),
    (
        "lr: 1e-5",
        "lr: 1e-5}\n  megatron: {fp8_config: {dot_product_attention: true}",
        "AL811",
        "actor.megatron.fp8_config.dot_product_attention",
        8,
        50,
        "packed sequences",
    ),
    (
        "lr: 1e-5",
        "lr: 1e-5}\n  rejection_sampling: {upper: 0.9",
        "AL808",
        "actor.rejection_sampling.upper",
        8,
        31,
        "upper must be above 1",
    ),
    (
        "lr: 1e-5",
        "lr: 1e-5}\n  reward_norm: {mean_level: group, group_size: 3",
        "AL813",
        "actor.reward_norm.group_size",
        8,
        48,
        "repeats gconfig.n_samples, which is 1, but says 3",
    ),
]


@pytest.mark.parametrize(
    ("old", "new", "code", "key", "row", "column", "words"),
    CHANGES,
    ids=[f"{c[3]}-{c[2]}-{i}" for i, c in enumerate(CHANGES)],
)
def test_one_changed_line(
    tmp_path: Path, old: str, new: str, code: str, key: str, row: int, column: int, words: str
) -> None:
    found = one(tmp_path, replaced(old, new))
    assert (found.code, found.key, found.line, found.column) == (code, key, row, column), found.render()
    assert words in found.render()


def test_the_caret_stands_under_the_fault(tmp_path: Path) -> None:
    shown = one(tmp_path, MINIMAL + "gconfig: {temprature: 1}\n").render().splitlines()
    assert shown[2] == "  | gconfig: {temprature: 1}"
    assert shown[3] == "  |           ^^^^^^^^^^"


def test_all_faults_of_all_kinds_come_at_once(tmp_path: Path) -> None:
    text = replaced("megatron:d1", "megatron:d2d4") + (
        "seed: x\nseed: 1\ntotal_train_n_seqs: 5\nnope: 1\nsaver: {trial_name: z}\ngconfig: {top_p: 5}\n"
        "critic: {}\ntokenizer_path: ${a.b}\n"
    )
    found = faults(tmp_path, text, "rollout.backend=fsdp:d1", "zzz=1", "=")
    assert {d.code for d in found} == {
        *("AL017", "AL804", "AL807", "AL811", "AL805", "AL813", "AL808", "AL815", "AL809", "AL207", "AL810"),
    }
    assert len([d for d in found if d.code == "AL805"]) == 2


def test_one_fault_is_told_once_although_other_keys_inherit_it(tmp_path: Path) -> None:
    assert one(tmp_path, replaced("  backend: megatron:d1", "  backend: megatron") + "ref: {}\n").key == "actor.backend"
    explicit = replaced("  backend: megatron:d1", "  backend: megatron") + "ref: {backend: '${actor.backend}'}\n"
    assert one(tmp_path, explicit).key == "actor.backend"
    assert [d.key for d in faults(tmp_path, replaced("trial_name: t\n", ""))] == ["trial_name"]
    assert one(tmp_path, MINIMAL + "gconfig: {n_samples: x}\n").key == "gconfig.n_samples"


@pytest.mark.parametrize(
    ("data", "code", "line", "words"),
    [
        (b"", "AL803", 1, "the file is empty"),
        (b"# only a comment\n", "AL803", 1, "the file is empty"),
        (b"null\n", "AL803", 1, "the file is empty"),
        (b"- a\n- b\n", "AL803", 1, "not a mapping"),
        (b"just text\n", "AL803", 1, "not a mapping"),
        (b"a: 1\nb: \xff\xfe\n", "AL801", 2, "not UTF-8"),
        (b"\x00\x01\x02", "AL802", 1, "not allowed"),
        (b"a: {b\n", "AL802", 2, "not YAML"),
        (b"a: 1\n---\nb: 2\n", "AL802", 2, "not YAML"),
        (b"[" * 5000, "AL802", 1, "nested too deeply"),
        (b"%YAML 1.1\n%YAML 1.1\n---\na: 1\n", "AL802", 2, "not YAML"),
        (b'a: "\\UFFFFFFFF"\n', "AL802", 1, "not YAML"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, data: bytes, code: str, line: int, words: str) -> None:
    found = one(tmp_path, data)
    assert (found.code, found.line) == (code, line), found.render()
    assert words in found.message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none.yaml", "No such file"), (tmp_path, "folder"), ("a\0b", "null")):
        with pytest.raises(ConfigError) as raised:
            load_config(path, [])
        (found,) = raised.value.diagnostics
        assert found.code == "AL801" and words in found.message


def test_bombs_are_refused_quickly(tmp_path: Path) -> None:
    aliases = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
    )
    assert "AL802" in {
        d.code for d in faults(tmp_path, MINIMAL + "vllm:\n" + "".join(f"  {x}\n" for x in aliases.split("\n")))
    }
    sections = "vllm:\n  k0: {x: 1}\n" + "".join(
        f"  k{i + 1}: {{" + ", ".join(f"y{j}: '${{vllm.k{i}}}'" for j in range(9)) + "}\n" for i in range(9)
    )
    assert "AL809" in {d.code for d in faults(tmp_path, MINIMAL + sections)}
    texts = "vllm:\n  k0: xxxxxxxxxx\n" + "".join(f"  k{i + 1}: '" + f"${{vllm.k{i}}}" * 10 + "'\n" for i in range(12))
    assert "AL809" in {d.code for d in faults(tmp_path, MINIMAL + texts)}
    deep = "vllm: {k0: 1" + "".join(f", k{i + 1}: '${{vllm.k{i}}}'" for i in range(3000)) + "}\n"
    with _either():
        load_config_text(tmp_path, MINIMAL + deep)


class _either:
    """Loads, or raises ConfigError."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is None or issubclass(kind, ConfigError)


def load_config_text(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    load_config(file, [])


def test_warnings_do_not_stop_a_load(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(MINIMAL + "ref: {}\nevaluator: {freq_steps: 1}\ngconfig: {greedy: true, n_samples: 2}\n")
    config = load_config(file, ["actor.rejection_sampling={}"])
    assert [(d.code, d.severity, d.key) for d in config.diagnostics] == [
        ("AL817", "warning", "actor.rejection_sampling"),
        ("AL817", "warning", "gconfig.greedy"),
        ("AL817", "warning", "ref"),
        ("AL817", "warning", "evaluator"),
    ]
    config.ensure_runnable()

"""A group as bytes: whatever it holds comes back, and no byte on the disk can change without being noticed."""

from __future__ import annotations

import math
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bank_tools import make_group, text_group
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_like.data.rows import Row
from areal_like.rollout.bank import BankError, BankReader, RolloutBank
from areal_like.rollout.bank.lines import Damage, frame, scan
from areal_like.rollout.bank.record import Entry, decode, encode
from areal_like.rollout.bank.values import dumps, loads, pack, unpack
from areal_like.rollout.trajectories import Rollout, RolloutGroup, TokenRollout, Turn

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# With halves of surrogate pairs, which broken text has.
TEXT = st.text(st.characters(), max_size=12)
NUMBERS = st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none()
KEYS = TEXT | st.integers() | st.booleans() | st.just("!") | st.tuples(st.integers(), TEXT)
PLAIN: st.SearchStrategy[Any] = st.recursive(
    NUMBERS | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)
TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9)
REWARD = st.none() | st.floats(allow_nan=False)
FIGURES = st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=2)
MESSAGE = st.fixed_dictionaries({"role": TEXT, "content": TEXT})


@st.composite
def turns(draw: st.DrawFn, before: Turn | None = None) -> Turn:
    prompt = draw(TOKENS)
    if before is not None and draw(st.booleans()):
        prompt = [*before.prompt_ids, *before.token_ids, *prompt]
    drawn = draw(TOKENS)
    count = len(drawn)
    exact = st.floats(max_value=0, width=32, allow_nan=False)
    return Turn(
        prompt,
        drawn,
        draw(st.lists(exact, min_size=count, max_size=count) | st.just([])),
        draw(st.lists(st.integers(0, 3), min_size=count, max_size=count) | st.just([])),
        draw(st.sampled_from(["stop", "length"])),
        draw(TEXT),
    )


@st.composite
def token_rollouts(draw: st.DrawFn) -> TokenRollout:
    found: list[Turn] = []
    for _ in range(draw(st.integers(0, 3))):
        found.append(draw(turns(found[-1] if found else None)))
    return TokenRollout(found, draw(REWARD), draw(TEXT), draw(FIGURES))


ROLLOUTS = st.builds(Rollout, st.lists(MESSAGE, max_size=3), REWARD, TEXT, FIGURES)
ROWS = st.builds(
    Row,
    TEXT | st.lists(MESSAGE, max_size=3).map(tuple),
    TEXT,
    st.dictionaries(KEYS, PLAIN, max_size=3),
    st.integers(0, 2**60),
    TEXT,
)
GROUPS = st.builds(
    RolloutGroup,
    TEXT,
    st.integers(0, 2**60),
    ROWS,
    st.lists(token_rollouts(), min_size=1, max_size=4) | st.lists(ROLLOUTS, min_size=1, max_size=3),
)


def types_of(value: Any) -> Any:
    """1 is equal to 1.0 and to True; here they are not."""
    if isinstance(value, dict):
        return {(type(key), key): types_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [types_of(item) for item in value]
    return type(value)


@QUICK
@given(GROUPS)
def test_any_group_comes_back_equal(group: RolloutGroup) -> None:
    entry, payload = encode(group, "float32")
    assert entry.size == len(payload) and Entry.from_record(loads(dumps(entry.to_record()))) == entry
    back = decode(entry, payload)
    assert back == group
    assert types_of(back.row.metadata) == types_of(group.row.metadata)
    assert encode(back, "float32") == (entry, payload)


@QUICK
@given(PLAIN)
def test_any_plain_value_comes_back_with_its_type(value: Any) -> None:
    back = unpack(loads(dumps(pack(value, "value"))))
    assert back == value and types_of(back) == types_of(value)


def test_the_layout_of_a_payload_by_hand() -> None:
    """Two members with the same prompt 1 2 3; the second turn of the first goes on with 9."""
    one = Turn([1, 2, 3], [4, 5], [-0.5, -1.0], [7, 8], "stop", "a")
    two = Turn([1, 2, 3, 4, 5, 9], [6], [-2.0], [8], "length", "b")
    other = Turn([1, 2, 3], [-1], [-4.0], [8], "stop", "c")
    group = RolloutGroup("e", 0, Row("q", "1"), [TokenRollout([one, two], 1.0), TokenRollout([other], None, "no")])
    entry, payload = encode(group, "float16")
    tokens = [1, 2, 3, 4, 5, 9, 6, -1]
    assert payload[:32] == b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)
    # float16: sign, 5 bits of exponent with bias 15, 10 bits of fraction
    assert payload[32:40] == bytes.fromhex("00b8 00bc 00c0 00c4")
    text = loads(payload[40:])
    assert [turn["shared"] for member in text["members"] for turn in member["turns"]] == [0, 5, 3]
    assert text["members"][0]["turns"][0]["versions"] == [[7, 1], [8, 1]]
    assert (entry.tokens, entry.log_probs, entry.text) == (8, 4, len(payload) - 40)
    assert (entry.rewards, entry.versions) == ((1.0, None), (7, 8))
    assert decode(entry, payload) == group


def test_versions_are_runs() -> None:
    turn = Turn([1], [2] * 9000, [], [3] * 4000 + [4] * 5000, "stop")
    entry, payload = encode(RolloutGroup("e", 0, Row("q", ""), [TokenRollout([turn], 1.0)]), "float32")
    assert loads(payload[-entry.text :])["members"][0]["turns"][0]["versions"] == [[3, 4000], [4, 5000]]
    assert entry.size < 4 * 9001 + 400


@pytest.mark.parametrize(("width", "worst"), [("float16", 2**-11), ("float32", 2**-24)])
def test_what_a_width_costs_when_it_is_exponentiated(width: Any, worst: float) -> None:
    """The ratio exp(new - old) is wrong by a factor of exp(error), and the error is half a unit of the last place: at
    most `worst` times the power of two below the log-probability. `docs/bank.md` has the figures."""
    values = -np.random.default_rng(0).exponential(4.0, 50_000)
    turn = Turn([], [0] * len(values), values.tolist(), [], "stop")
    entry, payload = encode(RolloutGroup("e", 0, Row("q", ""), [TokenRollout([turn], 1.0)]), width)
    (member,) = decode(entry, payload).members
    assert isinstance(member, TokenRollout)
    error = np.abs(np.array(member.turns[0].log_probs) - values)
    power = 2.0 ** np.floor(np.log2(np.abs(values)))
    assert (error <= worst * power + 2**-25).all()
    large = (np.abs(values) >= 8) & (np.abs(values) < 16)
    ratio = np.abs(np.expm1(error[large])).max()
    assert 0.9 * worst * 8 < ratio < 1.01 * worst * 8
    if width == "float16":
        assert 0.0035 < ratio < 0.0040, "0.4 % for a token of 1 in 3,000 to 9,000,000"


def test_what_has_no_finite_float16_stays_ordered() -> None:
    turn = Turn([], [1, 2, 3], [-1e9, -math.inf, 0.0], [], "stop")
    entry, payload = encode(RolloutGroup("e", 0, Row("q", ""), [TokenRollout([turn], 1.0)]), "float16")
    (member,) = decode(entry, payload).members
    assert isinstance(member, TokenRollout)
    assert member.turns[0].log_probs == [-65504.0, -math.inf, 0.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: replace(g, members=[]), "group sums/1 has no members"),
        (lambda g: replace(g, members=[g.members[0], Rollout([])]), "members with tokens and members of text"),
        (lambda g: replace(g, row=replace(g.row, metadata={"a": [{"b": {1}}]})), r"row\.metadata\.a\[0\]\.b is a set"),
        (lambda g: replace(g, row=replace(g.row, metadata={"a": np.ones(2)})), r"row\.metadata\.a is a ndarray: the"),
        (lambda g: _with_turn(g, token_ids=[1, 2]), "member 1, turn 0: 12 log_probs for 2 drawn tokens"),
        (lambda g: _with_turn(g, versions=[1]), "member 1, turn 0: 1 versions for 12 drawn tokens"),
        (lambda g: _with_turn(g, prompt_ids=[2**31]), "prompt_ids are no list of whole numbers of 32 bits"),
        (lambda g: _with_turn(g, prompt_ids=[10**30]), "prompt_ids are no list of whole numbers"),
        (lambda g: _with_turn(g, prompt_ids=[1.5]), "prompt_ids are no list of whole numbers"),
        (lambda g: _with_turn(g, prompt_ids=[[1], [2, 3]]), "prompt_ids are no list of whole numbers"),
    ],
)
def test_what_cannot_be_kept_is_named(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode(change(make_group(1)), "float32")


def _with_turn(group: RolloutGroup, **changes: Any) -> RolloutGroup:
    member = group.members[1]
    assert isinstance(member, TokenRollout)
    return replace(group, members=[group.members[0], TokenRollout([replace(member.turns[0], **changes)], 1.0)])


def test_rows_of_generated_tasks_survive() -> None:
    """Their metadata has tuples and keys that are numbers; the task's own scorer reads it."""
    from areal_like.data.reasoning import GeneratedRows

    for task in ("graph_color", "rubiks_cube", "knights_knaves", "complex_arithmetic", "chain_sum", "boxnet"):
        row = GeneratedRows(task, {"size": 2, "seed": 1})[0]
        group = RolloutGroup(task, 0, row, [TokenRollout([], None, "x")])
        back = decode(*encode(group, "float32")).row
        assert back == row and "entry" in back.metadata


# Lines.


def test_a_flipped_newline_spoils_one_line_and_not_two(tmp_path: Path) -> None:
    file, text = tmp_path / "f", b"".join(frame({"n": i}) for i in range(3))
    for place in [i for i, byte in enumerate(text) if byte == 10][:-1]:
        file.write_bytes(text[:place] + b"x" + text[place + 1 :])
        found = list(scan(file))
        assert [type(item) for item in found].count(Damage) == 1 and len(found) == 3, place


@pytest.mark.parametrize(("cut", "torn"), [(0, []), (1, [(True, 43)]), (20, [(True, 43)]), (41, []), (42, [])])
def test_a_torn_tail_is_told_from_damage(tmp_path: Path, cut: int, torn: list[tuple[bool, int]]) -> None:
    """A line of 7 bytes is 42 with its check, a blank, and the newline before and after it."""
    text = frame({"n": 1}) + frame({"n": 2})
    (tmp_path / "f").write_bytes(text[: 84 - cut])
    found = list(scan(tmp_path / "f"))
    assert found[0] == (1, {"n": 1}) and len(found) == (1 if cut > 40 else 2)
    assert [(d.torn, d.offset) for d in found if isinstance(d, Damage)] == torn


# Every byte of a bank.


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RolloutGroup]]:
    """Three groups, the first of them trained by the step of the checkpoint."""
    folder = tmp_path_factory.mktemp("flipped") / "bank"
    groups = [make_group(0, tokens=2), make_group(1, tokens=2), text_group(2)]
    with RolloutBank.open(folder) as bank:
        for group in groups:
            bank.append(group).result(30)
        bank.mark_consumed([groups[0].key], 1)
    return folder, groups[1:]


def flips(folder: Path, every: int) -> list[tuple[Path, int, int]]:
    draw = random.Random(3)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    assert len(files) == 4
    places = [(file, offset) for file in files for offset in range((folder / file).stat().st_size)]
    return [(file, offset, 1 << draw.randrange(8)) for file, offset in places[::every]]


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_no_flipped_byte_changes_a_group_or_goes_unnoticed(
    bank: tuple[Path, list[RolloutGroup]], tmp_path: Path, every: int
) -> None:
    folder, expected = bank
    copy, seen = tmp_path / "bank", set()
    for file, offset, bit in flips(folder, every):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        content = bytearray((copy / file).read_bytes())
        content[offset] ^= bit
        (copy / file).write_bytes(content)
        where = (file.name, offset, bit)
        notes: list[str] = []
        try:
            with BankReader(copy) as reader:
                found = reader.verify()
            with RolloutBank.open(copy, note=notes.append) as bank_:
                recovered = bank_.recover(1)
        except BankError as error:
            assert file.name == "manifest.json" and "manifest.json" in str(error), where
            seen.add(file.name)
            continue
        damages = [*found.damages, *found.torn]
        assert [(d.file.name, d.file.parent.parent) for d in damages] == [(file.name, copy)], where
        assert damages[0].offset <= offset + 1, where
        assert all(group in expected for group in recovered.groups), where
        if file.name == "consumed.log":  # markers are there twice: the trained group stays trained
            assert recovered.groups == expected, where
        assert len(recovered.groups) == len(expected) or recovered.dropped, where
        if recovered.dropped:
            assert any(str(copy / file) in note and "byte" in note for note in notes), where
        seen.add(file.name)
    assert seen == {"manifest.json", "data.bin", "index.log", "consumed.log"}


def test_a_short_slice_and_bytes_without_an_owner(tmp_path: Path) -> None:
    with RolloutBank.open(tmp_path) as bank:
        for i in range(3):
            bank.append(make_group(i)).result(30)
    data = next(tmp_path.rglob("data.bin"))
    size = data.stat().st_size
    data.write_bytes(data.read_bytes()[:-10])
    with BankReader(tmp_path) as reader:
        found = reader.verify()
        assert found.groups == 2 and found.damages[0].key == ("sums", 2)
        assert "bytes are there" in found.damages[0].problem and found.damages[0].offset > size // 2
        with pytest.raises(BankError, match="this group is lost"):
            reader.group(("sums", 2))
    with RolloutBank.open(tmp_path, note=lambda _: None) as bank:
        recovered = bank.recover(0)
        assert recovered.groups == [make_group(0), make_group(1)] and recovered.counts() == {"damaged": 1}
        assert recovered.dropped[0].key == ("sums", 2)
        assert bank.recover(0).dropped == [], "it is gone, and reported once"
    data = next(tmp_path.rglob("data.bin"))
    data.write_bytes(data.read_bytes() + b"half a group")
    with BankReader(tmp_path) as reader:
        assert reader.verify().unused == 12 and reader.verify().damages == []


def test_damage_that_a_compaction_meets_is_reported(tmp_path: Path) -> None:
    notes: list[str] = []
    with RolloutBank.open(tmp_path, note=notes.append) as bank:
        for i in range(4):
            bank.append(make_group(i)).result(30)
        data = next(tmp_path.rglob("data.bin"))
        content = bytearray(data.read_bytes())
        content[-1] ^= 1
        data.write_bytes(content)
        bank.mark_consumed([("sums", i) for i in range(3)], 1)
        bank.append(make_group(4)).result(30)
        bank.checkpoint(1)
        bank.mark_consumed([("sums", 3)], 2)  # whoever was given the group before may train on it
        assert "damaged" in notes[0] and "group sums/3" in notes[0] and str(data) in notes[0]
        assert bank.recover(1).groups == [make_group(4)]

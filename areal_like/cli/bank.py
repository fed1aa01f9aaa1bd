"""`areal-like bank ls|show|verify PATH`: what a rollout bank holds. Nothing is changed, also while a run writes it."""

from __future__ import annotations

import argparse
import json
import sys
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_like.cli.arguments import Commands

if TYPE_CHECKING:
    from areal_like.rollout.bank import BankReader
    from areal_like.rollout.trajectories import Rollout, RolloutGroup, TokenRollout

__all__ = ["add"]


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "bank",
        help="look into a rollout bank: list its groups, show one, verify all",
        description="Looks into a rollout bank without changing it, also while a run writes it.",
    )
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("ls", help="list the groups")
    showing = actions.add_parser("show", help="show one group")
    verifying = actions.add_parser("verify", help="read every byte that counts; exits with 1 when something is damaged")
    for action in (listing, showing, verifying):
        action.add_argument("path", type=Path, metavar="PATH", help="the folder of the bank")
        action.add_argument("--json", action="store_true", help="print JSON")
    showing.add_argument("name", metavar="NAME", help="of the group, as `ls` prints it: gsm8k/17")
    listing.set_defaults(run=_running(_list))
    showing.set_defaults(run=_running(_show))
    verifying.set_defaults(run=_running(_verify))


def _running(action: Callable[[BankReader, argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        from areal_like.rollout.bank import BankError, BankReader

        try:
            with BankReader(options.path) as bank:
                return action(bank, options)
        except BrokenPipeError:
            raise
        except (BankError, OSError) as error:
            print(error, file=sys.stderr)
            return 2

    return run


def _list(bank: BankReader, options: argparse.Namespace) -> int:
    rows = [
        {
            "name": entry.name,
            "members": len(entry.rewards),
            "failed": sum(reward is None for reward in entry.rewards),
            "reward": _mean(entry.rewards),
            "tokens": entry.tokens,
            "versions": entry.versions,
            "bytes": entry.size,
            "consumed": bank.contents.consumed.get(key),
        }
        for key, entry in bank.contents.entries.items()
    ]
    if options.json:
        print(json.dumps({**asdict(bank.manifest), "groups": rows}, indent=2))
        return 0
    manifest = bank.manifest
    print(f"{options.path}: {len(rows)} groups, {manifest.generation}, timeline {manifest.timeline[:8]}", end="")
    print(f", checkpoint of step {manifest.checkpoint}")
    table = [list(rows[0])] + [[_cell(value) for value in row.values()] for row in rows] if rows else []
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *cells]))
    return 0


def _show(bank: BankReader, options: argparse.Namespace) -> int:
    keys = {entry.name: key for key, entry in bank.contents.entries.items()}
    if options.name not in keys:
        from areal_like.alloc.diagnostics import closest

        near = closest(options.name, keys)
        hint = f"; did you mean {near}?" if near else ""
        print(f"{options.path} has no group {options.name!r}{hint}", file=sys.stderr)
        return 2
    group = bank.group(keys[options.name])
    if options.json:
        print(json.dumps(asdict(group), indent=2, default=str))
    else:
        print("\n".join(_described(group, bank.contents.consumed.get(group.key))))
    return 0


def _described(group: RolloutGroup, consumed: int | None) -> list[str]:
    from areal_like.rollout.trajectories import Rollout

    lines = [f"{group.environment}/{group.index}: row {group.row.index} of {group.row.dataset or 'no dataset'}"]
    lines.append("not trained yet" if consumed is None else f"step {consumed} trains it")
    lines += ["prompt", *_indented(_conversation(group.row.prompt)), "answer", *_indented(group.row.answer)]
    members: Sequence[TokenRollout | Rollout] = group.members
    for number, member in enumerate(members):
        worth = f"failed: {member.failure}" if member.reward is None else f"reward {member.reward:g}"
        figures = "".join(f", {name} {value:g}" for name, value in member.figures.items())
        lines.append(f"member {number}: {worth}{figures}")
        if not isinstance(member, Rollout):
            for turn in member.turns:
                versions = sorted(set(turn.versions))
                by = f", version {'-'.join(map(str, sorted({versions[0], versions[-1]})))}" if versions else ""
                counts = f"{len(turn.prompt_ids)} + {len(turn.token_ids)} tokens"
                lines += [f"  turn: {counts}, {turn.finish_reason}{by}", *_indented(turn.text)]
        else:
            lines += _indented(_conversation(member.messages))
    return lines


def _verify(bank: BankReader, options: argparse.Namespace) -> int:
    found = bank.verify()
    if options.json:
        damages = [_damage(damage) for damage in found.damages]
        torn = [_damage(damage) for damage in found.torn]
        print(json.dumps({"groups": found.groups, "damages": damages, "torn": torn, "unused": found.unused}, indent=2))
    else:
        for damage in found.damages:
            print(f"damaged: {damage}")
        for damage in found.torn:
            print(f"unfinished: {damage} (of a write that goes on, or that a kill ended)")
        if found.unused:
            print(f"{found.unused} bytes of data.bin belong to no group")
        print(f"{found.groups} groups are whole, {len(found.damages)} damages")
    return 1 if found.damages else 0


def _damage(damage: Any) -> dict[str, Any]:
    return {"file": str(damage.file), "offset": damage.offset, "problem": damage.problem, "group": damage.key}


def _mean(rewards: tuple[float | None, ...]) -> float | None:
    found = [reward for reward in rewards if reward is not None]
    return sum(found) / len(found) if found else None


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return "-".join(map(str, dict.fromkeys(value)))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _conversation(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _indented(text: str) -> list[str]:
    """Lines as a terminal may see them: a model can write control characters, and halves of surrogate pairs."""
    return [f"    {''.join(map(_visible, line))}" for line in text.splitlines()]


def _visible(character: str) -> str:
    hidden = unicodedata.category(character) in ("Cc", "Cs") and character != "\t"
    return character.encode("unicode_escape").decode() if hidden else character

"""`headway checkpoint ls|verify|prune`: look at checkpoints and remove old ones, without torch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from headway.checkpoint.folders import (
    Checkpoint,
    checkpoints_in,
    leftovers_in,
    prune,
    recover,
    remove,
)
from headway.checkpoint.manifest import unlisted_files, verify
from headway.commands.flags import Parser
from headway.commands.tables import print_table
from headway.errors import CheckpointError

ACTIONS = ("ls", "verify", "prune")
_ACTIONS = """
ls [FOLDER]        list the checkpoints in a folder, the newest last
verify FOLDER ...  compare every file with the checksums of the manifest; 1 if one is damaged
prune FOLDER       remove all but the newest --keep checkpoints
"""


def main(argv: Sequence[str]) -> int:
    """Run `headway checkpoint` with these words and return the exit code."""
    parser = make_parser()
    parsed, words = parser.parse_words(argv)
    if not words or words[0] not in ACTIONS:
        parser.error(f"headway checkpoint requires one of {', '.join(ACTIONS)}")
    action, folders = words[0], [Path(word) for word in words[1:]]
    if action != "prune" and (parsed.keep is not None or parsed.leftovers):
        parser.error(f"--keep and --leftovers are for prune, not for {action}")
    if action == "verify":
        return _verify(folders or [Path(".")])
    if len(folders) > 1:
        parser.error(f"unexpected argument {words[2]!r}")
    folder = folders[0] if folders else Path(".")
    if action == "ls":
        return _list(folder, as_json=parsed.json)
    keep = parsed.keep
    if not folders or keep is None or not keep.isdecimal() or int(keep) < 1:
        parser.error("prune requires a folder, and --keep with the number of checkpoints that stay")
    return _prune(folder, int(keep), with_leftovers=parsed.leftovers)


def make_parser() -> Parser:
    """Return the parser of the command's flags."""
    parser = Parser(
        "checkpoint",
        "Look at the checkpoints that accelerator.save_state() wrote, and remove old ones.",
        usage="headway checkpoint ls|verify|prune [--keep N] [--leftovers] [--json] [FOLDER ...]",
        appendix=_ACTIONS,
    )
    parser.flag("--keep", metavar="N", help="how many checkpoints prune leaves, 1 or more")
    parser.flag(
        "--leftovers",
        help="let prune remove what saves that were cut off have left, too; no training may be "
        "saving to the folder meanwhile",
    )
    parser.flag("--json", help="print one JSON object: {checkpoints}, for ls")
    return parser


def _list(folder: Path, *, as_json: bool) -> int:
    found = checkpoints_in(folder)
    if as_json:
        listed = [_facts(one) for one in found]
        print(json.dumps({"checkpoints": listed}, indent=2))
        return 0
    head = ("checkpoint", "step", "epoch", "ranks", "size", "saved")
    rows = [
        (
            one.path.name,
            str(one.manifest.step),
            str(one.manifest.epoch),
            str(one.manifest.world_size),
            f"{_size(one) / 2**20:.1f} MiB",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.manifest.saved_at)),
        )
        for one in found
    ]
    print_table(head, rows)
    if not found:
        print(f"headway: no checkpoint in {folder}", file=sys.stderr)
    return 0


def _facts(one: Checkpoint) -> dict[str, object]:
    return {"path": str(one.path), "size": _size(one)} | {
        name: value for name, value in one.manifest._asdict().items() if name != "files"
    }


def _size(one: Checkpoint) -> int:
    return sum(file.size for file in one.manifest.files)


def _verify(folders: Sequence[Path]) -> int:
    exit_code = 0
    for folder in folders:
        try:
            recover(folder)
            manifest = verify(folder)
        except CheckpointError as error:
            print(f"error: {error}", file=sys.stderr)
            exit_code = CheckpointError.exit_code
            continue
        print(f"{folder}: ok, {len(manifest.files)} files of step {manifest.step}")
        for path in unlisted_files(folder, manifest):
            print(f"{folder}: {path} was added later")
    return exit_code


def _prune(folder: Path, keep: int, *, with_leftovers: bool) -> int:
    for path in prune(folder, keep):
        print(f"removed {path}")
    for path in leftovers_in(folder):
        if with_leftovers:
            remove(path)
        print(f"removed {path}" if with_leftovers else f"{path} is left of a save; --leftovers")
    return 0
